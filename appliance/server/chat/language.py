"""Parsing of structured output fields to one `Language`, or none.

`asked_language` reads the fields of chat and text completions. A route with other field names builds the same two
values and calls `read_language`. This module validates a language; server/routing/grammars.py compiles it in a separate
process.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from appliance.output_formats.constraint import Language
from appliance.server.schema.common import JsonSchemaFormat, ResponseFormat, SamplingFields, StructuredOutputs
from engine.api.errors import RequestError
from engine.structured.schema import enforce

log = logging.getLogger(__name__)

MAX_NESTING: Final = 64  # levels of a schema (SO-02)
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ANY_OBJECT: Final = {"type": "object"}


def asked_language(request: SamplingFields) -> Language | None:
    """Return the language that constrains the reply. Raise RequestError for several languages or an invalid one."""
    return read_language(request.response_format, request.structured_outputs)


def read_language(form: ResponseFormat | None, outputs: StructuredOutputs | None) -> Language | None:
    """Return the language of `response_format` or of `structured_outputs`. Raise RequestError if both are set."""
    wanted = _from_format(form) if form is not None else None
    if outputs is None:
        return wanted
    if wanted is not None:
        message = "You can only use one kind of structured output: response_format or structured_outputs."
        raise RequestError(message, "structured_outputs")
    return _from_outputs(outputs)


def schema_language(
    schema: Mapping[str, Any] | bool, *, strict: bool, param: str, options: Mapping[str, Any] | None = None
) -> Language:
    """Return the language of a JSON schema, reduced to keywords that masks can enforce.

    `options` are llguidance options for white space.
    """
    _check_nesting(schema, param)
    enforced = enforce(schema if isinstance(schema, bool) else dict(schema), strict=strict, param=param)
    if enforced.dropped:
        log.warning("%s: not enforced, as strict is not set: %s", param, ", ".join(enforced.dropped))
    if options:
        whole = {} if enforced.schema is True else enforced.schema
        if isinstance(whole, dict):
            return Language("json_schema", {**whole, "x-guidance": dict(options)}, param)
    return Language("json_schema", enforced.schema, param)


def _from_format(form: ResponseFormat) -> Language | None:
    param = "response_format"
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Language("json_schema", _ANY_OBJECT, param)
    if form.type == "structural_tag":
        return _structural(form.model_dump(exclude={"type", "json_schema"}, exclude_unset=True), param)
    asked = form.json_schema
    if asked is None or asked.schema_ is None:
        raise RequestError("response_format of type json_schema needs json_schema with a schema in it.", param)
    return _named_schema(asked, asked.schema_, param)


def _named_schema(asked: JsonSchemaFormat, schema: dict[str, Any] | bool, param: str) -> Language:
    return schema_language(schema, strict=bool(asked.strict), param=param)


def _from_outputs(outputs: StructuredOutputs) -> Language:
    param = "structured_outputs"
    given = {kind: getattr(outputs, "json_" if kind == "json" else kind) for kind in _KINDS}
    used = [kind for kind in _KINDS if given[kind] is not None and (given[kind] is not False or kind == "json")]
    if not used:
        names = ", ".join(_KINDS[:-1])
        message = f"You must use one kind of structured output of {names} and {_KINDS[-1]}; none is given."
        raise RequestError(message, param)
    if len(used) > 1:
        message = f"You can only use one kind of structured output, but {', '.join(used)} are given."
        raise RequestError(message, param)
    if outputs.backend is not None:
        raise RequestError(f"{param}: the backend cannot be selected. Leave _backend out.", param)
    kind, value = used[0], given[used[0]]
    if kind in ("json", "json_object"):
        return _json(_ANY_OBJECT if kind == "json_object" else _parsed(value, param), outputs, param)
    if kind == "structural_tag":
        return _structural(_parsed(value, param), param)
    if kind == "choice":
        if not value:
            raise RequestError(f"{param}: the list of choices is empty", param)
        return Language("choice", value, param)
    if not value or "\0" in value:
        raise RequestError(f"{param}: the {kind} is empty or has a NUL character", param)
    return Language("regex" if kind == "regex" else "grammar", value, param)


def _json(schema: dict[str, Any] | bool, outputs: StructuredOutputs, param: str) -> Language:
    options: dict[str, Any] = {}
    if outputs.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if outputs.whitespace_pattern is not None:
        if outputs.disable_any_whitespace:
            message = f"{param}: whitespace_pattern and disable_any_whitespace cannot be combined. Leave one out."
            raise RequestError(message, param)
        options["whitespace_pattern"] = outputs.whitespace_pattern
    _check_nesting(schema, param)
    if outputs.disable_additional_properties:
        schema = _closed(schema)
    return schema_language(schema, strict=True, param=param, options=options)


def _closed(value: Any) -> Any:
    """Add `additionalProperties: false` to all objects that do not set it."""
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    closed = {name: each if name in ("const", "enum", "default") else _closed(each) for name, each in value.items()}
    is_object = value.get("type") == "object" or isinstance(value.get("properties"), dict)
    if is_object and "additionalProperties" not in value and "patternProperties" not in value:
        closed["additionalProperties"] = False
    return closed


def _structural(tag: Any, param: str) -> Language:
    if not isinstance(tag, dict):
        raise RequestError(f"{param}: a structural tag must be a JSON object", param)
    _check_nesting(tag, param)
    return Language("structural_tag", tag, param)


def _parsed(value: Any, param: str) -> Any:
    """Return a schema or tag, parsed if it is JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param}: the schema is not valid JSON: {error}", param) from error
    if not isinstance(value, dict | bool):
        raise RequestError(f"{param}: the schema must be a JSON object", param)
    return value


def _check_nesting(value: Any, param: str) -> None:
    """Raise RequestError for a value that is nested too deep. Not recursive, because clients control the value."""
    depth, level = 0, [value]
    while level := [
        child
        for item in level
        if isinstance(item, dict | list)
        for child in (item.values() if isinstance(item, dict) else item)
    ]:
        depth += 1
        if depth > 2 * MAX_NESTING:
            raise RequestError(f"{param}: the schema is nested too deeply; the limit is {MAX_NESTING} levels", param)
