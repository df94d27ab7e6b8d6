"""Rendering of Jinja templates as in transformers: a sandbox with trimmed blocks and a few extra functions.

The settings (trim_blocks, lstrip_blocks, tojson without HTML escapes, raise_exception, strftime_now, loop controls, the
generation tag) are the convention of Hugging Face checkpoints. A template can use any amount of memory and time, even
within one operator or filter, so only processes with limits call this module (render_process.py).
"""

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHARACTERS = 64 * 2**20
"""Maximum length of a rendered text."""

Kind = Literal["text", "syntax", "refused", "failed", "limit"]
KINDS: tuple[Kind, ...] = ("text", "syntax", "refused", "failed", "limit")


@dataclass(frozen=True)
class Outcome:
    """Result of rendering a template."""

    kind: Kind
    """`text`: rendered; `syntax`: invalid Jinja; `refused`: the template called raise_exception; `failed`: it raised
    another exception; `limit`: it exceeded the limit of memory or time."""

    text: str
    """The rendered text, or the reason why there is none."""

    place: str = ""
    """Type of the exception and line of the template, without text of the conversation."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks replies for training; serving renders the text inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Refused(jinja2.TemplateError):
    """Raised if the template called raise_exception."""


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise Refused(str(message))


def _environment() -> ImmutableSandboxedEnvironment:
    # Without the optimizer, no expression is evaluated before the template is rendered.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def render(source: str, scope: Mapping[str, Any]) -> Outcome:
    """Render a template with the variables of `scope`."""
    try:
        return Outcome("text", _collected(_compiled(source), scope))
    except Refused as error:
        return Outcome("refused", str(error))
    except jinja2.TemplateSyntaxError as error:
        return Outcome("syntax", str(error), f"line {error.lineno}")
    except RecursionError:
        return Outcome("limit", "it is nested too deep")
    except MemoryError:
        return Outcome("limit", "it takes too much memory")
    except OverflowError as error:
        return Outcome("limit", str(error))
    except Exception as error:  # template code can raise any exception
        return Outcome("failed", str(error), _place(error))


def _collected(template: jinja2.Template, scope: Mapping[str, Any]) -> str:
    kept, size = [], 0
    for part in template.generate(scope):
        size += len(part)
        if size > CHARACTERS:
            raise OverflowError(f"its text has more than {CHARACTERS:,} characters")
        kept.append(part)
    return "".join(kept)


def _place(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f"{type(error).__name__} in line {lines[-1]}" if lines else type(error).__name__
