"""Creation of lock files, and comparison of a checkpoint with its lock."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from appliance.checkpoints.digest import Digest, HashProgress, cache_digests, cached_digests, digests
from appliance.checkpoints.lockfile import (
    CODE,
    LOCK_BYTES,
    Difference,
    Lock,
    Model,
    Template,
    compare,
    lock_path,
    read_lock,
)
from appliance.config import exits
from appliance.config.fingerprint import graphs_hash
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings
from appliance.config.version import __version__
from appliance.config.yaml_loader import Place
from appliance.lockfile.files import read_names, revision
from appliance.planning.plan import Plan, resolved_values
from engine.api.files import TEXT_BYTES, read_file, read_text
from engine.api.golden import Recorded
from engine.gguf.file import root_of
from engine.models.adapters import FILES

KEY = ("model", "lock")
DRAFT = ("speculation", "model")


def make_lock(plan: Plan, settings: Settings, golden: Recorded | None = None) -> Lock:
    """Return the lock of a plan, with the hash of every file that a start reads and the reference outputs in `golden`.

    Raise CheckpointError or OSError.
    """
    folder = Path(plan.engines[0].model.path)
    return Lock(
        slipway=__version__,
        manifest=plan.sha256,
        outputs_sha256=plan.gateway.outputs_sha256,
        graphs_sha256=graphs_hash(resolved_values(plan.effective)),
        machine=machine(plan),
        model=Model(
            path=_source(settings),
            architecture=plan.architecture,
            revision=revision(folder),
            files=_hashed(root_of(folder), read_names(folder), settings.cache),
        ),
        adapters=_named(_adapter_files(settings), settings.cache),
        draft=_named(_draft_files(settings), settings.cache),
        template=_template(plan, settings, folder),
        plan=planned_values(plan),
        golden=golden,
    )


def _source(settings: Settings) -> str:
    """Return the checkpoint source: a path relative to the manifest, or the value that identifies another source."""
    key = settings.manifest.model.source.key
    if key == ("model", "source", "path"):
        return settings.from_manifest(key)
    value: Any = settings.manifest.model
    for part in key[1:]:
        value = getattr(value, part)
    return str(value) if key[2] not in ("sagemaker", "vertex") else key[2]


def _adapter_files(settings: Settings) -> dict[str, Path]:
    """Return the files of the LoRA adapters, by their names in the lock."""
    folders = {one.name: settings.file(("adapters", at, "path")) for at, one in enumerate(settings.manifest.adapters)}
    return {f"{name}/{file}": folder / file for name, folder in folders.items() for file in FILES}


def _draft_files(settings: Settings) -> dict[str, Path]:
    """Return the files of the draft model or EAGLE head, by their names in the lock."""
    if settings.manifest.speculation.model is None:
        return {}
    folder = settings.file(DRAFT)
    return {name: root_of(folder) / name for name in read_names(folder)}


def _hashed(folder: Path, names: Iterable[str], cache: Path | None) -> dict[str, Digest]:
    return _named({name: folder / name for name in names}, cache)


def _named(paths: Mapping[str, Path], cache: Path | None) -> dict[str, Digest]:
    if not paths:
        return {}
    present = [path for path in paths.values() if path.is_file()]
    where = os.path.commonpath([path.parent for path in paths.values()])
    progress = HashProgress(sum(path.stat().st_size for path in present), where)
    try:
        found = digests(present, progress)
    finally:
        progress.close()
    cache_digests(cache, found)
    return {name: found[path] for name, path in paths.items() if path in found}


def machine(plan: Plan) -> str:
    """Return a short description of the machine that the plan was made for."""
    if plan.machine.described:
        return plan.machine.described
    gpus = ", ".join(gpu.name for gpu in plan.machine.gpus)
    return f"{plan.machine.cores} cores, {gpus or 'no GPU'}"


def _template(plan: Plan, settings: Settings, folder: Path) -> Template | None:
    override = settings.manifest.model.chat_template
    if override is not None:
        text = read_file(settings.file(("model", "chat_template")), TEXT_BYTES)
        return Template(override, hashlib.sha256(text).hexdigest())
    from engine.text.templates import chat_templates, template_file

    templates = chat_templates(folder)
    if templates is None:
        return None
    own = template_file(folder)
    text = (
        templates if isinstance(templates, str) else msgspec.json.encode(templates, order="sorted").decode()
    ).encode()
    return Template(own, hashlib.sha256(text).hexdigest())


def planned_values(plan: Plan) -> dict[str, Any]:
    """Return every resolved key except the lock's own, and the memory numbers, in the order of the manifest."""
    hidden = ("secrets.", "model.lock")
    keys = {one.key: one.resolved for one in plan.effective if not one.key.startswith(hidden)}
    memory = plan.memory
    numbers = {
        "weight_bytes": memory.weights,
        "workspace_bytes": memory.workspace,
        "kv_blocks": memory.blocks,
        "block_bytes": memory.block_bytes,
        "cache_tokens": memory.tokens,
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(keys | numbers))
    return plain


def derived_values(plan: Plan) -> dict[str, Any]:
    """Return the part of `planned_values` that `auto` resolved from the checkpoint and the machine."""
    written = {one.key for one in plan.effective if not one.reason}
    return {key: value for key, value in planned_values(plan).items() if key not in written}


# -- comparing a checkpoint with its lock -----------------------------------------------------------------------------


def required_lock(settings: Settings, mode: str) -> Lock | None:
    """Return the lock to verify for this mode of model.lock, or None if there is none and none is required.

    Raise Refused.
    """
    path = lock_path(settings.path)
    if mode == "off":
        return None
    try:
        return read_lock(path)
    except FileNotFoundError:
        if mode == "require":
            message = f"{path} does not exist; create it with `slipway lock {settings.path}`"
            raise Refused([Problem(settings.place(KEY), "model.lock", message, code=CODE)], exits.INTEGRITY) from None
        return None


def differences(
    settings: Settings, lock: Lock, folder: Path, *, hash_contents: bool
) -> tuple[list[Difference], list[str]]:
    """Return the differences from the lock, and the names of files whose content was not compared.

    With `hash_contents` every byte is read. Otherwise sizes are compared, and the cached digests of unchanged files.
    Raise CheckpointError.
    """
    names = {*read_names(folder)}
    folder = root_of(folder)
    names |= {name for name in lock.model.files if (folder / name).is_file()}
    files, skipped = _compared(settings, lock.model.files, {name: folder / name for name in names}, hash_contents)
    adapters, more = _compared(settings, lock.adapters, _adapter_files(settings), hash_contents)
    draft, others = _compared(settings, lock.draft, _draft_files(settings), hash_contents)
    different = [*files, *adapters, *draft, *_template_difference(settings, lock)]
    return different, sorted(skipped + more + others)


def _compared(
    settings: Settings, locked: Mapping[str, Digest], paths: Mapping[str, Path], hash_contents: bool
) -> tuple[list[Difference], list[str]]:
    """Return `differences` of these files, by their names in the lock."""
    if hash_contents:
        known: Mapping[str, Digest] = _named(paths, settings.cache)
    else:
        seen = cached_digests(settings.cache, list(paths.values()))
        known = {name: seen[path] for name, path in paths.items() if path in seen}
    found: dict[str, Digest | None] = dict.fromkeys(paths)
    skipped = []
    for name, path in paths.items():
        if name in known:
            found[name] = known[name]
        elif path.is_file():
            old, size = locked.get(name), path.stat().st_size
            same = old is not None and old.size == size
            found[name] = old if same else Digest(size, "(not hashed)")
            skipped += [name] if same else []
    return list(compare(locked, found)), skipped


def _template_difference(settings: Settings, lock: Lock) -> list[Difference]:
    """Return the difference of a chat template file that the manifest names, which is not in the checkpoint folder."""
    file = settings.manifest.model.chat_template
    if file is None:
        return []
    try:
        found = hashlib.sha256(read_file(settings.file(("model", "chat_template")), TEXT_BYTES)).hexdigest()
    except OSError:
        return []  # reported as a problem of model.chat_template
    if lock.template is None or lock.template.file != file:
        return [Difference(file, f"is read at a start and is not in the lock; found sha256 {found}")]
    expected = lock.template.sha256
    return [] if found == expected else [Difference(file, f"changed; expected sha256 {expected}, found {found}")]


def refusal(settings: Settings, found: Iterable[Difference]) -> Refused:
    """Return the differences as problems of the lock file, each at its line."""
    path = lock_path(settings.path)
    lines = read_text(path, LOCK_BYTES).splitlines()
    hint = f"restore the file, or lock the present files with `slipway lock {settings.path}`"

    def place(name: str) -> Place:
        quoted = msgspec.json.encode(name).decode()
        line = next((n for n, text in enumerate(lines, 1) if quoted in text), 0)
        return Place(str(path), line, 5) if line else Place(str(path))

    problems = [Problem(place(one.name), one.name, f"{one.message}; {hint}", code=CODE) for one in found]
    return Refused(problems, exits.INTEGRITY)
