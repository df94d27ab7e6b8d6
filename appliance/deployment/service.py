"""Facts of a deployment that all kinds of files need, computed from a plan.

Paths of the manifest become paths in the container: the checkpoint, LoRA adapters and a draft model below /models,
written data in one volume, secrets below /run/secrets. The composed manifest is a single file; values that equal their
default are omitted.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from appliance.checkpoints.lockfile import lock_path
from appliance.config.platform import MARGIN_S
from appliance.config.sections.secrets import SecretFile
from appliance.config.settings import Settings
from appliance.config.yaml_loader import Path as KeyPath
from appliance.planning.choice import refuse
from appliance.planning.plan import Plan

FOLDER, DATA, CACHE, MODELS = "/etc/slipway", "/var/lib/slipway", "/var/cache/slipway", "/models"
SECRETS, TLS = "/run/secrets/slipway", "/run/secrets/tls"
MANIFEST = "manifest.yaml"
USER = 10001
"""User of the image."""
DEFAULT_GRACE_S = 60
"""Grace period if lifecycle.drain is auto: time for replies of some thousand tokens."""
CACHE_BYTES = 2**30  # of the cache, in addition to the weights
GIB = 2**30
_DATA_KEYS: dict[KeyPath, str] = {
    ("lifecycle", "journal", "folder"): "journal",
    ("lifecycle", "crash_bundles", "folder"): "crashes",
    ("engine", "record"): "record.jsonl",
}
_TLS_KEYS: dict[KeyPath, str] = {("endpoints", "tls", "certificate"): "tls.crt", ("endpoints", "tls", "key"): "tls.key"}


@dataclass(frozen=True)
class Layout:
    """Folders where the service finds its files. The defaults are folders of the container image."""

    data: str = DATA
    """Written data: journal, crash bundles, recording."""
    cache: str = CACHE
    """Downloads."""
    secrets: str = SECRETS
    tls: str = TLS
    source: Callable[[Path], dict[str, Any]] = lambda path: {"path": _escaped(f"{MODELS}/{path.name}")}
    """Value of model.source for a local checkpoint."""
    folder: Callable[[str, Path], str] = lambda name, path: f"{MODELS}/{name}"
    """Path of an adapter or a draft model, from its name in `Deployment.folders` and its path on this machine."""
    secrets_as: Literal["written", "files", "variables"] = "written"
    """How the service gets the secrets: as the manifest has them, all as files, or all as variables."""
    port: int | None = None
    """Port that the platform prescribes. The default is the port of the manifest."""


CONTAINER = Layout()


@dataclass(frozen=True)
class Deployment:
    """A service to deploy. Sizes are in bytes, times in seconds."""

    name: str
    image: str
    port: int
    grpc_port: int | None  # port of the Open Inference Protocol over gRPC
    files: dict[str, str]  # texts by name, in the folder of the manifest
    grace: int  # between SIGTERM and SIGKILL
    startup: int  # until the service must be ready
    tls: bool
    gpus: int
    amd: bool  # whether the GPUs are AMD's
    cpus: int  # cores of engines and gateway
    memory: int  # limit of the container's memory
    shared: int  # size of /dev/shm; 0: the default of the runtime
    model: str  # name of the checkpoint below /models; "" if it is downloaded
    model_path: Path  # its path on this machine
    folders: dict[str, Path]  # adapters and draft model: paths on this machine by their names below /models
    data: int  # size of the volume for written data; 0: no volume
    cache: int  # size of the volume for downloads; 0: no volume
    secret_files: dict[str, Path]  # path on this machine by the name of the secret; Path() if it has none
    secret_variables: dict[str, str]  # environment variable by the name of the secret
    tls_files: dict[str, Path]  # path on this machine by file name

    @property
    def reads_models(self) -> bool:
        """Return whether the service reads files below /models."""
        return bool(self.model or self.folders)


def deployment(settings: Settings, plan: Plan, *, name: str, image: str, layout: Layout = CONTAINER) -> Deployment:
    """Return the deployment of a plan. Raise Refused for values that cannot be rendered."""
    manifest = settings.manifest
    if manifest.endpoints.port == 0:
        refuse(settings, "endpoints.port", "0 selects a free port; a deployment needs a fixed one", instead="8000")
    local = manifest.model.source.kind == "path"
    model_path = settings.file(("model", "source", "path")) if local else Path()
    downloads = not local or any(one.uri is not None for one in manifest.adapters)
    secret_files, secret_variables = _secrets(settings, layout)
    engines, engine = len(plan.engines), plan.engines[0]
    on_gpu, ranks = engine.hardware.device == "cuda", engine.parallelism.tensor
    return Deployment(
        name=deployment_name(name, plan),
        image=image,
        port=layout.port or manifest.endpoints.port,
        grpc_port=manifest.endpoints.grpc_port,
        files=_files(settings, plan, layout, secret_files, secret_variables),
        grace=_grace(settings),
        startup=math.ceil(manifest.health.startup_budget),
        tls=plan.gateway.tls is not None,
        gpus=engines * ranks if on_gpu else 0,
        amd=on_gpu and bool(plan.machine.gpus[0].arch),
        cpus=min(plan.machine.cores, engines * ranks * (1 if on_gpu else engine.hardware.threads) + 1),
        memory=_memory(plan, on_gpu=on_gpu),
        shared=GIB if ranks > 1 else 0,
        model=model_path.name,
        model_path=model_path,
        folders={name: settings.file(key) for key, name in folder_names(settings).items()},
        data=_data(settings),
        cache=(0 if local else plan.memory.weights * ranks) + CACHE_BYTES if downloads else 0,
        secret_files=secret_files,
        secret_variables=secret_variables,
        tls_files={name: settings.file(path) for path, name in _TLS_KEYS.items()} if plan.gateway.tls else {},
    )


def folder_names(settings: Settings) -> dict[KeyPath, str]:
    """Return the paths below /models of local adapters, folders of adapters and the draft model, by key.

    Adapters with a URI are included if they are downloaded. Folders below /models keep their paths."""
    manifest, names = settings.manifest, dict[KeyPath, str]()
    for at, one in enumerate(manifest.adapters):
        if one.uri is None or ("adapters", at, "path") in settings.downloaded:
            name = f"adapters/{_label(one.name)}"
            names["adapters", at, "path"] = f"{name}-{at}" if name in names.values() else name
    for at, _ in enumerate(manifest.adapter_loading.folders):
        key: KeyPath = ("adapter_loading", "folders", at)
        if not settings.file(key).is_relative_to(MODELS):
            names[key] = f"adapter-folders/{at}"
    if manifest.speculation.model is not None:
        names["speculation", "model"] = f"draft/{settings.file(('speculation', 'model')).name}"
    return names


def deployment_name(given: str, plan: Plan) -> str:
    """Return the name of the deployment: the given one, else a DNS label from the manifest's name."""
    return given or _label(plan.path.stem)


def _secrets(settings: Settings, layout: Layout) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the paths of secrets that are files, and the names of those that are variables."""
    files, variables = {}, {}
    for key, one in settings.manifest.secrets.items():
        if isinstance(one, SecretFile) and layout.secrets_as != "variables":
            files[key] = settings.file(("secrets", key, "file"))
        elif not isinstance(one, SecretFile) and layout.secrets_as != "files":
            variables[key] = one.env
        elif layout.secrets_as == "files":
            files[key] = Path()
        else:
            variables[key] = f"SLIPWAY_SECRET_{re.sub(r'[^A-Za-z0-9]', '_', key).upper()}"
    return files, variables


def _files(
    settings: Settings, plan: Plan, layout: Layout, secret_files: dict[str, Path], secret_variables: dict[str, str]
) -> dict[str, str]:
    """Return the manifest with the paths of the layout, and the files in its folder."""
    manifest, files = settings.manifest, {}
    paths = {path: f"{layout.data}/{name}" for path, name in _DATA_KEYS.items()}
    paths |= {path: f"{layout.tls}/{name}" for path, name in _TLS_KEYS.items()}
    paths[("model", "download", "cache")] = layout.cache
    paths |= {key: layout.folder(name, settings.file(key)) for key, name in folder_names(settings).items()}
    if manifest.model.chat_template is not None:
        paths[("model", "chat_template")] = "chat_template.jinja"
        files["chat_template.jinja"] = _text(settings, ("model", "chat_template"))
    tree = manifest.model_dump(mode="json", exclude_defaults=True)
    tree = {"apiVersion": manifest.apiVersion, **tree}
    for path, inside in paths.items():
        _replace(tree, path, inside)
    if layout.port is not None:
        tree["endpoints"] = {**tree.get("endpoints", {}), "port": layout.port}
    if manifest.secrets:
        tree["secrets"] = {
            key: {"env": secret_variables[key]} if key in secret_variables else {"file": f"{layout.secrets}/{key}"}
            for key in manifest.secrets
        }
    tree = _literal(tree)
    if manifest.model.source.kind == "path":  # a layout's source may contain variables of the platform
        tree["model"]["source"] = layout.source(settings.file(("model", "source", "path")))
    files = {MANIFEST: yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=110), **files}
    if (lock := lock_path(plan.path)).is_file():
        files["manifest.lock"] = lock.read_text()
    return files


def _text(settings: Settings, key: KeyPath) -> str:
    try:
        return settings.file(key).read_text()
    except (OSError, UnicodeDecodeError) as error:
        refuse(settings, ".".join(map(str, key)), f"cannot be read: {error}")


def _replace(tree: dict[str, Any], path: KeyPath, value: str) -> None:
    """Replace a value of the manifest, if it has one."""
    here: Any = tree
    for part in path[:-1]:
        here = here[part] if isinstance(part, int) else here.get(part) or {}
    if isinstance(path[-1], int) or here.get(path[-1]) is not None:
        here[path[-1]] = value


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _literal(value: Any) -> Any:
    """Escape dollar signs in texts: the values of the manifest are interpolated already."""
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return _escaped(value) if isinstance(value, str) else value


def _label(text: str) -> str:
    """Return a DNS label."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:53].strip("-") or "slipway"


def _grace(settings: Settings) -> int:
    drain = settings.manifest.lifecycle.drain
    return DEFAULT_GRACE_S if drain == "auto" else math.ceil(drain + MARGIN_S)


def _memory(plan: Plan, *, on_gpu: bool) -> int:
    """Return the memory of the container, so that the share of it that engines may use holds the planned bytes."""
    engines, memory = len(plan.engines), plan.memory
    if on_gpu:
        return memory.host.total + memory.mapped
    planned = engines * plan.engines[0].parallelism.tensor * memory.total
    return math.ceil(planned / plan.manifest.hardware.memory_share) + memory.host.total + memory.mapped


def _data(settings: Settings) -> int:
    """Return the size of written data: a journal has at most twice its size."""
    manifest, size = settings.manifest, 0
    if manifest.lifecycle.journal.folder is not None:
        size += 2 * (manifest.lifecycle.journal.size + manifest.endpoints.responses.size)
    if manifest.lifecycle.crash_bundles.folder is not None:
        size += manifest.lifecycle.crash_bundles.size
    return size + (manifest.engine.record_size if manifest.engine.record is not None else 0)


def gibibytes(size: int) -> int:
    """Return a size in GiB, rounded up."""
    return max(math.ceil(size / GIB), 1)


def mebibytes(size: int) -> int:
    """Return a size in MiB, rounded up."""
    return math.ceil(size / 2**20)
