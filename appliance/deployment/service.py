"""Facts of a deployment that all kinds of files need, computed from a plan.

Paths of the manifest become paths in the container: the checkpoint below /models, written data in one volume, secrets
below /run/secrets. The composed manifest is a single file; values that equal their default are omitted.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from appliance.checkpoints.lockfile import lock_path
from appliance.config.key import Path as KeyPath
from appliance.config.platform import MARGIN_S
from appliance.config.sections.secrets import SecretFile
from appliance.config.settings import Settings
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
    ("lifecycle", "journal", "folder"): f"{DATA}/journal",
    ("lifecycle", "crash_bundles", "folder"): f"{DATA}/crashes",
    ("engine", "record"): f"{DATA}/record.jsonl",
}
_TLS_KEYS: dict[KeyPath, str] = {
    ("endpoints", "tls", "certificate"): f"{TLS}/tls.crt",
    ("endpoints", "tls", "key"): f"{TLS}/tls.key",
}


@dataclass(frozen=True)
class Deployment:
    """A service to deploy. Sizes are in bytes, times in seconds."""

    name: str
    image: str
    port: int
    files: dict[str, str]  # texts by name, in the folder of the manifest
    grace: int  # between SIGTERM and SIGKILL
    startup: int  # until the service must be ready
    tls: bool
    gpus: int
    cpus: int  # cores of engines and gateway
    memory: int  # limit of the container's memory
    shared: int  # size of /dev/shm; 0: the default of the runtime
    model: str  # name of the checkpoint below /models; "" if it is downloaded
    model_path: Path  # its path on this machine
    data: int  # size of the volume for written data; 0: no volume
    cache: int  # size of the volume for downloads; 0: no volume
    secret_files: dict[str, Path]  # path on this machine by the name of the secret
    secret_variables: dict[str, str]  # environment variable by the name of the secret
    tls_files: dict[str, Path]  # path on this machine by file name


def deployment(settings: Settings, plan: Plan, *, name: str, image: str) -> Deployment:
    """Return the deployment of a plan. Raise Refused for values that cannot be rendered."""
    manifest = settings.manifest
    if manifest.endpoints.port == 0:
        refuse(settings, "endpoints.port", "0 selects a free port; a deployment needs a fixed one", instead="8000")
    local = manifest.model.source.kind == "path"
    model_path = settings.file(("model", "source", "path")) if local else Path()
    paths: dict[KeyPath, str] = {**_DATA_KEYS, **_TLS_KEYS, ("model", "download", "cache"): CACHE}
    paths[("model", "source", "path")] = f"{MODELS}/{model_path.name}"
    files: dict[str, str] = {}
    if manifest.model.chat_template is not None:
        paths[("model", "chat_template")] = "chat_template.jinja"
        files["chat_template.jinja"] = _text(settings, ("model", "chat_template"))
    tree = manifest.model_dump(mode="json", exclude_defaults=True)
    tree = {"apiVersion": manifest.apiVersion, **tree}
    for path, inside in paths.items():
        _replace(tree, path, inside)
    secret_files = {
        key: settings.file(("secrets", key, "file")) for key, one in manifest.secrets.items() if _is_file(one)
    }
    for key in secret_files:
        _replace(tree, ("secrets", key, "file"), f"{SECRETS}/{key}")
    files = {MANIFEST: yaml.safe_dump(_literal(tree), sort_keys=False, allow_unicode=True, width=110), **files}
    if (lock := lock_path(plan.path)).is_file():
        files["manifest.lock"] = lock.read_text()
    engines, engine = len(plan.engines), plan.engines[0]
    on_gpu, ranks = engine.hardware.device == "cuda", engine.parallelism.tensor
    return Deployment(
        name=name or _label(plan.path.stem),
        image=image,
        port=manifest.endpoints.port,
        files=files,
        grace=_grace(settings),
        startup=math.ceil(manifest.health.startup_budget),
        tls=plan.gateway.tls is not None,
        gpus=engines * ranks if on_gpu else 0,
        cpus=min(plan.machine.cores, engines * ranks * (1 if on_gpu else engine.hardware.threads) + 1),
        memory=_memory(plan, on_gpu=on_gpu),
        shared=GIB if ranks > 1 else 0,
        model=model_path.name,
        model_path=model_path,
        data=_data(settings),
        cache=0 if local else plan.memory.weights * ranks + CACHE_BYTES,
        secret_files=secret_files,
        secret_variables={key: one.env for key, one in manifest.secrets.items() if not isinstance(one, SecretFile)},
        tls_files={Path(inside).name: settings.file(path) for path, inside in _TLS_KEYS.items()}
        if plan.gateway.tls
        else {},
    )


def _is_file(one: Any) -> bool:
    return isinstance(one, SecretFile)


def _text(settings: Settings, key: KeyPath) -> str:
    try:
        return settings.file(key).read_text()
    except (OSError, UnicodeDecodeError) as error:
        refuse(settings, ".".join(key), f"cannot be read: {error}")


def _replace(tree: dict[str, Any], path: KeyPath, value: str) -> None:
    """Replace a value of the manifest, if it has one."""
    for part in path[:-1]:
        tree = tree.get(part) or {}
    if tree.get(path[-1]) is not None:
        tree[path[-1]] = value


def _literal(value: Any) -> Any:
    """Escape dollar signs in texts: the values of the manifest are interpolated already."""
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


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
