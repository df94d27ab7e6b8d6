"""The end of a tree: whatever still runs below this process is told, and then made to end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from appliance.runtime.processes import descendants, reap

_POLL_S = 0.02  # a grandchild's end sends no signal here, so the sweep has to look


async def sweep(grace_s: float, reaped: Callable[[dict[int, int]], None]) -> int:
    """Ends all descendants of this process: SIGTERM to each, after `grace_s` SIGKILL until none is left.

    `reaped` gets what `reap` returns. Returns how many processes were told.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    told: set[int] = set()
    while True:
        reaped(reap())
        alive = descendants(os.getpid())
        if not alive:
            return len(told)
        hard = loop.time() >= deadline
        for pid in alive:
            if hard or pid not in told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if hard else signal.SIGTERM)
        told.update(alive)
        await asyncio.sleep(_POLL_S)
