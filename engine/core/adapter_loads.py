"""Loading and unloading of LoRA adapters while the engine runs, in the loop's thread.

The worker's store reads one adapter after another in a thread of its own and calls back. A request for an adapter that
is being loaded for the first time waits until the result is known.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.api.config import AdapterConfig
from engine.api.errors import EngineError
from engine.api.messages import AdapterChanged, Failed, FromEngine, LoadAdapter, Output, Submit
from engine.core.scheduler import Scheduler

Done = Callable[[EngineError | None], None]


class AdapterStore(Protocol):
    """The adapters of all ranks by version. `done` is called in another thread."""

    def read(self, adapter: AdapterConfig, done: Done) -> None: ...
    def register(self, version: int, adapter: AdapterConfig) -> None: ...
    def prepare(self, version: int, done: Done) -> None: ...
    def release(self, version: int) -> None: ...
    def forget(self, version: int) -> None: ...


@dataclass(frozen=True)
class _Held:
    submit: Submit
    arrived: float


class AdapterLoads:
    """Connects the scheduler's adapters with the store. Without one, all adapters are loaded at the start.

    paths: folders of the adapters that were loaded at the start.
    call: runs a function in the loop's thread. send: sends messages. submit: submits a request that was held."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: AdapterStore | None,
        paths: dict[str, str],
        *,
        call: Callable[[Callable[[], None]], None],
        send: Callable[[FromEngine], None],
        submit: Callable[[Submit, float], None],
    ) -> None:
        self._scheduler, self._store, self._paths = scheduler, store, dict(paths)
        self._call, self._send, self._submit = call, send, submit
        self._queue: deque[tuple[LoadAdapter, float]] = deque()  # the first one is being read
        self._reading: set[int] = set()  # versions
        self._held: dict[str, list[_Held]] = {}
        self.loads = 0
        self.load_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Return whether a callback of the store is awaited."""
        return bool(self._queue or self._reading)

    def load(self, message: LoadAdapter) -> None:
        if self._store is None:
            why = "this engine has no adapter slots; set adapter_loading.max_active"
            self._send(AdapterChanged(message.name, error=why))
            return
        self._queue.append((message, time.monotonic()))
        if len(self._queue) == 1:
            self._begin()

    def unload(self, name: str) -> None:
        """Remove an adapter. An unknown name is not an error: the engine may have been restarted since."""
        self._queue = deque(entry for at, entry in enumerate(self._queue) if not at or entry[0].name != name)
        if name in self._paths and self._store is not None:
            del self._paths[name]
            self._scheduler.unload_adapter(name)
            self.apply()
        self._send(AdapterChanged(name, loaded=False))

    def holds(self, submit: Submit, arrived: float) -> bool:
        """Hold a request whose adapter is being loaded for the first time. Return whether it is held."""
        name = submit.adapter
        if not name or name in self._paths or not any(message.name == name for message, _ in self._queue):
            return False
        self._held.setdefault(name, []).append(_Held(submit, arrived))
        return True

    def drop(self, id: str) -> bool:
        """Drop a held request. Return whether there was one."""
        for held in self._held.values():
            for one in held:
                if one.submit.id == id:
                    held.remove(one)
                    return True
        return False

    def drop_all(self) -> None:
        self._held.clear()

    def apply(self) -> None:
        """Start to read the versions that requests wait for, and let the store drop others."""
        adapters, store = self._scheduler.adapters, self._store
        if store is None:
            return
        for version in [one for one in adapters.wanted if one not in self._reading]:
            self._reading.add(version)
            began = time.monotonic()
            store.prepare(version, self._in_loop(partial(self._prepared, version, began)))
        for version in adapters.released:
            store.release(version)
        for version in adapters.forgotten:
            store.forget(version)
        adapters.released.clear()
        adapters.forgotten.clear()

    def _in_loop(self, function: Done) -> Done:
        return lambda error: self._call(partial(function, error))

    def _prepared(self, version: int, began: float, error: EngineError | None) -> None:
        self._reading.discard(version)
        if error is None:
            self._count(began)
            self._scheduler.adapter_prepared(version)
            return
        deltas = self._scheduler.adapter_failed(version)
        for delta in deltas:
            self._send(Failed(delta.id, error.code, str(error)))
        if deltas:
            self._send(Output(self._scheduler.step, tuple(deltas)))

    def _begin(self) -> None:
        message, _ = self._queue[0]
        assert self._store is not None, "loads are queued only with a store"
        if self._paths.get(message.name) == message.path and not message.replace:
            self._finish(None)  # a gateway that was restarted loads all its adapters again
            return
        adapter = AdapterConfig(name=message.name, path=message.path)
        self._store.read(adapter, self._in_loop(self._was_read))

    def _was_read(self, error: EngineError | None) -> None:
        message, began = self._queue[0]
        if error is None:
            assert self._store is not None, "loads are queued only with a store"
            self._count(began)
            version = self._scheduler.load_adapter(message.name)
            self._store.register(version, AdapterConfig(name=message.name, path=message.path))
            self._paths[message.name] = message.path
            self.apply()
        self._finish(error)

    def _finish(self, error: EngineError | None) -> None:
        """Report the result of the first load of the queue, and begin the next one."""
        message, began = self._queue.popleft()
        seconds = time.monotonic() - began
        self._send(AdapterChanged(message.name, error=str(error or ""), seconds=seconds))
        if not any(other.name == message.name for other, _ in self._queue):
            for held in self._held.pop(message.name, ()):
                self._submit(held.submit, held.arrived)
        if self._queue:
            self._begin()

    def _count(self, began: float) -> None:
        self.loads += 1
        self.load_seconds += time.monotonic() - began
