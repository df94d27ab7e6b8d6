"""LoRA adapters that enter and leave the slots of a running engine: the host cache, and the thread that fills it.

Adapters are read and converted by a thread of their own, so that steps do not wait for the disk. The worker's thread
copies a prepared adapter into a slot before a step. Files are read, not mapped: a mapped file that is truncated would
end the process.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from engine.api.config import AdapterConfig, AdapterLoadingConfig
from engine.api.errors import CheckpointError, EngineError
from engine.api.files import open_file
from engine.layers.lora import AdapterSlots, LoraEntry, prepare_entries, tensors_of
from engine.lowering.adapters import FittedAdapter, check_ranks, fitted_adapters
from engine.models.adapters import read_adapter
from engine.models.headers import TensorInfo
from engine.weights.files import TORCH_DTYPES

Entries = Mapping[str, LoraEntry]  # by the name of the projection's matrix
Done = Callable[[EngineError | None], None]


class AdapterStore:
    """Adapters of one rank by version (see engine/core/adapters.py). Methods may be called from any thread.

    The cache drops the least recently used versions beyond `cache_bytes`, except those that a prepared step needs and
    the one that was read last."""

    def __init__(self, slots: AdapterSlots, config: AdapterLoadingConfig) -> None:
        self._slots, self._max_rank, self._cache_bytes = slots, config.max_rank, config.host_cache
        self._lock = threading.Lock()
        self._fitted = dict(enumerate(slots.first))
        self._cache: OrderedDict[int, Entries] = OrderedDict()  # the most recently used one is last
        self._kept: set[int] = set()
        self._read: dict[AdapterConfig, tuple[FittedAdapter, Entries]] = {}  # without a version yet
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=torch.set_num_threads, initargs=(1,))

    @property
    def cached_bytes(self) -> int:
        with self._lock:
            return sum(map(_bytes, self._cache.values()))

    def read(self, adapter: AdapterConfig, done: Done) -> None:
        """Read and check an adapter; then call `done`, in the store's thread, with the error or None."""
        self._thread.submit(self._guarded, lambda: self._read_new(adapter), done)

    def register(self, version: int, adapter: AdapterConfig) -> None:
        """Give the adapter that was read last with this configuration its version."""
        with self._lock:
            self._fitted[version], entries = self._read.pop(adapter)
            self._insert(version, entries)

    def read_and_register(self, version: int, adapter: AdapterConfig) -> None:
        """Read an adapter that rank 0 has accepted. If it cannot be read, `fill` raises the error."""

        def work() -> None:
            self._read_new(adapter)
            self.register(version, adapter)

        self._thread.submit(self._guarded, work, _ignore)

    def prepare(self, version: int, done: Done = lambda error: None) -> None:
        """Read a version into the cache and keep it there until `fill` or `release`; then call `done`, in the store's
        thread."""
        self._thread.submit(self._guarded, lambda: self._prepare(version), done)

    def release(self, version: int) -> None:
        """Let the cache drop a version that was prepared."""
        with self._lock:
            self._kept.discard(version)

    def forget(self, version: int) -> None:
        """Drop a version without open requests."""
        with self._lock:
            self._kept.discard(version)
            self._cache.pop(version, None)
            self._fitted.pop(version, None)

    def fill(self, slot: int, version: int) -> None:
        """Copy a version into a slot. Called by the worker's thread, before the step that uses it."""
        with self._lock:
            entries = self._cache.get(version)
        if entries is None:  # on another rank than rank 0, the thread may still be reading
            entries = self._thread.submit(self._prepare, version).result()
        for name, layer in self._slots.loaded.layers.items():
            layer.fill(slot, entries.get(name))
        self.release(version)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # In the store's thread

    def _read_new(self, adapter: AdapterConfig) -> None:
        found = read_adapter(adapter.name, Path(adapter.path))
        check_ranks(found, self._max_rank)
        (fitted,) = fitted_adapters(self._slots.model, [found])
        self._read[adapter] = fitted, self._entries(fitted)

    def _prepare(self, version: int) -> Entries:
        with self._lock:
            fitted, entries = self._fitted.get(version), self._cache.get(version)
        if fitted is None:
            raise CheckpointError(f"version {version} of an adapter was unloaded before it was needed")
        entries = entries or self._entries(fitted)
        with self._lock:
            self._kept.add(version)
            self._insert(version, entries)
        return entries

    def _entries(self, fitted: FittedAdapter) -> Entries:
        tensors, slots = tensors_of(fitted), self._slots
        read = lru_cache(maxsize=2)(read_tensor)  # A and B of all experts are in two tensors, which each expert reads
        with torch.inference_mode():
            return prepare_entries(fitted, slots.stacks, lambda name: read(tensors[name]), slots.world, slots.dtype)

    def _insert(self, version: int, entries: Entries) -> None:
        self._cache[version] = entries
        self._cache.move_to_end(version)
        total = sum(map(_bytes, self._cache.values()))
        for old in [one for one in self._cache if one not in self._kept and one != version]:
            if total <= self._cache_bytes:
                break
            total -= _bytes(self._cache.pop(old))

    def _guarded(self, work: Callable[[], object], done: Done) -> None:
        try:
            work()
        except EngineError as error:
            done(error)
        except Exception as error:  # the engine continues without this adapter
            done(CheckpointError(f"the adapter cannot be read: {type(error).__name__}: {error}"))
        else:
            done(None)


def read_tensor(info: TensorInfo) -> Tensor:
    """Read a tensor. Raises CheckpointError if the file has become shorter or cannot be read."""
    try:
        with open_file(info.file) as file:
            file.seek(info.offset)
            found = bytearray(file.read(info.bytes))
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read: {error.strerror}") from error
    if len(found) != info.bytes:
        raise CheckpointError(f"{info.file}: is shorter than its header says; it was changed while it was read")
    return torch.frombuffer(found, dtype=TORCH_DTYPES[info.dtype]).view(info.shape)


def _bytes(entries: Entries) -> int:
    return sum(entry.nbytes for entry in entries.values())


def _ignore(error: EngineError | None) -> None:
    """Ignore the error: `fill` raises one if the adapter is needed."""
