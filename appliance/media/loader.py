"""Media of a request: from URLs to processed items, with a cache.

Files are fetched concurrently, and decoded and processed in separate processes. An error names the field of its item.
"""

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np

from appliance.config.sections.limits import Media
from appliance.media.job import Job, JobLimits
from appliance.media.part import DONE, EXHAUSTED, LoadedMedia, MediaPart
from appliance.media.sources import SourceError, Sources
from appliance.runtime.limited_processes import LimitExceeded, ProcessPool
from engine.api.errors import RequestError
from engine.media.formats import check_format
from engine.media.processed import MediaError, Processed
from engine.media.spectrogram import SAMPLE_RATE, Samples

PROCESSES: Final = max(1, min(4, os.cpu_count() or 1))
MAX_NAMES: Final = 4096
"""Names of items that are known together."""
SAMPLE_BYTES: Final = 16
"""Bytes of a sample of a recording, in all copies that a process has."""
CPU_SHARE: Final = 1 / 60
"""CPU seconds of a process for a second of a recording."""
_decode = msgspec.msgpack.Decoder(Processed).decode

COUNTS: Final = {"image": "images", "video": "videos", "audio": "audios"}
"""Key of `limits.media` with the number of items, by modality."""

Key = tuple[bytes, str, str]
"""Hash of the files, modality and options of an item."""


Record = Callable[[float, float], None]
"""Called for each item with the seconds of fetching it, and of decoding and processing it: 0.0 if it was cached."""


def ignore(fetch_s: float, process_s: float) -> None:
    """Record nothing."""


class Cache:
    """Processed items by key. The least recently used ones are dropped beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[Key, Processed] = OrderedDict()

    def get(self, key: Key) -> Processed | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: Key, item: Processed) -> None:
        if item.size > self._max_bytes or key in self._kept:
            return
        self._kept[key] = item
        self._bytes += item.size
        while self._bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size


class MediaLoader:
    """Loads media for the model in this folder. Belongs to one event loop."""

    def __init__(
        self,
        model: str,
        limits: Media,
        sources: Sources | None = None,
        *,
        max_audio_seconds: float = 0.0,
        width: int = 0,
    ) -> None:
        """max_audio_seconds: duration of the longest recording for speech recognition, for which processes may use more
        time and memory. width: columns of embeddings that requests may have."""
        self._limits = limits
        self._sources = sources or Sources(limits)
        self._cache = Cache(limits.cache)
        self._names: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()  # hash by owner, modality and uuid
        self._model = model
        self._max_audio_seconds = max_audio_seconds
        self._width = width
        self._pool = self._new_pool()
        self._threads = ThreadPoolExecutor(PROCESSES, "media")
        self.processed = 0
        """Number of items that were decoded and processed, not found in the cache."""

    def _new_pool(self) -> ProcessPool:
        limits = self._limits
        job_limits = JobLimits(limits.max_bytes, limits.max_pixels, limits.frames, limits.seconds, self._width)
        return ProcessPool(
            "appliance.media.media_process",
            self._model,
            msgspec.json.encode(job_limits).decode(),
            size=PROCESSES,
            memory=limits.memory + int(SAMPLE_BYTES * SAMPLE_RATE * self._max_audio_seconds),
            cpu_s=limits.time + CPU_SHARE * self._max_audio_seconds,
        )

    async def load(self, parts: Sequence[MediaPart], owner: str = "", record: Record = ignore) -> LoadedMedia:
        """Return the processed items. owner: name for the API key; keys do not share uuids. Raise
        RequestError that names the field of an item."""
        for kind, name in COUNTS.items():
            most = getattr(self._limits, name)
            # Without a tower there are only embeddings, which max_context limits.
            own = [part for part in parts if part.kind == kind and (most or not part.embeddings)]
            if len(own) > most:
                raise RequestError(
                    f"The request has {len(own)} {name}; the limit is {most} (limits.media.{name}).", own[most].where
                )
        unique = {part: part for part in reversed(parts)}
        async with asyncio.TaskGroup() as group:
            tasks = {part: group.create_task(self._loaded(one, owner, record)) for part, one in unique.items()}
        for task in reversed(tasks.values()):
            if isinstance(error := task.result(), RequestError):
                raise error
        return {part: found for part, task in tasks.items() if isinstance(found := task.result(), Processed)}

    async def _loaded(self, part: MediaPart, owner: str, record: Record) -> Processed | RequestError:
        try:
            if not part.url:
                return self._named(part, owner)
            began_s = time.monotonic()
            files = await self._sources.read(part.url, part.kind)
            check_format(files[0], part.format)
            digest = await asyncio.to_thread(_digest, files)
            key = (digest, part.content, part.options)
            fetched_s, process_s = time.monotonic(), 0.0
            found = self._cache.get(key)
            if found is None:
                job = Job(part.kind, files, part.options, embeddings=part.embeddings)
                found = _decode(await self._asked(job))
                self.processed += 1
                self._cache.put(key, found)
                process_s = time.monotonic() - fetched_s
            record(fetched_s - began_s, process_s)
            if part.uuid:
                self._name(part, owner, digest)
            return found
        except (SourceError, MediaError, LimitExceeded) as error:
            return RequestError(f"{part.where}: {_sentence(error, part.kind)}", part.where)

    def _name(self, part: MediaPart, owner: str, digest: bytes) -> None:
        name = (owner, part.content, part.uuid)
        self._names[name] = digest
        self._names.move_to_end(name)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def _named(self, part: MediaPart, owner: str) -> Processed:
        digest = self._names.get((owner, part.content, part.uuid))
        found = None if digest is None else self._cache.get((digest, part.content, part.options))
        if found is None:
            raise MediaError(
                f"no {part.kind} with the uuid {part.uuid[:100]!r} and these options is known; send it again, with its "
                "content"
            )
        return found

    async def samples(self, data: bytes, max_seconds: float) -> Samples:
        """Return the mono samples at 16 kHz of an audio file. Raise MediaError with a sentence.

        A reload can raise `max_seconds`.
        """
        self._raise_limits(max_seconds)
        try:
            reply = await self._asked(Job("samples", (data,), seconds=max_seconds))
        except LimitExceeded as error:
            raise MediaError(f"The file exceeds a limit: {error}.") from None
        return np.frombuffer(reply, "<f4")

    async def audio(self, data: bytes, max_seconds: float) -> Processed:
        """Return a processed recording, which a decoder transcribes. Raise MediaError with a sentence."""
        self._raise_limits(max_seconds)
        key = (await asyncio.to_thread(_digest, (data,)), "audio", f"transcribed within {max_seconds:g} s")
        found = self._cache.get(key)
        if found is None:
            try:
                found = _decode(await self._asked(Job("audio", (data,), seconds=max_seconds)))
            except LimitExceeded as error:
                raise MediaError(f"The file exceeds a limit: {error}.") from None
            self.processed += 1
            self._cache.put(key, found)
        return found

    def _raise_limits(self, max_seconds: float) -> None:
        """Replace the processes by others if a reload raised the duration of the longest recording. The present ones
        end after their jobs."""
        if max_seconds > self._max_audio_seconds:
            self._max_audio_seconds = max_seconds
            self._pool = self._new_pool()

    async def _asked(self, job: Job) -> memoryview:
        """Return the result of a job. Raise MediaError or LimitExceeded."""
        message = msgspec.msgpack.encode(job)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, self._pool, message)

    def _ask(self, pool: ProcessPool, job: bytes) -> memoryview:
        reply = pool.ask(job, is_last=lambda reply: reply[:1] == EXHAUSTED)
        if reply[:1] == DONE:
            return memoryview(reply)[1:]
        raise MediaError(reply[1:].decode())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()


def _digest(files: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in files)).digest()


def _sentence(error: Exception, kind: str) -> str:
    if isinstance(error, LimitExceeded):
        return f"the {kind} exceeds a limit: {error}."
    return f"{str(error).removesuffix('.')}."
