"""Sources of LoRA adapters: `adapters[].uri` names a repository of the hub, a bucket or an archive. The files are in
the same caches as checkpoints, and are downloaded before anything starts."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from appliance.checkpoints.download_spec import BUCKETS, DownloadSpec, bucket_spec, cache_of, hub_spec, policy
from appliance.checkpoints.facts import NotDownloaded
from appliance.checkpoints.remote import PackedStore, Policy, SourceError
from appliance.checkpoints.remote_metadata import is_complete, resolve
from appliance.config.settings import Settings
from appliance.config.yaml_loader import Path as KeyPath
from engine.models.adapters import FILES

MAX_SIZE = 2**36  # bytes of the files of an archive
_SHA256 = re.compile(r"#sha256=([0-9a-f]{64})$")


class AdapterSourceError(SourceError):
    """Raised if an adapter is not in the cache. `is_missing`: it can be downloaded."""

    def __init__(self, key: KeyPath, message: str, *, is_missing: bool) -> None:
        super().__init__(message)
        self.key, self.is_missing = key, is_missing


def adapter_specs(settings: Settings, environ: Mapping[str, str]) -> Iterator[tuple[KeyPath, DownloadSpec, Policy]]:
    """Yield the key, the download and its limits of each adapter with a URI. Raise Refused."""
    limits = policy(settings, environ)
    for number, adapter in enumerate(settings.manifest.adapters):
        if adapter.uri is None:
            continue
        key = ("adapters", number, "uri")
        spec = _spec(settings, environ, adapter.uri)
        yield key, spec, policy(settings, environ, hub=True) if spec.kind == "huggingface" else limits


def adapter_folders(settings: Settings, environ: Mapping[str, str]) -> dict[KeyPath, Path]:
    """Return the folder of each adapter with a URI, by the key of its path. Raise AdapterSourceError, or Refused."""
    found: dict[KeyPath, Path] = {}
    for key, spec, limits in adapter_specs(settings, environ):
        try:
            resolved = resolve(spec, limits, environ)
        except SourceError as error:
            raise AdapterSourceError(key, str(error), is_missing=isinstance(error, NotDownloaded)) from error
        store, listing = resolved.store, resolved.listing
        if not is_complete(store, listing):
            message = f"{store.shown}: not in the cache; run `slipway fetch MANIFEST` or `slipway serve`"
            raise AdapterSourceError(key, message, is_missing=True)
        found[(*key[:2], "path")] = (
            store.folder(listing) if isinstance(store, PackedStore) else resolved.cache_directory.folder
        )
    return found


def _spec(settings: Settings, environ: Mapping[str, str], uri: str) -> DownloadSpec:
    scheme, _, rest = uri.partition("://")
    if scheme == "hf":
        repo, _, revision = rest.partition("@")
        return hub_spec(settings, environ, repo, revision or "main", FILES)
    if scheme in BUCKETS:
        return bucket_spec(settings, uri)
    digest = _SHA256.search(uri)
    return DownloadSpec(
        kind="http",
        what=_SHA256.sub("", uri),
        cache=str(cache_of(settings, "http")),
        sha256=digest[1] if digest else "",
        max_size=MAX_SIZE,
        stall_s=settings.manifest.model.download.stall_timeout,
    )
