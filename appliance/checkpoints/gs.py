"""Folders of Google Cloud Storage buckets, through google-cloud-storage. Access uses the machine's identity
(application default credentials). STORAGE_EMULATOR_HOST names an emulator, which is used without credentials."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from appliance.checkpoints import buckets
from appliance.checkpoints.remote import TRANSIENT, Listing, RemoteFile, RestartFile, SourceError

BLOCK = 1 << 20
ACCESS_HINT = "grant the identity of this machine (its service account) storage.objects.list and storage.objects.get"


@dataclass(frozen=True)
class Gs(buckets.Folder):
    emulated: bool = False

    scheme = "gs"

    def listing(self) -> Listing:
        try:
            blobs = list(self._client.list_blobs(self.bucket, prefix=self.start, timeout=self.stall_s, retry=None))
        except Exception as error:
            raise self._translate(error, self.shown) from error
        return self.build_listing((blob.name, int(blob.size), str(blob.generation)) for blob in blobs)

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        key = f"{self.start}{file.name}"
        # With the generation, an object that was replaced meanwhile cannot be mixed with a part of the old one.
        blob = self._client.bucket(self.bucket).blob(key, generation=int(file.version), chunk_size=8 * BLOCK)
        try:
            with blob.open("rb", timeout=self.stall_s, retry=None) as data:
                data.seek(start)
                left = (file.size or 0) - start if stop is None else min(stop, file.size or stop) - start
                while left > 0 and (block := data.read(min(8 * BLOCK, left))):
                    left -= len(block)
                    yield block
        except Exception as error:
            raise self._translate(error, f"gs://{self.bucket}/{key}") from error

    def read_object(self, most: int) -> bytes:
        """Return up to `most` bytes of the object whose name is the prefix."""
        try:
            with self._client.bucket(self.bucket).blob(self.prefix).open("rb", timeout=self.stall_s) as data:
                content: bytes = data.read(most)
        except Exception as error:
            raise self._translate(error, self.shown) from error
        return content

    @cached_property
    def _client(self) -> Any:
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage

        try:
            if self.emulated:
                return storage.Client(project="slipway", credentials=AnonymousCredentials())  # type: ignore[no-untyped-call]
            return storage.Client()
        except (GoogleAuthError, OSError) as error:
            raise SourceError(f"{self.shown}: {error}; {ACCESS_HINT}") from error

    def _translate(self, error: Exception, what: str) -> Exception:
        """Translate an error of the client to ours. Return any other error unchanged."""
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError, TransportError
        from requests.exceptions import RequestException

        if isinstance(error, GoogleAPICallError):
            status = int(error.code or 0)
            if status in (412, 416):
                return RestartFile(f"{what}: the object changed while it was read")
            hint = f"; {ACCESS_HINT}" if status in (401, 403) else ""
            return SourceError(f"{what}: the store answered {status}{hint}", transient=status in TRANSIENT)
        if isinstance(error, GoogleAuthError) and not isinstance(error, TransportError):
            return SourceError(f"{what}: {error}; {ACCESS_HINT}")
        if isinstance(error, RequestException | TransportError | OSError):
            return SourceError(f"{what}: {error}", transient=True)
        return error
