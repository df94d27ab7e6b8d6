"""Exit codes of `slipway`, with number, cause and remedy.

0 to 2 have their usual meaning; 10 and up are the appliance's own and stay clear of what shells, Docker
and signals use (125 to 127, and 128 plus the signal's number). docs/operations.md shows this table; a test compares
the two.
"""

from dataclasses import dataclass

from engine.api.errors import EXIT_PERMANENT


@dataclass(frozen=True)
class Exit:
    name: str
    number: int
    cause: str
    cure: str


OK = Exit("ok", 0, "Stopped as requested: by SIGTERM, SIGINT or SIGQUIT, or the command did its work.", "None needed.")
INTERNAL = Exit(
    "internal",
    1,
    "An unexpected error in the launcher itself, or a run directory that cannot be made.",
    "Read the message; if it shows a traceback, report it with the manifest.",
)
MANIFEST = Exit(
    "manifest",
    2,
    "The command line or the manifest is wrong; nothing was started.",
    "Correct the location in the message; `slipway check MANIFEST` reports all mistakes without starting anything.",
)
OUTDATED = Exit(
    "outdated",
    3,
    "`slipway upgrade` without `--write` found a manifest of an older apiVersion.",
    "`slipway upgrade --write FILE` rewrites it and keeps its comments.",
)
CHECKPOINT = Exit(
    "checkpoint",
    10,
    "The checkpoint is missing, incomplete, damaged, or has an unsupported architecture.",
    "Compare model.source with the file that the message names; copy or download the checkpoint again.",
)
MEMORY = Exit(
    "memory",
    11,
    "The model, or one block of its KV cache, does not fit into the memory of the device.",
    "`slipway plan MANIFEST` shows the bytes by part; lower model.max_context or hardware.kv_cache_memory, "
    "raise hardware.memory_share, or take a smaller model.",
)
PORT = Exit(
    "port",
    12,
    "The gateway's address is in use or not permitted; nothing was started.",
    "Choose another endpoints.port (or --port N; 0 takes a free one), or stop the process that listens there.",
)
STARTUP = Exit(
    "startup",
    13,
    "The service was not ready within health.startup_budget.",
    "Find the slow phase in the log; raise health.startup_budget if the model is just large.",
)
RESTARTS = Exit(
    "restarts",
    14,
    "A program exited more often than lifecycle.restart.max within lifecycle.restart.window.",
    "Read the cause and the last log lines in the message; an engine's crash bundle has more, and "
    "`slipway explain CAUSE` explains the fix.",
)
ENGINE = Exit(
    "engine",
    15,
    f"A program exited with code {EXIT_PERMANENT}: it found an error that a restart cannot fix.",
    "Read the last log lines of that program in the message, and correct the cause that they name.",
)
SUPERVISOR = Exit(
    "supervisor",
    16,
    "supervisord exited unexpectedly or could not start, or the restart monitor exited repeatedly.",
    "Find the process that killed it (check memory limits of the cgroup first); start again.",
)
INTEGRITY = Exit(
    "integrity",
    17,
    "The checkpoint's files do not match the manifest's lock file, model.lock requires one that does not exist, or a "
    "bundle does not match its index or signature; nothing was started.",
    "Restore the files that the message names; after an intended change, `slipway lock MANIFEST` locks the new files.",
)

SELF_TEST = Exit(
    "selftest",
    18,
    "A golden prompt of an engine's self-test differs from the lock, or drifted again after a restart.",
    "The message has the prompt and the numbers. Start on another device. If the result is the same, compare kernels "
    "and libraries with the lock; after an intended change, `slipway lock MANIFEST` records it.",
)

SOURCE = Exit(
    "source",
    20,
    "The checkpoint cannot be loaded from model.source: missing, not permitted, damaged, no space, or a timeout.",
    "Read the server's answer in the message; docs/sources.md lists every kind of source with its credentials.",
)

EXITS = (
    *(OK, INTERNAL, MANIFEST, OUTDATED, CHECKPOINT, MEMORY, PORT, STARTUP, RESTARTS, ENGINE, SUPERVISOR, INTEGRITY),
    *(SELF_TEST, SOURCE),
)
