"""Gateways of these tests share the processes that render templates, process media and compile grammars.

Each process takes 0.15 to 0.5 s of CPU time to start, and a gateway of a test handles a few requests. Processes keep no
state between jobs. The tests of the pools themselves are in other folders and use pools of their own; so do gateways
that run in a process of their own.
"""

from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.chat_templates import renderers
from appliance.media import loader
from appliance.runtime.limited_processes import ProcessPool
from appliance.server.http import service
from appliance.server.routing.grammars import Grammars

MAX_POOLS = 8
"""Pools that are kept, the most recently used ones. Idle processes of one use up to 200 MB."""


class SharedPools:
    """Pools by their settings."""

    def __init__(self) -> None:
        self._pools: OrderedDict[Any, ProcessPool] = OrderedDict()

    def pool(self, module: str, *arguments: str, **limits: Any) -> SimpleNamespace:
        """Return the pool of these settings as a pool that the gateway cannot close."""
        key = (module, arguments, tuple(limits.items()))
        if key not in self._pools:
            self._pools[key] = ProcessPool(module, *arguments, **limits)
        self._pools.move_to_end(key)
        while len(self._pools) > MAX_POOLS:
            self._pools.popitem(last=False)[1].close()
        return SimpleNamespace(ask=self._pools[key].ask, close=lambda: None)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def shared_pools() -> Iterator[SharedPools]:
    pools = SharedPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def shared_compilers() -> Iterator[type[Grammars]]:
    """Return Grammars whose objects share their compiler processes, and the threads that start them: a process ends
    with its thread."""

    class SharedCompilers(Grammars):
        def __init__(self, checked: Any) -> None:
            super().__init__(checked)
            self._pool.shutdown()
            self._pool, self._idle = shared._pool, shared._idle

        def close(self) -> None:
            for check in self._running.values():
                check.leave()

    shared = Grammars(lambda outcome, seconds: None)
    yield SharedCompilers
    shared.close()


@pytest.fixture(scope="module", autouse=True)
def shared_processes(shared_pools: SharedPools, shared_compilers: type[Grammars]) -> Iterator[None]:
    """Replace the pools until the end of the file: files of other folders follow in the same pytest."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (renderers, loader):
            patch.setattr(module, "ProcessPool", shared_pools.pool)
        patch.setattr(service, "Grammars", shared_compilers)
        yield
