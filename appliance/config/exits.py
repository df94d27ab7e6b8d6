"""Exit codes of `slipway`, with number, cause and remedy.

0 to 2 have their conventional meaning. Codes from 10 are specific to the appliance and avoid those of shells, Docker
and signals (125 to 127, and 128 plus the signal number). docs/operations.md shows this table; a test compares the two.
"""

from dataclasses import dataclass

from engine.api.errors import EXIT_PERMANENT


@dataclass(frozen=True)
class Exit:
    name: str
    number: int
    cause: str
    cure: str


OK = Exit("ok", 0, "Stopped as asked: by SIGTERM, SIGINT or SIGQUIT, or the command did its work.", "None needed.")
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
    "Correct the place that the message names; `slipway check MANIFEST` tells without starting anything.",
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
    "The checkpoint is missing, incomplete, damaged, or of an architecture that nothing here declares.",
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
    "The address that the gateway should listen on is taken or not allowed; nothing was started.",
    "Choose another endpoints.port (or --port N; 0 takes a free one), or stop what listens there.",
)
STARTUP = Exit(
    "startup",
    13,
    "The service was not ready within health.startup_budget.",
    "Read the log for what was slow; raise health.startup_budget if it was only the size of the model.",
)
RESTARTS = Exit(
    "restarts",
    14,
    "A program died more often than lifecycle.restart.max within lifecycle.restart.window.",
    "Read how it died and its last log lines, which the message carries; an engine's crash bundle has more, and "
    "`slipway explain CAUSE` the cure.",
)
ENGINE = Exit(
    "engine",
    15,
    f"A program ended with code {EXIT_PERMANENT}: it found an error that a restart cannot cure.",
    "Read the message, which carries the last log lines of that program, and correct what it names.",
)
SUPERVISOR = Exit(
    "supervisor",
    16,
    "supervisord ended without having been asked, or could not start; or the restart monitor ended again and again.",
    "Look for who killed it (memory limits of the cgroup first); start again.",
)
INTEGRITY = Exit(
    "integrity",
    17,
    "The checkpoint's files are not those of the lock beside the manifest, or model.lock requires one that is not "
    "there; nothing was started.",
    "Restore the files that the message names; where the change is meant, `slipway lock MANIFEST` locks what is there.",
)

SELF_TEST = Exit(
    "selftest",
    18,
    "A golden prompt of an engine's self-test came out otherwise than the lock says, or drifted again after a restart.",
    "The message names prompt and numbers. Start on another device; with the same result compare kernels and "
    "libraries with those of the lock, and where the change is meant, `slipway lock MANIFEST` records it.",
)

SOURCE = Exit(
    "source",
    20,
    "The checkpoint cannot be had from model.source: not there, not allowed, damaged, no space, or no answer in time.",
    "Read the message, which says what the other side answered; docs/sources.md has every kind with its credentials.",
)

EXITS = (
    *(OK, INTERNAL, MANIFEST, OUTDATED, CHECKPOINT, MEMORY, PORT, STARTUP, RESTARTS, ENGINE, SUPERVISOR, INTEGRITY),
    *(SELF_TEST, SOURCE),
)
