"""Repositories of the Hugging Face hub. huggingface_hub returns the list of files. They are stored in the hub's own
cache, in the layout that all clients share, so that downloads are shared with other programs:

    models--ORG--NAME/blobs/VERSION            content of a file: SHA-256 of large files, git object id of others
    models--ORG--NAME/snapshots/COMMIT/FILE    a link to it
    models--ORG--NAME/refs/BRANCH              latest known commit of a branch or tag

The download of huggingface_hub restarts a file in each process, so this module fetches the bytes, with resumption.
Source: huggingface_hub 2.4, file_download.py.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.remote import TRANSIENT, Listing, RemoteFile, SourceError, select

if TYPE_CHECKING:
    from appliance.checkpoints.web import HttpClient

COMMIT = re.compile(r"[0-9a-f]{40}")
ACCESS_HINT = (
    "declare a token with access to the repository in `secrets` and set model.credentials to it (or set HF_TOKEN)"
)


@dataclass(frozen=True)
class Hub:
    """A repository of the hub."""

    repo: str
    revision: str
    patterns: tuple[str, ...]
    cache: Path  # the hub's cache, by default $HF_HOME/hub
    endpoint: str
    token: str = field(default="", repr=False)  # empty without a token
    stall_s: float = 60.0

    @property
    def shown(self) -> str:
        return f"huggingface {self.repo}"

    @property
    def name(self) -> str:
        return self.repo.rpartition("/")[2]

    @property
    def _home(self) -> Path:
        return self.cache / f"models--{self.repo.replace('/', '--')}"

    def known(self) -> Listing | None:
        commit = self.revision
        if not COMMIT.fullmatch(commit):
            try:
                commit = (self._home / "refs" / self.revision).read_text().strip()
            except OSError:
                return None
        try:
            listing = msgspec.json.decode(self._list_file(commit).read_bytes(), type=Listing)
        except (OSError, msgspec.DecodeError):
            return self._listing_of_other_client(commit)
        return msgspec.structs.replace(listing, fixed=commit == self.revision)

    def _listing_of_other_client(self, commit: str) -> Listing | None:
        """Return the files that another client downloaded. The list may be incomplete, so it is not used while the hub
        can be reached."""
        folder = self._home / "snapshots" / commit
        files = tuple(
            RemoteFile(str(path.relative_to(folder)), path.stat().st_size, path.resolve().name)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        )
        try:
            return Listing(commit, select(files, self.patterns)) if files else None
        except SourceError:
            return None

    def listing(self) -> Listing:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        api = HfApi(endpoint=self.endpoint, token=self.token or False, library_name="slipway")
        where = f"{self.shown} at {self.endpoint}"
        try:
            info = api.model_info(self.repo, revision=self.revision, files_metadata=True, timeout=self.stall_s)
        except GatedRepoError as error:
            raise SourceError(f"{where}: access requires the approval of its owner; {ACCESS_HINT}") from error
        except RevisionNotFoundError as error:
            raise SourceError(f"{where}: has no revision {self.revision!r}; use a commit, tag or branch") from error
        except RepositoryNotFoundError as error:
            raise SourceError(f"{where}: the repository does not exist, or it is private; {ACCESS_HINT}") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            hint = f"; {ACCESS_HINT}" if status in (401, 403) else ""
            raise SourceError(f"{where}: the hub answered {status}{hint}", transient=status in TRANSIENT) from error
        except Exception as error:  # of the HTTP library of the installed version
            raise SourceError(f"{where}: {error or type(error).__name__}", transient=True) from error
        commit = info.sha or ""
        if not COMMIT.fullmatch(commit):
            raise SourceError(f"{where}: the reply has no commit; check that HF_ENDPOINT is a Hugging Face hub")
        files = [self._file(commit, sibling) for sibling in info.siblings or ()]
        try:
            listing = Listing(commit, select(files, self.patterns), commit == self.revision)
        except SourceError as error:
            raise SourceError(f"{self.shown}@{commit[:12]}: {error}") from error
        self._store_listing(listing)
        return listing

    def _file(self, commit: str, sibling: Any) -> RemoteFile:
        lfs = sibling.lfs.sha256 if sibling.lfs else ""
        version = lfs or sibling.blob_id or ""
        if not re.fullmatch(r"[0-9a-f]{40,64}", version):  # a mirror that does not return object ids
            version = hashlib.sha256(f"{commit}/{sibling.rfilename}".encode()).hexdigest()
        return RemoteFile(sibling.rfilename, sibling.size, version, lfs)

    def _store_listing(self, listing: Listing) -> None:
        """Store the listing for a start without a network."""
        try:
            path = self._list_file(listing.revision)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(listing))
            if not COMMIT.fullmatch(self.revision):
                ref = self._home / "refs" / self.revision
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(listing.revision)
        except OSError as error:
            raise SourceError(
                f"{self.cache}: cannot be written: {error.strerror}; set model.download.cache to a "
                "writable folder, or set HF_HOME"
            ) from error

    def _list_file(self, commit: str) -> Path:
        chosen = hashlib.sha256("\n".join(self.patterns).encode()).hexdigest()[:8]
        return self._home / "slipway" / f"{commit}-{chosen}.json"

    def cache_directory(self, listing: Listing) -> CacheDirectory:
        lock = self.cache / ".locks" / f"{self._home.name}--slipway.lock"
        return CacheDirectory(self._home / "snapshots" / listing.revision, lock, self._home / "blobs")

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        known = self.known()
        commit = self.revision if known is None else known.revision
        url = f"{self.endpoint}/{self.repo}/resolve/{commit}/{quote(file.name)}"
        return self._web.stream(url, start, stop)

    @cached_property
    def _web(self) -> "HttpClient":
        from appliance.checkpoints.web import HttpClient

        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return HttpClient(stall_s=self.stall_s, headers=headers, hint=ACCESS_HINT)
