"""Images of a request: from URLs to processed images, with a cache.

Images are fetched concurrently, and decoded and processed in separate processes. An error names the field of its image.
"""

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from appliance.config.sections.limits import Media
from appliance.images.part import DONE, EXHAUSTED, ImagePart, Images
from appliance.images.sources import SourceError, Sources
from appliance.runtime.limited_processes import LimitExceeded, ProcessPool
from engine.api.errors import RequestError
from engine.media.processed import ImageError, Processed

PROCESSES: Final = max(1, min(4, os.cpu_count() or 1))
_decode = msgspec.msgpack.Decoder(Processed).decode


class Cache:
    """Processed images by the hash of their files. The least recently used ones are dropped beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, Processed] = OrderedDict()

    def get(self, key: bytes) -> Processed | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: bytes, image: Processed) -> None:
        if image.size > self._max_bytes or key in self._kept:
            return
        self._kept[key] = image
        self._bytes += image.size
        while self._bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size


class ImageLoader:
    """Loads images for the model in this folder. Belongs to one event loop."""

    def __init__(self, model: str, limits: Media, sources: Sources | None = None) -> None:
        self._limits = limits
        self._sources = sources or Sources(limits)
        self._cache = Cache(limits.cache)
        arguments = (model, str(limits.max_bytes), str(limits.max_pixels))
        self._pool = ProcessPool(
            "appliance.images.image_process", *arguments, size=PROCESSES, memory=limits.memory, cpu_s=limits.time
        )
        self._threads = ThreadPoolExecutor(PROCESSES, "images")
        self.processed = 0
        """Number of images that were decoded and processed, not found in the cache."""

    async def load(self, parts: Sequence[ImagePart]) -> Images:
        """Return the processed images. Raise RequestError that names the field of an image."""
        if len(parts) > self._limits.images:
            raise RequestError(
                f"The request has {len(parts)} images; the limit is {self._limits.images} (limits.media.images).",
                parts[self._limits.images].where,
            )
        unique = {part.url: part for part in reversed(parts)}
        async with asyncio.TaskGroup() as group:
            tasks = {url: group.create_task(self._loaded(part)) for url, part in unique.items()}
        for task in reversed(tasks.values()):
            if isinstance(error := task.result(), RequestError):
                raise error
        return {url: found for url, task in tasks.items() if isinstance(found := task.result(), Processed)}

    async def _loaded(self, part: ImagePart) -> Processed | RequestError:
        try:
            data = await self._sources.read(part.url)
            key = hashlib.sha256(data).digest()
            found = self._cache.get(key)
            if found is None:
                found = await asyncio.get_running_loop().run_in_executor(self._threads, self._process, data)
                self.processed += 1
                self._cache.put(key, found)
            return found
        except (SourceError, ImageError, LimitExceeded) as error:
            return RequestError(f"{part.where}: {_sentence(error)}", part.where)

    def _process(self, data: bytes) -> Processed:
        reply = self._pool.ask(data, is_last=lambda reply: reply[:1] == EXHAUSTED)
        if reply[:1] == DONE:
            return _decode(memoryview(reply)[1:])
        raise ImageError(reply[1:].decode())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()


def _sentence(error: Exception) -> str:
    if isinstance(error, LimitExceeded):
        return f"the image exceeds a limit: {error}."
    return f"{error}."
