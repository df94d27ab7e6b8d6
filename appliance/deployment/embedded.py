"""Deployments on hosting platforms that mount no configuration: the manifest is part of the container's variables.

`slipway serve` reads it from SLIPWAY_MANIFEST_B64_00 and so on (cli/default_manifest.py): base64 of a gzip file in
parts. The platforms mount no other files, so a chat template and a required lock file are refused.
"""

import base64
import gzip

from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings
from appliance.config.yaml_loader import Place
from appliance.deployment.service import MANIFEST, Deployment
from appliance.planning.choice import refuse

CHUNK_BYTES = 1024
"""Longest value of a variable on Amazon SageMaker."""
SCRATCH = "/tmp/slipway"
"""Folder for written data. The platforms attach no volumes, so it does not survive a container."""
PREFIX = "SLIPWAY_MANIFEST_B64_"


def environment(one: Deployment) -> dict[str, str]:
    """Return the variables that contain the manifest, and those of the caches."""
    # A fixed time in the header of the gzip file makes the variables reproducible.
    text = base64.b64encode(gzip.compress(one.files[MANIFEST].encode(), mtime=0)).decode()
    parts = [text[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES)]
    cache = {"HF_HOME": f"{SCRATCH}/huggingface", "XDG_CACHE_HOME": SCRATCH} if one.cache else {}
    return {**{f"{PREFIX}{index:02}": part for index, part in enumerate(parts)}, **cache}


def check_files(settings: Settings, platform: str) -> None:
    """Raise Refused if the manifest needs further files, which `platform` cannot mount."""
    if settings.manifest.model.chat_template is not None:
        remedy = "copy it into the checkpoint's folder as chat_template.jinja, and remove this key"
        refuse(settings, "model.chat_template", f"{platform} mounts no further files; {remedy}")
    if settings.manifest.speculation.model is not None:
        refuse(
            settings, "speculation.model", f"{platform} mounts no further files; use a method without a second model"
        )
    if any(one.uri is None for one in settings.manifest.adapters):
        refuse(settings, "adapters", f"{platform} mounts no further files; give the adapters a uri in place of path")
    if settings.manifest.model.lock == "require":
        refuse(settings, "model.lock", f"{platform} mounts no lock file; use auto", instead="auto")
    if settings.manifest.endpoints.tls.certificate is not None:
        refuse(
            settings, "endpoints.tls", f"{platform} terminates TLS itself and mounts no certificate; remove this key"
        )


def refuse_secrets(settings: Settings, platform: str, remedy: str) -> None:
    """Raise Refused if the manifest uses secrets, which `platform` cannot pass to a container."""
    for key in settings.manifest.secrets:
        refuse(settings, f"secrets.{key}", f"{platform} passes no secrets to a container; {remedy}")


def check_model_uri(one: Deployment, uri: str, scheme: str) -> None:
    """Raise Refused if a local checkpoint has no location of this scheme, or if one is given that is not used."""
    if one.model and not uri.startswith(f"{scheme}://"):
        message = f"upload {one.model_path} to a bucket, and give its location as {scheme}://…"
        raise Refused([Problem(Place("--model-uri"), "", message)])
    if uri and not one.model:
        message = "is for a checkpoint on this machine; this manifest names a remote one in model.source"
        raise Refused([Problem(Place("--model-uri"), "", message)])
