"""Causes of an engine crash, each with its meaning and its cure.

docs/operations.md shows this table; a test compares the two.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.supervisor.exit_status import ExitStatus
from engine.api.errors import EXIT_PERMANENT


@dataclass(frozen=True)
class Cause:
    name: str
    meaning: str
    cure: str


OOM_KILL = Cause(
    "oom-kill",
    "The kernel killed the engine, or one of its ranks, because memory ran out.",
    "Raise the container's memory limit, or lower hardware.memory_share, model.max_context or "
    "hardware.kv_cache_memory; `slipway plan MANIFEST` shows the bytes by part.",
)
HANG = Cause(
    "hang",
    "The engine made no progress within the limits of health.stalled_*, so the restart monitor killed it.",
    "Find its last action in the log. If a step really takes that long, raise the key that the message names.",
)
DEVICE = Cause(
    "device-error",
    "The GPU or its driver reported an error, which leaves a process without a device.",
    "Look for Xid lines in the kernel's log (dmesg). If it recurs with different requests, drain the node and test the "
    "GPU; if it recurs with one request, report it.",
)
DRIFT = Cause(
    "drift",
    "A golden prompt of the self-test differs from the lock, or from the result at the engine's start.",
    "The last log line has the prompt, the expected and the computed numbers. A restart fixes a flipped bit in memory. "
    "If it recurs, test memory and device of the node, and look for kernels or libraries that changed since the lock; "
    "`slipway selftest MANIFEST` shows each prompt.",
)
PERMANENT = Cause(
    "permanent",
    f"The engine exited with code {EXIT_PERMANENT}: it found an error that a restart cannot fix.",
    "Correct the cause that its last log line names; the first word of that line also selects the exit code.",
)
SIGNAL = Cause(
    "signal",
    "A signal ended the engine: SIGSEGV, SIGBUS, SIGILL and SIGABRT are its own errors; other processes send SIGKILL "
    "and SIGTERM.",
    "After SIGKILL or SIGTERM, find the sender; after its own errors, try hardware.kernels: torch and report the crash "
    "bundle.",
)
EXIT = Cause(
    "exit-code",
    "The engine exited by itself, with an unexpected error or without one.",
    "Read its last log lines; report a traceback.",
)

CAUSES = (OOM_KILL, HANG, DEVICE, DRIFT, PERMANENT, SIGNAL, EXIT)

_DEVICE = re.compile(
    r"CUDA error|CUDA driver error|AcceleratorError|device-side assert|illegal memory access|uncorrectable ECC|"
    r"NCCL error|ncclSystemError|CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+|\bXid\b|has fallen off the bus"
)
_DRIFT = re.compile(r"slipway engine: (?:drift|self_test): ")
_RANK_KILLED = re.compile(r"rank \d+ \(process \d+\) was killed by SIGKILL")


def classify(exit_status: ExitStatus | None, *, hung: bool, permanent: bool, last_lines: Sequence[str]) -> Cause:
    """Return the cause of an exit. `last_lines` are the last lines that the program printed. `exit_status` is None if
    the program has no reaper, or if its reaper was killed."""
    killed = exit_status is not None and exit_status.signal == "SIGKILL"
    if hung:
        return HANG
    out_of_memory = exit_status is not None and exit_status.memory.get("oom_kill", 0) > 0
    if out_of_memory and (killed or any(_RANK_KILLED.search(line) for line in last_lines)):
        return OOM_KILL
    if not killed and any(_DRIFT.match(line) for line in last_lines):
        return DRIFT
    if permanent:
        return PERMANENT
    if not killed and any(_DEVICE.search(line) for line in last_lines):
        return DEVICE
    return SIGNAL if exit_status is None or exit_status.signal else EXIT
