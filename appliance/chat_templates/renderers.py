"""Pool of processes that render chat templates, with limits on memory and time.

A template is code from a checkpoint or a client. The Jinja sandbox blocks files and attributes but does not limit
memory and time, so templates run in processes that the kernel can end.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from appliance.chat_templates.rendering import KINDS, Outcome
from appliance.runtime.limited_processes import LimitExceeded, ProcessPool

PROCESSES: Final = 4  # maximum number of concurrent renders
MEMORY: Final = 512 << 20
CPU_S: Final = 5.0


class Renderers:
    """Renders templates in up to `PROCESSES` processes. Methods may be called from any thread."""

    def __init__(self, *, memory: int = MEMORY, cpu_s: float = CPU_S) -> None:
        module = "appliance.chat_templates.render_process"
        self._pool = ProcessPool(module, size=PROCESSES, memory=memory, cpu_s=cpu_s)
        self.close = self._pool.close

    def render(self, source: str, scope: Mapping[str, Any]) -> Outcome:
        """Return the rendered text, or the reason why there is none. Raise ValueError if JSON cannot represent the
        scope."""
        job = json.dumps([source, scope]).encode()
        try:
            return _outcome(self._pool.ask(job, is_last=_is_limit))
        except LimitExceeded as error:
            return Outcome("limit", str(error))


def _is_limit(reply: bytes) -> bool:
    """Return True for an outcome after which the memory of the process is fragmented."""
    return KINDS[reply[0]] == "limit"


def _outcome(reply: bytes) -> Outcome:
    place, _, text = reply[1:].partition(b"\0")
    return Outcome(KINDS[reply[0]], text.decode("utf-8", "surrogatepass"), place.decode())
