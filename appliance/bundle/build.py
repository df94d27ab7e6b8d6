"""Creation of a bundle from a manifest."""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec
import yaml

from appliance.bundle.index import (
    IMAGE,
    INDEX,
    LOCK,
    MANIFEST,
    MODEL,
    SBOM,
    SIGNATURE,
    BundleError,
    Image,
    Index,
    decode,
    digest_of,
    encode,
)
from appliance.bundle.signature import sign
from appliance.checkpoints.digest import Digest, digest
from appliance.checkpoints.lockfile import Lock, as_yaml, lock_path, read_lock
from appliance.config import exits
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings
from appliance.deployment.service import Layout, deployment, folder_names
from appliance.lockfile.write import DRAFT, make_lock
from appliance.planning.plan import Plan
from engine.gguf.file import root_of

LAYOUT = Layout(data="data", cache="cache", folder=lambda name, path: name)


@dataclass(frozen=True)
class Contents:
    """Contents of a bundle in addition to manifest and weights."""

    sbom: bytes
    image: str = ""
    """Reference of the container image."""
    image_archive: Path | None = None
    key: Path | None = None
    """Private key that signs the index."""


def write_bundle(settings: Settings, plan: Plan, contents: Contents, path: Path) -> Index:
    """Write the archive and return its index. Raises Refused, BundleError and OSError; then no archive is left."""
    if plan.job is not None:
        key = settings.manifest.model.source.key
        message = f"its files are not downloaded yet. Run `slipway fetch {plan.path}`, then bundle again"
        raise Refused([Problem(settings.place(key), ".".join(key), message)], exits.SOURCE)
    root, lock = root_of(Path(plan.engines[0].model.path)), _lock(settings, plan)
    texts = {name: text.encode() for name, text in _texts(settings, plan, lock).items()} | {SBOM: contents.sbom}
    paths = {f"{MODEL}/{name}": root / name for name in lock.model.files}
    digests = {name: digest_of(data) for name, data in texts.items()}
    digests |= {f"{MODEL}/{name}": one for name, one in lock.model.files.items()}
    for name, (path_here, expected) in _further(settings, lock).items():
        paths[name], digests[name] = path_here, expected
    if contents.image_archive is not None:
        paths[IMAGE] = contents.image_archive
        digests[IMAGE] = digest(contents.image_archive, lambda count: None)
    image = Image(contents.image, IMAGE if contents.image_archive is not None else "")
    index = Index(dict(sorted(digests.items())), image=image)
    data = encode(index)
    decode(data)  # refuses names that could not be unpacked
    signature = None if contents.key is None else sign(data, contents.key)
    with _archive(path) as archive:
        _add(archive, INDEX, io.BytesIO(data), digest_of(data))
        if signature is not None:
            _add(archive, SIGNATURE, io.BytesIO(signature), digest_of(signature))
        for name, expected in index.files.items():
            with io.BytesIO(texts[name]) if name in texts else paths[name].open("rb") as file:
                _add(archive, name, file, expected)
    return index


def _further(settings: Settings, lock: Lock) -> dict[str, tuple[Path, Digest]]:
    """Return the path and digest of each file of the adapters and the draft model, by their names in the bundle."""
    found, names = dict[str, tuple[Path, Digest]](), folder_names(settings)
    keys = {one.name: ("adapters", at, "path") for at, one in enumerate(settings.manifest.adapters)}
    for locked, expected in lock.adapters.items():
        adapter, _, file = locked.rpartition("/")
        key = keys[adapter]
        found[f"{names[key]}/{file}"] = settings.file(key) / file, expected
    if lock.draft:
        path = settings.file(DRAFT)
        folder = PurePosixPath(names[DRAFT])
        for file, expected in lock.draft.items():
            inside = folder if root_of(path) == path else folder.parent
            found[str(inside / file)] = root_of(path) / file, expected
    return found


def _lock(settings: Settings, plan: Plan) -> Lock:
    """Return a lock of the present files, with the reference outputs of an existing lock of the same files."""
    lock = make_lock(plan, settings)
    path = lock_path(plan.path)
    golden = None
    if path.is_file() and (before := read_lock(path)).model.files == lock.model.files:
        golden = before.golden
    model = msgspec.structs.replace(lock.model, path=_source(plan))
    template = lock.template
    if template is not None and settings.manifest.model.chat_template is not None:
        template = msgspec.structs.replace(template, file="chat_template.jinja")
    return msgspec.structs.replace(lock, model=model, template=template, golden=golden)


def _source(plan: Plan) -> str:
    """Return the checkpoint's path in the bundle: the folder, or the single file in it."""
    path = Path(plan.engines[0].model.path)
    return MODEL if root_of(path) == path else f"{MODEL}/{path.name}"


def _texts(settings: Settings, plan: Plan, lock: Lock) -> dict[str, str]:
    """Return the composed manifest, its lock and the files that it names."""
    files = dict(deployment(settings, plan, name="", image="", layout=LAYOUT).files)
    manifest = yaml.safe_load(files[MANIFEST])
    model = manifest["model"]
    model["source"] = {"path": _source(plan)}
    model["names"] = list(plan.gateway.names)
    model["lock"] = "require"
    for key, name in folder_names(settings).items():
        if key[0] == "adapters":  # a downloaded one has a URI
            one = manifest["adapters"][key[1]]
            manifest["adapters"][key[1]] = {"name": one["name"], "path": name}
    for name in ("download", "credentials"):  # there is nothing to download
        model.pop(name, None)
    files[MANIFEST] = yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=110)
    files[LOCK] = as_yaml(lock, MANIFEST)
    return files


@contextmanager
def _archive(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a new archive, which replaces `path` when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
            yield archive
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class _Hashed:
    """File whose bytes are hashed while they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def _add(archive: tarfile.TarFile, name: str, file: IO[bytes], expected: Digest) -> None:
    """Add a file. Raises BundleError if it is not the one of the digest."""
    member, hashed = tarfile.TarInfo(name), _Hashed(file)
    member.size, member.mode = expected.size, 0o644
    archive.addfile(member, hashed)
    if hashed.sha256.hexdigest() != expected.sha256 or file.read(1):
        raise BundleError(f"{name}: changed while the bundle was written")


def total_bytes(files: Mapping[str, Digest]) -> int:
    return sum(one.size for one in files.values())
