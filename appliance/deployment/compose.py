"""A Docker Compose file. The manifest is an inline config; secrets are files or variables of the host."""

from typing import Any

from appliance.deployment.service import (
    CACHE,
    DATA,
    FOLDER,
    MANIFEST,
    MODELS,
    SECRETS,
    TLS,
    USER,
    Deployment,
    gibibytes,
)


def compose(one: Deployment) -> dict[str, Any]:
    """Return the content of the Compose file."""
    volumes = [f"{name}:{at}" for name, at, size in (("data", DATA, one.data), ("cache", CACHE, one.cache)) if size]
    mounted = ({one.model: one.model_path} if one.model else {}) | one.folders
    models = [f"{_escaped(str(path))}:{MODELS}/{_escaped(name)}:ro" for name, path in mounted.items()]
    secrets = {key: (path, f"{SECRETS}/{key}") for key, path in one.secret_files.items()}
    secrets |= {name: (path, f"{TLS}/{name}") for name, path in one.tls_files.items()}
    service: dict[str, Any] = {
        "image": one.image,
        "command": ["serve", f"{FOLDER}/{MANIFEST}"],
        "ports": [f"{port}:{port}" for port in (one.port, one.grpc_port) if port],
        "environment": _environment(one),
        "user": f"{USER}:0",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "stop_grace_period": f"{one.grace}s",
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "slipway", "healthcheck"],
            "interval": "10s",
            "timeout": "6s",
            "retries": 3,
            "start_period": f"{one.startup}s",
        },
        "mem_limit": f"{gibibytes(one.memory)}g",
        "configs": [{"source": _config(name), "target": f"{FOLDER}/{name}"} for name in one.files],
    }
    if volumes or models:
        service["volumes"] = [*models, *volumes]
    if one.shared:
        service["shm_size"] = f"{gibibytes(one.shared)}g"
    if secrets:
        service["secrets"] = [{"source": name, "target": target} for name, (_, target) in secrets.items()]
    if one.amd:
        # HIP_VISIBLE_DEVICES selects among several GPUs. Debian's render group has another number in the image.
        service["devices"] = ["/dev/kfd", "/dev/dri"]
        service["group_add"] = ["video", "${RENDER_GROUP:?set RENDER_GROUP to the output of: stat -c %g /dev/kfd}"]
        service["environment"]["HIP_VISIBLE_DEVICES"] = ",".join(map(str, range(one.gpus)))
    elif one.gpus:
        device = {"driver": "nvidia", "count": one.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    made: dict[str, Any] = {"name": one.name, "services": {"slipway": service}}
    made["configs"] = {_config(name): {"content": _escaped(text)} for name, text in one.files.items()}
    if volumes:
        made["volumes"] = {volume.partition(":")[0]: {} for volume in volumes}
    if secrets:
        made["secrets"] = {name: {"file": _escaped(str(path))} for name, (path, _) in secrets.items()}
    return made


def _environment(one: Deployment) -> dict[str, str]:
    cache = {"HF_HOME": f"{CACHE}/huggingface", "XDG_CACHE_HOME": CACHE} if one.cache else {}
    required = {name: f"${{{name}:?set {name}}}" for name in one.secret_variables.values()}
    return {"SLIPWAY_GRACE": str(one.grace), **cache, **required}


def _config(name: str) -> str:
    return name.partition(".")[0] if not name.endswith(".lock") else "lock"


def _escaped(text: str) -> str:
    """Escape dollar signs, which Docker Compose interpolates."""
    return text.replace("$", "$$")
