"""Causes of a program's exit, each with its meaning and its remedy. docs/operations.md contains this table; a test
compares the two."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.supervisor.death import Death
from engine.api.errors import EXIT_PERMANENT


@dataclass(frozen=True)
class Cause:
    name: str
    meaning: str
    cure: str


OOM_KILL = Cause(
    "oom-kill",
    "The kernel killed it, or a rank of it, because memory ran out.",
    "Raise the container's memory limit, or lower hardware.memory_share, model.max_context or "
    "hardware.kv_cache_memory; `slipway plan MANIFEST` shows the bytes by part.",
)
HANG = Cause(
    "hang",
    "It ran and made no progress for as long as health.stalled_* allows, so the sentinel killed it.",
    "Look into the log for what it did last. If a step is honestly that slow, raise the key that the message names.",
)
DEVICE = Cause(
    "device-error",
    "The GPU or its driver reported an error, which leaves a process without a device.",
    "Look for Xid lines in the kernel's log (dmesg). If it comes again with other requests, drain the node and test "
    "the GPU; if always with one request, report it.",
)
DRIFT = Cause(
    "drift",
    "A golden prompt of its self-test gave other numbers than the lock has, or than the engine gave when it began.",
    "The last line says which prompt, what was expected and found. Memory that lost a bit is cured by a restart. If it "
    "comes again, test memory and device of the node, and look for kernels or libraries that changed since the lock; "
    "`slipway selftest MANIFEST` shows each prompt.",
)
PERMANENT = Cause(
    "permanent",
    f"It ended with code {EXIT_PERMANENT}: it found an error that a restart cannot cure.",
    "Correct what its last line names; that line's first word also chooses the exit code.",
)
SIGNAL = Cause(
    "signal",
    "A signal killed it: SIGSEGV, SIGBUS, SIGILL and SIGABRT are its own errors, SIGKILL and SIGTERM somebody's.",
    "After SIGKILL look for who kills processes here; after SIGSEGV and its like try hardware.kernels: torch, and "
    "report the crash bundle.",
)
EXIT = Cause(
    "exit-code",
    "It ended by itself, with an error that nobody foresaw, or with none at all.",
    "Read its last lines; a traceback is worth a report.",
)

CAUSES = (OOM_KILL, HANG, DEVICE, DRIFT, PERMANENT, SIGNAL, EXIT)

_DEVICE = re.compile(
    r"CUDA error|CUDA driver error|AcceleratorError|device-side assert|illegal memory access|uncorrectable ECC|"
    r"NCCL error|ncclSystemError|CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+|\bXid\b|has fallen off the bus"
)
_DRIFT = re.compile(r"slipway engine: (?:drift|self_test): ")
_RANK_KILLED = re.compile(r"rank \d+ \(process \d+\) was killed by SIGKILL")


def classify(death: Death | None, *, hung: bool, permanent: bool, last_lines: Sequence[str]) -> Cause:
    """Return the cause of an exit. `last_lines` are the last lines that the program printed. `death` is None if the
    program has no reaper, or if its reaper was killed."""
    killed = death is not None and death.signal == "SIGKILL"
    if hung:
        return HANG
    lacked = death is not None and death.memory.get("oom_kill", 0) > 0
    if lacked and (killed or any(_RANK_KILLED.search(line) for line in last_lines)):
        return OOM_KILL
    if not killed and any(_DRIFT.match(line) for line in last_lines):
        return DRIFT
    if permanent:
        return PERMANENT
    if not killed and any(_DEVICE.search(line) for line in last_lines):
        return DEVICE
    return SIGNAL if death is None or death.signal else EXIT
