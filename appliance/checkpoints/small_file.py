"""A small file, such as a manifest, from a local path, a web server or a bucket."""

import hashlib
from pathlib import Path

from appliance.checkpoints.remote import SourceError

MAX_BYTES = 2**20
TIMEOUT_S = 60.0


def read_small_file(location: str, sha256: str = "") -> bytes:
    """Return the content of a path, or of an https://, http://, s3://, gs:// or az:// location. Raise SourceError.

    http:// requires the SHA-256 of the content, because anyone on the network can change it.
    """
    scheme, separator, rest = location.partition("://")
    if separator and scheme not in _READERS:
        raise SourceError(f"{location}: use a path, or https://, http://, s3://, gs:// or az://")
    if scheme == "http" and separator and not sha256:
        raise SourceError(f"{location}: http:// requires the SHA-256 of the file; set it, or use https://")
    content = _READERS[scheme](location, rest) if separator else _local(location)
    if len(content) > MAX_BYTES:
        raise SourceError(f"{location}: the file is larger than {MAX_BYTES:,} bytes")
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256.strip().lower():
        raise SourceError(f"{location}: the file has the SHA-256 {found}, not {sha256}")
    return content


def _local(location: str) -> bytes:
    try:
        return Path(location).read_bytes()
    except OSError as error:
        raise SourceError(f"{location}: {error.strerror}") from error


def _web(location: str, rest: str) -> bytes:
    import httpx

    try:
        with httpx.stream("GET", location, follow_redirects=True, timeout=TIMEOUT_S) as response:
            response.raise_for_status()
            content = b""
            for part in response.iter_bytes():
                content += part
                if len(content) > MAX_BYTES:
                    break
            return content
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceError(f"{location}: {error or type(error).__name__}") from error


def _bucket(location: str, rest: str) -> bytes:
    from appliance.checkpoints.buckets import BucketFolder
    from appliance.config.environment import environment

    bucket, _, key = rest.partition("/")
    kind = location.partition("://")[0]
    return BucketFolder(kind, bucket, key, Path(), environment(), TIMEOUT_S).read_object(MAX_BYTES + 1)


_READERS = {"https": _web, "http": _web, "s3": _bucket, "gs": _bucket, "az": _bucket}
