"""Terminate all descendants of this process."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from appliance.runtime.processes import descendants, reap

_POLL_S = 0.02  # the end of a grandchild sends no signal to this process, so the sweep has to poll


async def kill_tree(grace_s: float, reaped: Callable[[dict[int, int]], None]) -> int:
    """Terminate all descendants of this process: send SIGTERM to each, and after `grace_s` SIGKILL until none is left.

    `reaped` is called with the result of `reap`. Return how many processes were signalled.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    signalled: set[int] = set()
    while True:
        reaped(reap())
        alive = descendants(os.getpid())
        if not alive:
            return len(signalled)
        hard = loop.time() >= deadline
        for pid in alive:
            if hard or pid not in signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if hard else signal.SIGTERM)
        signalled.update(alive)
        await asyncio.sleep(_POLL_S)
