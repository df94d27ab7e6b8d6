"""All that can be known before anything starts: settings, checkpoint, files and secrets the manifest names, memory.

Reads files, never weights, and never imports torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from appliance import exits
from appliance.declare.problems import Problem, Refused
from appliance.declare.settings import Given, Settings, load
from appliance.manifest import SecretFile
from appliance.plan.machine import Machine, read_machine
from appliance.plan.plan import Plan, plan
from engine.api.errors import CheckpointError, EngineError
from engine.models.checkpoint import Checkpoint, check_tensors, read_checkpoint
from engine.models.kv_scales import read_kv_scales
from engine.models.parts import attentions


class _TokenizerFile(msgspec.Struct):
    """Enough of tokenizer.json to know that it is whole."""

    model: msgspec.Raw


class _TekkenFile(msgspec.Struct):
    """Enough of tekken.json to know that it is whole."""

    config: msgspec.Raw
    vocab: msgspec.Raw


TOKENIZERS = {"tokenizer.json": _TokenizerFile, "tekken.json": _TekkenFile}


def prove(given: Given, machine: Machine | None = None) -> Plan:
    """The plan for what is given, on this machine unless another is described. Raises Refused with what is wrong."""
    settings = load(given)
    problems = list(_files(settings, given.environ))
    try:
        checkpoint = _checkpoint(settings)
    except EngineError as error:
        at = settings.place(("model", "path"))
        raise Refused([*problems, Problem(at, "model.path", str(error))], exits.CHECKPOINT) from error
    if problems:
        raise Refused(problems)
    found = _planned(settings, checkpoint, machine)
    _check_scales(settings, checkpoint, found)
    return found


def _planned(settings: Settings, checkpoint: Checkpoint, machine: Machine | None) -> Plan:
    if machine is not None or settings.manifest.hardware.device != "cpu":
        return plan(settings, checkpoint, machine or read_machine())
    try:
        return plan(settings, checkpoint, read_machine(gpus=False))
    except Refused:
        # Whether a GPU would change it is worth the second that looking for one takes.
        return plan(settings, checkpoint, read_machine())


def _check_scales(settings: Settings, checkpoint: Checkpoint, found: Plan) -> None:
    """fp8 pages take the scales that a checkpoint folder may bring, which must be whole then."""
    if found.engines[0].kv_dtype == "fp8":
        try:
            read_kv_scales(checkpoint.path, len(attentions(checkpoint.model)))
        except CheckpointError as error:
            key = ("quantization", "kv_cache")
            raise Refused([Problem(settings.place(key), ".".join(key), str(error))], exits.CHECKPOINT) from error


def _checkpoint(settings: Settings) -> Checkpoint:
    """Facts of the checkpoint, its tensors compared with the declaration, its tokenizer known to be there."""
    folder = settings.path.resolve().parent / settings.manifest.model.path
    checkpoint = read_checkpoint(folder.resolve(), settings.manifest.model.trust_remote_code)
    check_tensors(checkpoint.model, checkpoint.tensors, checkpoint.quantization)
    present = next((name for name in TOKENIZERS if (checkpoint.path / name).exists()), "tokenizer.json")
    _check_tokenizer(checkpoint.path / present)
    return checkpoint


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
