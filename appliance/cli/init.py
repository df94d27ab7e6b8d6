"""`slipway init MODEL`: write a commented manifest for a checkpoint and this machine.

Required keys are written. Keys that are often changed are commented out (`#key: value`, without a space, so that
removing the # enables them), next to their resolved value on this machine and its reason.
"""

import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from appliance.checkpoints.download_spec import find as source
from appliance.checkpoints.download_spec import policy
from appliance.checkpoints.metadata import facts
from appliance.cli.model_argument import named_model
from appliance.config import exits
from appliance.config.environment import environment
from appliance.config.keys import Key, find, keys
from appliance.config.manifest import API_VERSION
from appliance.config.problems import Refused
from appliance.config.schema_file import schema_text
from appliance.config.settings import Given, load
from appliance.config.spelling import spell
from appliance.hardware.machine import Machine
from appliance.lockfile.files import revision
from appliance.planning.memory import spell_bytes
from appliance.planning.plan import Effective, Plan
from appliance.planning.validate import validate
from engine.api.errors import EngineError
from engine.models.checkpoint import Checkpoint, read_checkpoint

SCHEMA = "slipway.schema.json"
PATH = ("model", "source", "path")
REPOSITORY = ("model", "source", "huggingface", "repo")
NAMES = ("model", "names")
# Keys that are often changed, in addition to those that the plan resolves.
LIKELY = (
    *("quantization.weights", "quantization.kv_cache", "parallelism.data"),
    *("hardware.device", "hardware.memory_share", "hardware.kv_cache_memory"),
    *("engine.scheduling.max_running", "endpoints.host", "endpoints.port"),
    *("limits.max_waiting", "limits.max_output_tokens", "lifecycle.drain", "observability.log_format"),
)
AMBIGUOUS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
_COLUMN = 34  # of the comments
_WIDTH = 120


class Unreadable(Exception):
    """Raised if the folder is not a supported checkpoint. The message says why."""


@dataclass(frozen=True)
class Line:
    """One key: its value as YAML, a comment, and whether it is written or commented out."""

    path: tuple[str, ...]
    value: str
    comment: str = ""
    written: bool = False


def init(model: str, output: Path | None, *, force: bool, machine: Machine | None = None) -> int:
    """Write the manifest of a folder, a .gguf file or a repository of the hub, for this machine or a described one; `-`
    prints it. Return the exit code."""
    target = output or Path(f"{_name(model) or 'service'}.yaml")
    printed = str(target) == "-"
    if not printed and target.exists() and not force:
        message = f"{target}: already exists. Overwrite it with --force, or choose another file with -o FILE"
        print(message, file=sys.stderr)
        return exits.MANIFEST.number
    home = Path() if printed else target.parent
    try:
        text, plan = compose(model, home, machine, schema=None if printed else SCHEMA)
    except Unreadable as error:
        print(f"{model}: {error}", file=sys.stderr)
        return exits.CHECKPOINT.number
    except Refused as refused:
        told = "\n".join(f"  {problem.key}: {problem.message}" for problem in refused.problems)
        print(f"{model} cannot be served on {_called(machine)}:\n{told}", file=sys.stderr)
        return refused.cause.number
    if printed:
        print(text, end="")
        return exits.OK.number
    try:
        target.write_text(text)
        made = [str(target)]
        if not (home / SCHEMA).exists():
            (home / SCHEMA).write_text(schema_text())
            made.append(f"{home / SCHEMA} (for editors)")
    except OSError as error:
        print(f"{error.filename}: cannot write the file: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return exits.INTERNAL.number
    memory = f"{spell_bytes(plan.memory.total)} an engine on {plan.engines[0].hardware.device}"
    print(f"{' and '.join(made)}: {plan.architecture}, context {plan.engines[0].model.max_context}, {memory}")
    print(f"next: slipway check {target}; slipway plan {target}; slipway serve {target}")
    return exits.OK.number


def compose(model: str, home: Path, machine: Machine | None = None, *, schema: str | None) -> tuple[str, Plan]:
    """Return the text of the manifest, and its plan on the machine. `home` is the folder for the manifest. Raise
    Unreadable or Refused."""
    hub = _is_on_hub(model)
    try:
        checkpoint = None if hub else read_checkpoint(Path(model))
    except EngineError as error:
        raise Unreadable(str(error)) from error
    written = [
        Line(REPOSITORY, _quoted(model), written=True) if hub else Line(PATH, _path(Path(model), home), written=True),
        Line(NAMES, f"[{_quoted(_name(model) or 'model')}]", "the first name is the one in replies", True),
    ]
    with _draft("\n".join([f"apiVersion: {API_VERSION}", *_rendered(written)]) + "\n", home) as path:
        given = Given(path, (), _environment())
        plan = validate(given, machine)
        if checkpoint is not None:
            head = _head(checkpoint, _name(model), schema, _called(machine))
        else:
            settings = load(given)
            with facts(source(settings, given.environ), policy(settings, given.environ), given.environ) as known:
                read = read_checkpoint(known.folder)
                head = _head(read, model, schema, _called(machine), known.revision)
    return "\n".join([*head, f"apiVersion: {API_VERSION}", *_rendered([*written, *_offered(plan)])]) + "\n", plan


def _is_on_hub(model: str) -> bool:
    found = named_model(model)
    return found is not None and "huggingface" in found.source


def _name(model: str) -> str:
    return Path(model).name if _is_on_hub(model) else Path(model).resolve().name.removesuffix(".gguf")


def _environment() -> dict[str, str]:
    """Return the variables that locate the hub and its cache; other variables would change the plan."""
    names = (name for name in environment() if name in ("HOME", "XDG_CACHE_HOME") or name.startswith("HF_"))
    return {name: environment()[name] for name in names}


def _path(folder: Path, home: Path) -> str:
    """Return a path relative to the manifest's folder if the checkpoint is inside, so that both can be moved
    together."""
    whole, above = folder.resolve(), home.resolve()
    return _quoted(str(whole.relative_to(above)) if whole.is_relative_to(above) and whole != above else str(whole))


def _quoted(text: str) -> str:
    """Return the text unquoted if every YAML parser reads it as a string: letters, digits and -._/ after a letter or
    the start of a path. Else quote it."""
    plain = re.fullmatch(r"(/|\.\.?/)?[A-Za-z_][\w./-]*", text, re.ASCII) and text.lower() not in AMBIGUOUS
    return text if plain else msgspec.json.encode(text).decode()


def _called(machine: Machine | None) -> str:
    return machine.described if machine and machine.described else "this machine"


@contextmanager
def _draft(text: str, home: Path) -> Iterator[Path]:
    """Create a temporary file in the manifest's folder, because its paths are relative to that."""
    path = home / f".slipway-init-{os.getpid()}.yaml"
    try:
        path.write_text(text)
        yield path
    except OSError as error:
        raise Unreadable(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error
    finally:
        path.unlink(missing_ok=True)


def _head(checkpoint: Checkpoint, name: str, schema: str | None, called: str, commit: str | None = None) -> list[str]:
    from engine.text.tokenizer import chat_templates

    tensors = checkpoint.tensors.values()
    stored = sum(info.bytes for info in tensors)
    kinds = ", ".join(sorted({info.dtype for info in tensors}))
    form = f"quantized by {checkpoint.quantization.method}" if checkpoint.quantization else checkpoint.dtype
    files = len({info.file for info in tensors})
    where = "one file" if files == 1 else f"{files} files"
    lines = [f"# {name}: {checkpoint.architecture}, {_parameters(checkpoint)}{form};"]
    lines.append(f"# {spell_bytes(stored)} of weights ({kinds}) in {where}.")
    if commit := commit or revision(checkpoint.path):
        lines.append(f"# Revision {commit}.")
    if checkpoint.model.encoder is not None:
        lines.append(
            "# Encoder-decoder model: use /v1/completions, the encoder reads the prompt. Chats are not supported."
        )
    elif chat_templates(checkpoint.path) is None:
        lines.append("# The checkpoint has no chat template; /v1/chat/completions needs model.chat_template.")
    lines.append(f"# Remove the # to set a key. The comment after it is the value on {called}, and the reason.")
    lines.append(
        "# All keys: slipway explain model (and quantization, hardware, engine, endpoints, limits, lifecycle …)."
    )
    return [*lines, *([f"# yaml-language-server: $schema={schema}"] if schema else [])]


def _parameters(checkpoint: Checkpoint) -> str:
    if checkpoint.quantization is not None:  # several quantized integers are packed into one element
        return ""
    count = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return f"{count / 1e9:.1f} billion weights, " if count >= 1e8 else f"{count / 1e6:.1f} million weights, "


def _offered(plan: Plan) -> list[Line]:
    """Return the keys that were resolved with a reason, and those that are often changed, in order of the schema."""
    effective = {one.key: one for one in plan.effective}
    order = list(keys())
    offered = [
        _line(key, one)
        for key, one in ((find(tuple(name.split("."))), one) for name, one in effective.items())
        if key is not None and key.path not in (PATH, REPOSITORY, NAMES) and (one.reason or key.name in LIKELY)
    ]
    return sorted(offered, key=lambda line: order.index(line.path))


def _line(key: Key, one: Effective) -> Line:
    value = one.value
    if value is None:
        value = one.resolved if one.resolved is not None else key.examples[0]
    if one.reason:
        shown = spell_bytes(one.resolved) if key.form == "size" else spell(one.resolved, key.form)
        told = one.value != "auto" or one.reason.startswith(shown)
        comment = one.reason if told else f"{shown}: {one.reason}"
    else:
        comment = key.text.replace("\n", " ").split(";")[0].rstrip(".")
    return Line(key.path, spell(value, key.form), comment)


def _rendered(lines: list[Line]) -> Iterator[str]:
    """Return YAML with the sections of the keys; a section without written keys is commented out as well."""
    written = {line.path[:length] for line in lines if line.written for length in range(len(line.path))}
    opened: tuple[str, ...] = ()
    for line in sorted(lines, key=lambda line: list(keys()).index(line.path)):
        above = line.path[:-1]
        for depth in range(len(above)):
            section = above[: depth + 1]
            if opened[: depth + 1] != section:
                yield from [""] if depth == 0 else []
                yield _indented(depth, f"{section[-1]}:", section in written, section[:1] in written)
        opened = above
        text = _indented(len(above), f"{line.path[-1]}: {line.value}", line.written, above[:1] in written)
        yield _commented(text, line.comment)


def _indented(depth: int, text: str, written: bool, within: bool) -> str:
    """Indent a line: `  key`; `  #key` in a section that is written; `#  key` in a section that is not."""
    space = "  " * depth
    return f"{space}{text}" if written else f"{space}#{text}" if within else f"#{space}{text}"


def _commented(text: str, comment: str) -> str:
    if not comment:
        return text
    room = _WIDTH - max(len(text), _COLUMN) - 4
    return f"{text:<{_COLUMN}}  # {textwrap.shorten(comment, max(room, 20), placeholder=' …')}"
