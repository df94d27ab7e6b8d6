"""Folders of buckets: Amazon S3 and compatible services, Google Cloud Storage, Azure Blob Storage, through obstore.

Each attempt is one request, because the caller counts attempts and resumes at the last byte. The listing is cached, for
starts without a network; the cache folder is named by a hash of the listing.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import obstore
from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from appliance.checkpoints.bucket_clients import ACCESS_HINTS, OPEN, bucket_region
from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.remote import TRANSIENT, Listing, RemoteFile, RestartFile, SourceError, select

BLOCK = 1 << 16  # received bytes of an unfinished block are lost with the connection
_STATUS = re.compile(r"(?:status code: |status: |\()(\d{3})\b")
_WRONG_REGION = "incorrectly configured region"
# Requests for credentials: to a metadata service or a container's agent, and all that are not a GET.
_IDENTITY = re.compile(
    r"169\.254\.|fd00:ec2|metadata\.google\.internal|security-credentials|performing (POST|PUT) |token request|"
    r"token file|credential provider|No credentials|service account",
    re.IGNORECASE,
)
_SYSTEM = re.compile(r'^ *(?:message|error): "([^"\n]+)"', re.MULTILINE)
_NO_ACCOUNT = "Account must be specified"

T = TypeVar("T")


@dataclass(frozen=True)
class BucketFolder:
    """A folder of a bucket."""

    kind: str  # scheme of the folder's URI: s3, gs or az
    bucket: str
    prefix: str  # has no slash at either end
    cache: Path
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    stall_s: float = 60.0
    account: str = ""  # storage account of Azure

    @property
    def shown(self) -> str:
        return f"{self.kind}://{self.bucket}/{self.prefix}"

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2] or self.bucket

    @property
    def _home(self) -> Path:
        return self.cache / self.account / self.bucket / (self.prefix.replace("/", "--") or "-")

    def known(self) -> Listing | None:
        try:
            return msgspec.json.decode((self._home / "listing.json").read_bytes(), type=Listing)
        except (OSError, msgspec.DecodeError):
            return None

    def cache_directory(self, listing: Listing) -> CacheDirectory:
        return CacheDirectory(self._home / listing.revision, self._home / ".lock")

    def listing(self) -> Listing:
        """Return the present files, and store them in the cache. Raise SourceError."""
        found = self._request(self.shown, lambda store: obstore.list(store, self.prefix or None).collect())
        start = f"{self.prefix}/" if self.prefix else ""
        files = [RemoteFile(one["path"].removeprefix(start), one["size"], one["e_tag"] or "") for one in found]
        try:
            chosen = select([file for file in files if file.name], ())
        except SourceError as error:
            raise SourceError(f"{self.shown}: {error}") from error
        listing = Listing(digest(chosen)[:40], chosen)
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            (self._home / "listing.json").write_bytes(msgspec.json.encode(listing))
        except OSError as error:
            hint = "set model.download.cache to a writable folder"
            raise SourceError(f"{self._home}: cannot be written: {error.strerror}; {hint}") from error
        return listing

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        key = f"{self.prefix}/{file.name}" if self.prefix else file.name
        # With If-Match, an object that was replaced meanwhile cannot be mixed with a part of the old one.
        options: Any = {"if_match": _quoted(file.version)} if file.version else {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        what = f"{self.kind}://{self.bucket}/{key}"
        reply = self._request(what, lambda store: obstore.get(store, key, options=options))
        try:
            for block in reply.stream(min_chunk_size=BLOCK):
                yield bytes(block)
        except (BaseError, OSError) as error:
            raise self._translate(error, what) from error

    def read_object(self, most: int) -> bytes:
        """Return up to `most` bytes of the object whose name is the prefix."""
        range_: Any = {"range": (0, most)}
        reply = self._request(self.shown, lambda store: obstore.get(store, self.prefix, options=range_).bytes())
        return bytes(reply)

    def _request(self, what: str, send: Callable[[Any], T]) -> T:
        """Return the result of a request. A bucket of S3 in another region is asked there."""
        try:
            try:
                return send(self._client)
            except BaseError as error:
                if self.kind != "s3" or _WRONG_REGION not in str(error):
                    raise
                region = bucket_region(self.bucket, self.environ, self.stall_s)
                self.__dict__["_client"] = self._open(region)
                return send(self._client)
        except (BaseError, OSError, ValueError) as error:
            raise self._translate(error, what) from error

    @cached_property
    def _client(self) -> Any:
        return self._open(self.account)

    def _open(self, place: str) -> Any:
        try:
            return OPEN[self.kind](self.bucket, self.environ, self.stall_s, place)
        except (BaseError, OSError, ValueError) as error:
            text = str(error).partition("\n")[0].strip(" :")
            fix = ACCESS_HINTS[self.kind]
            if _NO_ACCOUNT in text:
                fix = "set AZURE_STORAGE_ACCOUNT_NAME, or model.source.az.account"
            raise SourceError(f"{self.shown}: {text}; {fix}") from error

    def _translate(self, error: Exception, what: str) -> SourceError:
        """Translate an error of obstore to ours."""
        text = str(error).partition("\n")[0].strip(" :")
        if isinstance(error, PreconditionError):
            return RestartFile(f"{what}: the object changed while it was read")
        found = _STATUS.search(text)
        status = 404 if isinstance(error, FileNotFoundError) else int(found[1]) if found else 0
        if status == 416:
            return RestartFile(f"{what}: the object changed while it was read")
        hint = f"; {ACCESS_HINTS[self.kind]}"
        cause = _cause(error)
        if _IDENTITY.search(text):
            passing = status in TRANSIENT if status else not isinstance(error, UnauthenticatedError)
            return SourceError(f"{what}: no credentials: {text}{cause}{hint}", transient=passing)
        if isinstance(error, InvalidPathError):
            return SourceError(f"{what}: {text}; rename or move the object")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
            return SourceError(f"{what}: the store answered {status or 403}{hint}")
        if status and status not in TRANSIENT:
            return SourceError(f"{what}: the store answered {status}")
        if status:
            return SourceError(f"{what}: the store answered {status}", transient=True)
        if "kind: Timeout" in str(error):
            return SourceError(f"{what}: no data for {self.stall_s:g} s", transient=True)
        return SourceError(f"{what}: {text}{cause}", transient=not isinstance(error, ValueError))  # a wrong prefix


def _cause(error: Exception) -> str:
    """Return the reason of the system, which obstore has only in the details after the first line."""
    if "InvalidCertificate" in str(error):
        return ": its certificate is not trusted; SSL_CERT_FILE may name a file with that of its authority"
    found = _SYSTEM.findall(str(error))
    return f": {found[-1]}" if found else ""


def _quoted(tag: str) -> str:
    """Return an entity tag as a header has it: lists of Azure have no quotes."""
    return tag if tag.startswith(('"', "W/")) else f'"{tag}"'


def digest(files: Iterable[RemoteFile]) -> str:
    """Return a hash of names, sizes and versions of the files."""
    lines = "\n".join(f"{file.name}\t{file.size}\t{file.version}" for file in sorted(files, key=lambda f: f.name))
    return hashlib.sha256(lines.encode()).hexdigest()
