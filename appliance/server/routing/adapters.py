"""LoRA adapters that change while the service runs: names, allowed folders, and the engines that load them.

The registry is kept in a file of the run directory, so a gateway that was restarted knows the adapters of its engines.
An engine that becomes ready gets every difference to the manifest before the requests that wait for it.
"""

import asyncio
import hashlib
import logging
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from appliance.checkpoints.remote import SourceError
from appliance.checkpoints.unpack import unpack
from appliance.server.errors.api import BadRequest, InvalidInput, NotFound, Unavailable
from engine.api.client import EngineClient
from engine.api.config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.api.messages import AdapterChanged, LoadAdapter, UnloadAdapter

log = logging.getLogger(__name__)
FILE = "adapters.json"
UNPACKED = "adapters"
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
MAX_UNPACKED = 16 * 2**30  # bytes of the files of one adapter
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")
RETRY_AFTER_S = 3
_UNPACKING = threading.Lock()
LOAD_S = 300.0  # maximum time for an engine to load an adapter


@dataclass(frozen=True)
class Folders:
    """Folders whose sub-folders may be loaded as adapters; symbolic links are resolved."""

    allowed: tuple[Path, ...]
    unpack_folder: Path | None = None  # for archives, which are refused without it

    @classmethod
    def of(cls, folders: Sequence[str], run: str = "") -> "Folders":
        return cls(tuple(Path(folder).resolve() for folder in folders), Path(run) / UNPACKED if run else None)

    def find(self, name: str, path: str) -> Path:
        """Return the resolved folder of an adapter. A relative path starts at one of the allowed folders. Raise
        InvalidInput for a path outside of them, NotFound if there is no adapter."""
        inside = [one for one in self._resolved(path) if self._contains(one)]
        if not inside:
            raise InvalidInput(
                f"lora_path of adapter '{name}' is outside of the folders that adapter_loading.folders allows.",
                "lora_path",
            )
        found = next((one for one in inside if (one / ADAPTER_CONFIG).is_file() or is_archive(one)), None)
        if found is not None and is_archive(found):
            return self._unpacked(name, found)
        if found is None:
            raise NotFound(
                f"No adapter found for '{name}': there is no folder with {ADAPTER_CONFIG}, nor an archive, here.",
                "lora_path",
            )
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not self._contains((found / file).resolve()):
                raise InvalidInput(
                    f"{file} of adapter '{name}' is a link to a file outside of the folders that "
                    "adapter_loading.folders allows.",
                    "lora_path",
                )
        return found

    def _unpacked(self, name: str, archive: Path) -> Path:
        """Unpack an archive into the run directory, unless this version of it is there. Return the adapter's folder.
        Raise InvalidInput for an archive that is damaged, or that has no adapter."""
        if self.unpack_folder is None:
            raise InvalidInput("Archives of adapters need a run directory.", "lora_path")
        about = archive.stat()
        folder = self.unpack_folder / f"{archive.name}-{about.st_mtime_ns}-{about.st_size}"
        with _UNPACKING:  # several requests may name the same archive
            if not folder.exists():
                new = folder.with_name(f"{folder.name}.new")
                shutil.rmtree(new, ignore_errors=True)
                try:
                    unpack(archive, new, MAX_UNPACKED, limit="the maximum of an adapter")
                    new.rename(folder)
                except SourceError as error:
                    raise InvalidInput(f"The archive of adapter '{name}': {error}.", "lora_path") from error
                finally:
                    shutil.rmtree(new, ignore_errors=True)
        found = next((one.parent for one in folder.rglob(ADAPTER_CONFIG)), None)
        if found is None:
            raise InvalidInput(f"The archive of adapter '{name}' has no {ADAPTER_CONFIG}.", "lora_path")
        return found

    def named(self, name: str) -> Path | None:
        """Return the sub-folder that has the name of a model, if it has an adapter."""
        if not NAME.fullmatch(name):
            return None
        inside = (one for one in self._resolved(name) if self._contains(one))
        return next((one for one in inside if (one / ADAPTER_CONFIG).is_file()), None)

    def _resolved(self, path: str) -> Iterator[Path]:
        for folder in self.allowed:
            try:
                yield (folder / path).resolve()
            except (OSError, ValueError, RuntimeError):  # a null character, or a loop of links
                continue

    def _contains(self, path: Path) -> bool:
        return any(folder in path.parents for folder in self.allowed)


def is_archive(path: Path) -> bool:
    return path.name.endswith(ARCHIVES) and path.is_file()


class AdapterRegistry:
    """The adapters that requests may select, by name, with the folder of those that were loaded while running."""

    def __init__(
        self,
        first: Sequence[str],
        *,
        names: Sequence[str] = (),
        folders: Sequence[str] = (),
        on_request: bool = False,
        run: str = "",
        clients: Callable[[], Sequence[EngineClient]] = tuple,
    ) -> None:
        """Create the registry.

        Args:
            first: adapters of the manifest, which engines load at the start.
            names: names of the base model, which an adapter cannot have.
            folders: folders from which adapters may be loaded.
            on_request: load the adapter that a request names as its model.
            run: run directory; "" keeps the registry in memory only.
            clients: returns the connections to the engines.
        """
        self._first, self._base, self._clients = tuple(first), tuple(names), clients
        self.folders, self._on_request = Folders.of(folders, run), on_request and bool(folders)
        self._sources: dict[str, str] = {}  # path in the request that loaded an adapter
        self._file = Path(run) / FILE if run else None
        self._paths: dict[str, str] = dict.fromkeys(first, "")  # "": the folder in the manifest
        if self._file is not None and self._file.exists():
            self._paths = msgspec.json.decode(self._file.read_bytes(), type=dict[str, str])
        self._changing = asyncio.Lock()
        self._answers: dict[tuple[int, str], deque[asyncio.Future[AdapterChanged]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def source(self, name: str) -> str:
        """Return the path with which an adapter was loaded, "" for one of the manifest."""
        return self._sources.get(name, "")

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter on all engines. Raise an ApiError if it cannot be served; then nothing changes."""
        if not NAME.fullmatch(name):
            raise InvalidInput(
                "The name of an adapter begins with a letter or digit, and has up to 200 letters, digits and ._/:-",
                "lora_name",
            )
        if name in self._base:
            raise InvalidInput(f"The lora adapter '{name}' has the name of the base model.", "lora_name")
        folder = await asyncio.to_thread(self.folders.find, name, path)
        async with self._changing:
            if name in self._paths and not in_place:
                raise InvalidInput(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    "lora_name",
                )
            await self._load(name, str(folder))
            self._sources[name] = path

    async def unload(self, name: str) -> None:
        """Remove an adapter. Open requests with it are completed. Raise NotFound for an unknown name."""
        async with self._changing:
            if name not in self._paths:
                raise NotFound(f"The lora adapter '{name}' cannot be found.", "lora_name")
            del self._paths[name]
            self._sources.pop(name, None)
            self._save()
            for index in self._serving():
                self._send(index, UnloadAdapter(name))

    async def load_named(self, model: str | None) -> None:
        """Load the adapter that a request names as its model, if this is enabled and there is one."""
        if not self._on_request or not model or model in self._base or model in self._paths:
            return
        folder = await asyncio.to_thread(self.folders.named, model)
        if folder is None:
            return
        folder = await asyncio.to_thread(self.folders.find, model, str(folder))
        async with self._changing:
            if model not in self._paths:  # another request may have loaded it meanwhile
                await self._load(model, str(folder))

    # Engines

    def engine_ready(self, index: int) -> None:
        """Send an engine that has just become ready every difference to the manifest, which it has loaded."""
        for name in self._first:
            if name not in self._paths:
                self._send(index, UnloadAdapter(name))
        for name, path in self._paths.items():
            if path:
                self._send(index, LoadAdapter(name, path))

    def engine_down(self, index: int) -> None:
        """End the waits for this engine: it gets the adapters again when it is ready."""
        for key in [key for key in self._answers if key[0] == index]:
            for answer in self._answers.pop(key):
                if not answer.done():
                    answer.set_exception(Unavailable("The engine exited while it loaded the adapter.", RETRY_AFTER_S))
                    answer.exception()  # asyncio logs no error if the request is gone

    def answered(self, index: int, message: AdapterChanged) -> None:
        """Take the answer of an engine to the oldest open request for this adapter."""
        waiting = self._answers.get((index, message.name))
        if not waiting:
            return
        answer = waiting.popleft()
        if not waiting:
            del self._answers[index, message.name]
        if not answer.done():
            answer.set_result(message)

    def _serving(self) -> list[int]:
        return [index for index, client in enumerate(self._clients()) if client.state.kind == "ready"]

    def _send(self, index: int, message: LoadAdapter | UnloadAdapter) -> asyncio.Future[AdapterChanged]:
        answer: asyncio.Future[AdapterChanged] = asyncio.get_running_loop().create_future()
        self._answers.setdefault((index, message.name), deque()).append(answer)
        self._clients()[index].send_adapter(message)
        return answer

    async def _load(self, name: str, path: str) -> None:
        serving = self._serving()
        if not serving:
            raise Unavailable("No engine is ready to load the adapter.", RETRY_AFTER_S)
        sent = [self._send(index, LoadAdapter(name, path, replace=True)) for index in serving]
        try:
            found = await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), LOAD_S)
        except TimeoutError:
            raise Unavailable(f"No answer of an engine within {LOAD_S:g} s.", RETRY_AFTER_S) from None
        answers = [one for one in found if isinstance(one, AdapterChanged)]
        errors = [one.error for one in answers if one.error]
        if errors or not answers:
            if name not in self._paths:
                for index in self._serving():
                    self._send(index, UnloadAdapter(name))
            if errors:
                raise BadRequest(f"The lora adapter '{name}' cannot be loaded: {errors[0]}", "lora_path")
            raise Unavailable("The engine exited while it loaded the adapter.", RETRY_AFTER_S)
        self._paths[name] = path
        self._save()
        try:
            files = await asyncio.to_thread(_file_digests, Path(path))
        except OSError as error:
            log.warning("adapter %s loaded from %s, whose files cannot be read: %s", name, path, error.strerror)
            return
        log.info("adapter %s loaded from %s: %s", name, path, files)

    def _save(self) -> None:
        if self._file is not None:
            new = self._file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self._paths))
            new.replace(self._file)


def _file_digests(folder: Path) -> str:
    """Return the SHA-256 of each file of an adapter, for the log."""
    found = []
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (folder / name).open("rb") as file:
            found.append(f"{name} has sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return ", ".join(found)
