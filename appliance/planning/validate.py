"""Validation before any process starts: settings, checkpoint, memory, and the files and secrets in the manifest.

Reads files but not weights, and never imports torch.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.checkpoints.download_spec import LocalFolder, find, policy
from appliance.checkpoints.facts import Facts, NotDownloaded
from appliance.checkpoints.lockfile import lock_path, read_lock
from appliance.checkpoints.metadata import facts
from appliance.checkpoints.remote import SourceError
from appliance.config import exits
from appliance.config.composition.files import folder_of
from appliance.config.composition.fix import fix_at_definition
from appliance.config.composition.profiles import Profile
from appliance.config.document import is_secret, masked, without_password
from appliance.config.files import suggest_checkpoint, suggest_file
from appliance.config.fix import Hint, Write
from appliance.config.merge import at
from appliance.config.problems import Problem, Refused, unread
from appliance.config.sections.secrets import SecretFile
from appliance.config.settings import Given, Settings, load, unvalidated
from appliance.config.suggest import suggest_name
from appliance.config.versions import in_older_words
from appliance.config.yaml_loader import dotted
from appliance.hardware.machine import Machine, read_machine
from appliance.planning.adapters import other_bases, read_adapters
from appliance.planning.answerable import check_answerable
from appliance.planning.draft import with_draft_model
from appliance.planning.endpoint import check_endpoint, check_host_here
from appliance.planning.output_format import check_format
from appliance.planning.plan import Plan, plan
from appliance.planning.pooled import named_key, task_config
from appliance.planning.profiles import first_match
from appliance.planning.tokenizer import check_tokenizer, tokenizer_name
from engine.api.errors import CheckpointError, EngineError, TaskError
from engine.api.files import is_path, read_text, real_path
from engine.api.golden import Recorded
from engine.models.checkpoint import Checkpoint, assume_checkpoint, check_tensors, has_weights, read_checkpoint
from engine.models.kv_scales import read_kv_scales

if TYPE_CHECKING:
    from appliance.checkpoints.progress import Progress


Verify = Callable[[Settings, Path | None], None]


def _trusting(settings: Settings, folder: Path | None) -> None:
    """Accept the files of a checkpoint without verification."""


def validate(given: Given, machine: Machine | None = None, verify: Verify = _trusting, *, assume: bool = False) -> Plan:
    """Return the plan of a manifest for this machine, or for `machine`.

    For a remote checkpoint, its small files are downloaded and the headers of its weight files are read. `verify` may
    refuse the checkpoint folder before anything in it is read or executed, and before GPUs are probed beyond what
    profile selection needs; its folder argument is None while files are missing locally. With `assume`, a local folder
    that has a config.json but no weights is planned from that file alone, for commands that start nothing.

    Raise Refused with the problems, or NotPlanned if the checkpoint must be downloaded first.
    """
    try:
        settings, looked_at = resolve(given, machine)
    except Refused as refused:
        known = any(problem.key.startswith("model.source") for problem in refused.problems)
        missing = () if known else _wrong_folder(given)
        raise type(refused)([*refused.problems, *missing], refused.cause) from refused
    with in_older_words(settings.older):
        try:
            return _validated(settings, given.environ, machine, looked_at, verify, assume)
        except Refused as refused:
            problems = [fix_at_definition(problem, settings.tree) for problem in refused.problems]
            raise type(refused)(problems, refused.cause) from refused


def _wrong_folder(given: Given) -> Iterator[Problem]:
    """Yield a problem if the folder in model.source.path is missing, for a manifest refused for other reasons."""
    key = ("model", "source", "path")
    try:
        tree = unvalidated(given)
    except Refused:
        return
    text, place = at(tree, key), tree.values.get(key)
    if not isinstance(text, str) or place is None or key in tree.unknown:
        return
    folder = real_path(folder_of(place.source if place.line else str(given.manifest)))
    if is_path(folder / text) and not (folder / text).exists():
        what = f"{folder / text}: no such directory; model.source.path must name a checkpoint directory"
        yield unread(place, key, what, suggest_file(text, folder, holds="config.json"))


def resolve(given: Given, machine: Machine | None = None) -> tuple[Settings, Machine | None]:
    """Return the settings with the matching hardware profile, and the machine if a profile had to be selected.

    Raise Refused if the manifest itself is invalid.
    """
    looked_at = machine

    def choose(device: str, profiles: tuple[Profile, ...]) -> tuple[str, ...]:
        nonlocal looked_at
        looked_at = looked_at or read_machine(gpus=device != "cpu")
        return first_match(device, profiles, looked_at)

    return load(given, choose), looked_at


class NotPlanned(Refused):
    """Raised if the only obstacle to a plan is that the checkpoint must be downloaded first."""


def _validated(
    settings: Settings,
    environ: Mapping[str, str],
    machine: Machine | None,
    looked_at: Machine | None,
    verify: Verify,
    assume: bool,
) -> Plan:
    problems = list(_files(settings, environ))
    key = settings.manifest.model.source.key
    at, name = settings.place(key), ".".join(key)
    found = find(settings, environ)
    if problems and not isinstance(found, LocalFolder):
        raise Refused(problems)  # do not contact a server while the token that it needs is unreadable
    settings = resolve_downloads(settings, environ)
    try:
        with facts(found, policy(settings, environ), environ) as known:
            verify(settings, known.folder if known.job is None else None)
            checkpoint = _checkpoint(settings, known, assume)
            adapters = read_adapters(settings, checkpoint)
            checkpoint = with_draft_model(settings, checkpoint)
            tokenizer = "" if _lacks_tokenizer(checkpoint) else tokenizer_name(known.folder)
            unanswerable = list(check_answerable(settings, checkpoint, known.folder))
    except NotDownloaded as error:
        raise NotPlanned([*problems, Problem(at, name, without_password(str(error)))], exits.SOURCE) from error
    except SourceError as error:
        raise Refused([*problems, Problem(at, name, without_password(str(error)))], exits.SOURCE) from error
    except TaskError as error:
        key = named_key(str(error)) or key
        raise Refused([*problems, Problem(settings.place(key), ".".join(key), str(error))], exits.CHECKPOINT) from error
    except EngineError as error:
        below = settings.manifest.model.source.path
        hint = Hint() if below is None else suggest_checkpoint(below, settings.folder(key))
        raise Refused([*problems, unread(at, key, str(error), hint)], exits.CHECKPOINT) from error
    if problems or unanswerable:
        raise Refused([*problems, *unanswerable], exits.MANIFEST if problems else exits.CHECKPOINT)
    loading = settings.manifest.adapter_loading
    slots = None if loading.max_active is None else (loading.max_active, loading.max_rank)
    checkpoint = replace(checkpoint, adapters=adapters, adapter_slots=slots)
    planned = _planned(settings, checkpoint, machine, looked_at, known)
    _check_scales(settings, checkpoint, planned)
    assumed = checkpoint.assumed
    if assumed and not tokenizer:
        assumed = (*assumed, "a tokenizer for the model's vocabulary (there is no tokenizer file)")
    return replace(
        planned,
        tokenizer=tokenizer,
        assumed=assumed,
        notices=(*planned.notices, *check_host_here(settings), *other_bases(settings, checkpoint, known)),
    )


def resolve_downloads(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return the settings with the folders of adapters that have a URI. Raise NotPlanned if one is not downloaded."""
    if all(one.uri is None for one in settings.manifest.adapters):
        return settings
    from appliance.checkpoints.adapters import AdapterSourceError, adapter_folders  # not imported for local folders

    try:
        return replace(settings, downloaded=adapter_folders(settings, environ))
    except AdapterSourceError as error:
        kind = NotPlanned if error.is_missing else Refused
        problem = Problem(settings.place(error.key), dotted(error.key), without_password(str(error)))
        raise kind([problem], exits.SOURCE) from error


def _planned(
    settings: Settings, checkpoint: Checkpoint, machine: Machine | None, looked_at: Machine | None, known: Facts
) -> Plan:
    """Build the plan. `machine` is a described machine; `looked_at` selected the profile, perhaps without GPUs."""
    locked, golden = lock_path(settings.path).is_file(), _golden(settings)
    if machine is not None or settings.manifest.hardware.device != "cpu":
        return plan(settings, checkpoint, machine or looked_at or read_machine(), known, locked=locked, golden=golden)
    try:
        return plan(settings, checkpoint, looked_at or read_machine(gpus=False), known, locked=locked, golden=golden)
    except Refused:
        # Probing for a GPU takes about a second; do it only here, because a GPU may make the plan valid.
        return plan(settings, checkpoint, read_machine(), known, locked=locked, golden=golden)


def _golden(settings: Settings) -> Recorded | None:
    """Return the reference outputs of the lock file.

    Return None for an unreadable lock; if the lock is enforced, `verify` has refused it already.
    """
    if settings.manifest.model.lock == "off":
        return None
    try:
        return read_lock(lock_path(settings.path)).golden
    except (FileNotFoundError, Refused):
        return None


def _check_scales(settings: Settings, checkpoint: Checkpoint, found: Plan) -> None:
    """Check that the KV scales in the checkpoint folder are complete if fp8 cache uses them."""
    if found.engines[0].quantization.kv_cache == "fp8":
        try:
            read_kv_scales(checkpoint.path, checkpoint.model, checkpoint.tensors)
        except CheckpointError as error:
            key = ("quantization", "kv_cache")
            raise Refused([Problem(settings.place(key), ".".join(key), str(error))], exits.CHECKPOINT) from error


def download_missing(given: Given) -> Path:
    """Download missing checkpoint files, with progress on standard error, and return the folder. Raise Refused."""
    return _download(load(given), given, lambda _: contextlib.nullcontext())


def download_before_start(given: Given) -> None:
    """Download missing checkpoint files while a placeholder server answers at the gateway's address."""
    from appliance.checkpoints.placeholder_server import placeholder_server

    settings = load(given)
    endpoints = settings.manifest.endpoints
    _download(settings, given, lambda progress: placeholder_server(endpoints.host, endpoints.port, progress))


def _download(
    settings: Settings, given: Given, during: Callable[["Progress"], contextlib.AbstractContextManager[None]]
) -> Path:
    from appliance.checkpoints.download import download_checkpoint, on_stderr

    with in_older_words(settings.older):
        problems = list(_files(settings, given.environ))
        if problems:
            raise Refused(problems)
        found = find(settings, given.environ)
        _download_adapters(settings, given, during)
        if isinstance(found, LocalFolder):
            return found.path
        try:
            with on_stderr() as say:
                return download_checkpoint(found, policy(settings, given.environ), given.environ, say, during)
        except SourceError as error:
            key = settings.manifest.model.source.key
            said = without_password(str(error))
            raise Refused([Problem(settings.place(key), ".".join(key), said)], exits.SOURCE) from error


def _download_adapters(
    settings: Settings, given: Given, during: Callable[["Progress"], contextlib.AbstractContextManager[None]]
) -> None:
    """Download the adapters that have a URI. Raise Refused with the key of the first that fails."""
    if all(one.uri is None for one in settings.manifest.adapters):
        return
    from appliance.checkpoints.adapters import adapter_specs
    from appliance.checkpoints.download import download_checkpoint, on_stderr

    for key, spec, limits in adapter_specs(settings, given.environ):
        try:
            with on_stderr() as say:
                download_checkpoint(spec, limits, given.environ, say, during)
        except SourceError as error:
            problem = Problem(settings.place(key), dotted(key), without_password(str(error)))
            raise Refused([problem], exits.SOURCE) from error


def _lacks_tokenizer(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint without weights has no tokenizer either."""
    return bool(checkpoint.assumed) and not (checkpoint.path / tokenizer_name(checkpoint.path)).exists()


def _checkpoint(settings: Settings, known: Facts, assume: bool) -> Checkpoint:
    """Read the checkpoint, compare its tensors with the model's declaration, and check its tokenizer."""
    try:
        trusted, task = settings.manifest.model.trust_remote_code, task_config(settings.manifest)
        if assume and known.folder == known.path and known.folder.is_dir() and not has_weights(known.folder):
            checkpoint = assume_checkpoint(known.folder, trusted, task=task)
        else:
            checkpoint = read_checkpoint(known.folder, trusted, task=task)
            check_tensors(checkpoint.model, checkpoint.tensors, checkpoint.quantization)
        if not _lacks_tokenizer(checkpoint):
            check_tokenizer(checkpoint.path)
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


def _files(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield files and secrets that the manifest names but that are missing or unreadable."""
    manifest = settings.manifest
    if manifest.model.chat_template is not None:
        yield from _readable(settings, ("model", "chat_template"))
    yield from check_format(settings)
    yield from check_endpoint(settings, environ)
    if manifest.engine.record is not None and not settings.file(("engine", "record")).parent.is_dir():
        yield _no_folder(settings, manifest.engine.record)
    for name, secret in manifest.secrets.items():
        if isinstance(secret, SecretFile):
            yield from _readable(settings, ("secrets", name, "file"))
        elif not environ.get(secret.env):
            what = "is empty" if secret.env in environ else "is not set"
            place = settings.place(("secrets", name, "env"))
            near = suggest_name(secret.env, environ) if secret.env not in environ else ""
            hint = Hint(f"did you mean {near}?", Write(near), certain=False) if near else Hint()
            yield unread(place, ("secrets", name, "env"), f"the environment variable {secret.env} {what}", hint)


def _no_folder(settings: Settings, record: str) -> Problem:
    above, key = Path(record).parent, ("engine", "record")
    folder = settings.folder(key)
    hint = suggest_file(str(above), folder)
    if isinstance(hint.fix, Write):
        hint = replace(hint, fix=Write(f"{hint.fix.text}/{Path(record).name}"))
    return unread(settings.place(key), key, f"{folder / above}: no such directory", hint)


def _readable(settings: Settings, key: tuple[str, ...]) -> Iterator[Problem]:
    path, place, given = settings.file(key), settings.place(key), str(at(settings.tree, key))
    # A value that is not a path may be the secret itself, written in place of its file.
    shown = "the file (name not shown)" if is_secret(key) and not re.search(r"[/.]", given) else masked(str(path))
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        yield unread(place, key, f"{shown}: is not UTF-8 text")
    except OSError as error:
        yield unread(
            place, key, f"{shown}: {(error.strerror or str(error)).lower()}", suggest_file(given, settings.folder(key))
        )
    else:
        if not text.strip():
            yield unread(place, key, f"{shown}: is empty")
