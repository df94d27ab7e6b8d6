"""All that can be known before anything starts: settings, checkpoint, files and secrets the manifest names, memory.

Reads files, never weights, and never imports torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from appliance import exits
from appliance.declare.problems import Problem, Refused
from appliance.declare.settings import Given, Settings, load
from appliance.declare.versions import spoken
from appliance.manifest import SecretFile
from appliance.plan.machine import Machine, read_machine
from appliance.plan.plan import Plan, plan
from appliance.source.facts import Facts, NotHere, facts
from appliance.source.order import Local, find, policy
from appliance.source.remote import SourceError
from engine.api.errors import CheckpointError, EngineError
from engine.models.checkpoint import Checkpoint, check_tensors, read_checkpoint


class _TokenizerFile(msgspec.Struct):
    """Enough of tokenizer.json to know that it is whole."""

    model: msgspec.Raw


class _TekkenFile(msgspec.Struct):
    """Enough of tekken.json to know that it is whole."""

    config: msgspec.Raw
    vocab: msgspec.Raw


TOKENIZERS = {"tokenizer.json": _TokenizerFile, "tekken.json": _TekkenFile}


def prove(given: Given, machine: Machine | None = None) -> Plan:
    """The plan for what is given, on this machine unless another is described. Of a checkpoint that lies elsewhere its
    small files are downloaded and the headers of its weights are read. Raises Refused with what is wrong, NotPlanned if
    nothing is known of the checkpoint before it is downloaded."""
    settings = load(given)
    with spoken(settings.older):
        return _prove(settings, given.environ, machine)


class NotPlanned(Refused):
    """All that can be seen is right, but the checkpoint has to be downloaded first."""


def _prove(settings: Settings, environ: Mapping[str, str], machine: Machine | None) -> Plan:
    problems = list(_files(settings, environ))
    key = source_key(settings)
    at, name = settings.place(key), ".".join(key)
    found = find(settings, environ)
    if problems and not isinstance(found, Local):
        raise Refused(problems)  # a token that cannot be read asks no server
    try:
        with facts(found, policy(settings, environ), environ) as known:
            checkpoint = _checkpoint(settings, known)
    except NotHere as error:
        raise NotPlanned([*problems, Problem(at, name, str(error))], exits.SOURCE) from error
    except SourceError as error:
        raise Refused([*problems, Problem(at, name, str(error))], exits.SOURCE) from error
    except EngineError as error:
        raise Refused([*problems, Problem(at, name, str(error))], exits.CHECKPOINT) from error
    if problems:
        raise Refused(problems)
    if machine is None:
        machine = read_machine(gpus=settings.manifest.hardware.device != "cpu")
    found_plan = plan(settings, checkpoint, machine, known)
    warning = settings.older.warning(str(settings.path)) if settings.older else ""
    return replace(found_plan, warnings=(warning,) if warning else ())


def bring_whole(given: Given) -> Path:
    """Downloads what is not here yet, with progress on standard error. The folder of the checkpoint. Raises Refused."""
    from appliance.source.bring import bring, to_stderr

    settings = load(given)
    with spoken(settings.older):
        problems = list(_files(settings, given.environ))
        if problems:
            raise Refused(problems)
        found = find(settings, given.environ)
        if isinstance(found, Local):
            return found.path
        try:
            return bring(found, policy(settings, given.environ), given.environ, to_stderr)
        except SourceError as error:
            key = source_key(settings)
            raise Refused([Problem(settings.place(key), ".".join(key), str(error))], exits.SOURCE) from error


def source_key(settings: Settings) -> tuple[str, ...]:
    """The key that names the checkpoint."""
    kind = settings.manifest.model.source.kind
    below = {"huggingface": ("repo",), "http": ("url",), "s3": ("uri",), "gs": ("uri",)}
    return ("model", "source", kind, *below.get(kind, ()))


def _checkpoint(settings: Settings, known: Facts) -> Checkpoint:
    """Facts of the checkpoint, its tensors compared with the declaration, its tokenizer known to be there."""
    try:
        checkpoint = read_checkpoint(known.folder, settings.manifest.model.trust_remote_code)
        check_tensors(checkpoint.model, checkpoint.tensors, checkpoint.quantization)
        present = next((name for name in TOKENIZERS if (checkpoint.path / name).exists()), "tokenizer.json")
        _check_tokenizer(checkpoint.path / present)
    except EngineError as error:
        if known.folder == known.path:
            raise
        raise type(error)(str(error).replace(str(known.folder), known.shown)) from error
    if known.folder == known.path:
        return checkpoint
    tensors = {
        name: replace(info, file=known.path / info.file.relative_to(known.folder))
        for name, info in checkpoint.tensors.items()
    }
    return replace(checkpoint, path=known.path, tensors=tensors)


def _check_tokenizer(path: Path) -> None:
    try:
        msgspec.json.decode(path.read_bytes(), type=TOKENIZERS[path.name])
    except FileNotFoundError as error:
        others = [name for name in ("tokenizer.model", "vocab.json") if (path.parent / name).exists()]
        hint = f"; {others[0]} alone is not read: convert it with transformers" if others else ""
        raise CheckpointError(f"{path}: missing, so that texts cannot become tokens{hint}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _files(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """What the manifest names and is not there."""
    manifest, folder = settings.manifest, settings.path.resolve().parent
    if manifest.model.chat_template is not None:
        yield from _readable(settings, ("model", "chat_template"), folder / manifest.model.chat_template)
    if manifest.engine.record is not None:
        parent = (folder / manifest.engine.record).parent
        if not parent.is_dir():
            yield Problem(settings.place(("engine", "record")), "engine.record", f"{parent}: no such directory")
    for name, secret in manifest.secrets.items():
        if isinstance(secret, SecretFile):
            yield from _readable(settings, ("secrets", name, "file"), folder / secret.file)
        elif not environ.get(secret.env):
            what = "is empty" if secret.env in environ else "is not set"
            at = settings.place(("secrets", name, "env"))
            yield Problem(at, f"secrets.{name}.env", f"the environment variable {secret.env} {what}")


def _readable(settings: Settings, key: tuple[str, ...], path: Path) -> Iterator[Problem]:
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        yield Problem(settings.place(key), ".".join(key), f"{path}: is not UTF-8 text")
    except OSError as error:
        yield Problem(settings.place(key), ".".join(key), f"{path}: {(error.strerror or str(error)).lower()}")
    else:
        if not text.strip():
            yield Problem(settings.place(key), ".".join(key), f"{path}: is empty")
