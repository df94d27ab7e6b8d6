"""All scenarios. docs/operations.md lists their promises too; a test compares the names."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from appliance.chaos.fault_injector import NotMade, Stage
from appliance.chaos.load_generator import fill_queue, read_slowly
from appliance.chaos.scenario import Promise, Scenario
from appliance.chaos.target import Target
from appliance.config import exits
from appliance.server.http.durable import DISK_S
from appliance.supervisor.watchdog import LOOK_S, PROBE_S

CONFINED_BYTES = 8 * 2**20
HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"
SLOW_S = 10 * DISK_S
FIRST_S = 5 * DISK_S  # allows for a busy machine
DISK_HELD = ("supervisord", "gateway", "launcher", "sentinel")  # supervisord's children cannot write either


def _restarts(
    target: Target, text: str, *, program: str = "engine-0", notice_s: float = 0.0, **more: object
) -> Promise:
    """Return a promise of a restart: `notice_s` until the crash, the longest backoff of the policy, and a start."""
    within_s = notice_s + target.watch.policy.backoff_s + target.within_s
    return Promise(text, within_s, program, **more)  # type: ignore[arg-type]


async def _signal_engine(stage: Stage, number: signal.Signals) -> None:
    stage.signal("engine-0", number)


def _killed_by(number: signal.Signals) -> Scenario:
    name = {"SIGKILL": "crash", "SIGSEGV": "segfault", "SIGTERM": "exit"}[number.name]
    how = () if number is signal.SIGTERM else (f"killed by {number.name}",)
    causes = ("signal",) if how else ("exit-code", "signal")
    return Scenario(
        name,
        f"sends {number.name} to engine-0",
        partial(_signal_engine, number=number),
        lambda target: _restarts(
            target, "it is started again, requests go on behind their last token", causes=causes, hows=how
        ),
    )


async def _kill_gateway(stage: Stage) -> None:
    stage.signal("gateway", signal.SIGKILL)


async def _stop_engine(stage: Stage) -> None:
    stage.stop_process("engine-0")


async def _stop_gateway(stage: Stage) -> None:
    stage.stop_process("gateway")


def _no_gateway_clock(target: Target) -> str:
    return "" if target.watch.budgets.gateway_s else "health.stalled_gateway is 0s: nobody would notice"


def _gateway_hang(target: Target) -> Promise:
    text = "the monitor restarts it within health.stalled_gateway; clients with an Idempotency-Key get the exact rest"
    notice_s = target.watch.budgets.gateway_s + PROBE_S + 2 * LOOK_S
    return _restarts(target, text, notice_s=notice_s, program="gateway", lost=True)


def _no_stall_clock(target: Target) -> str:
    budgets = target.watch.budgets
    return "" if budgets.busy_s and budgets.idle_s else "health.stalled_busy or stalled_idle is 0s: nobody would notice"


def _hang(target: Target) -> Promise:
    budgets = target.watch.budgets
    text = "the sentinel kills it within health.stalled_*, and its requests go on"
    notice_s = max(budgets.busy_s, budgets.idle_s) + 2 * LOOK_S
    return _restarts(target, text, notice_s=notice_s, causes=("hang",))


def _no_cgroup(target: Target) -> str:
    folder = target.memory.parent
    if folder == Path("/proc"):
        return "no cgroup here counts memory; `crash` sends the same signal"
    if not os.access(folder, os.W_OK):
        return f"{folder} belongs to another user, so no limit can be set in it; `crash` sends the same signal"
    if (folder / "cgroup.controllers").exists() and "memory" not in (folder / "cgroup.subtree_control").read_text():
        return f"{folder} does not hand the memory controller down; `crash` sends the same signal"
    return ""


async def _out_of_memory(stage: Stage) -> None:
    """Move the engine to a cgroup with little memory and start a program there that exceeds it.

    The kernel kills the larger process first, which is the engine, and then the program.
    """
    engine, folder = stage.pid("engine-0"), stage.target.memory.parent / "slipway-chaos"
    try:
        stage.confine(engine, folder)
        limit = next(folder / name for name in ("memory.max", "memory.limit_in_bytes") if (folder / name).exists())
        limit.write_text(str(CONFINED_BYTES))
        Path(f"/proc/{engine}/oom_score_adj").write_text("1000")
        script = "import pathlib, os, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n" + HOG
        procs = str(folder / "cgroup.procs")
        hog = subprocess.Popen([sys.executable, "-P", "-c", script, procs], stderr=subprocess.DEVNULL)
    except OSError as error:
        raise NotMade(f"{folder}: {error.strerror}") from error
    try:
        await asyncio.wait_for(asyncio.to_thread(hog.wait), stage.target.within_s)
    finally:
        hog.kill()


def _oom(target: Target) -> Promise:
    # The cgroup of the killed process counts the kill. Only version 2 counts it in the parent groups too.
    counted = (target.memory.name == "memory.events",)
    causes = ("oom-kill",) if counted[0] else ("signal", "oom-kill")
    return _restarts(target, "as a crash, and the crash bundle says oom-kill (cgroup v2)", causes=causes)


async def _kill_rank(stage: Stage) -> None:
    ranks = stage.target.pids("ranks")
    if not ranks:
        raise NotMade("no rank has a process at the moment")
    with contextlib.suppress(ProcessLookupError):
        os.kill(stage.rng.choice(ranks), signal.SIGKILL)


async def _fill_disk(stage: Stage) -> None:
    keepers = [f"engine-{index}-keeper" for index in range(len(stage.target.engines))]
    engines = [f"engine-{index}" for index in range(len(stage.target.engines))]
    stage.forbid_writing(*DISK_HELD, *keepers, *engines)


async def _crash_on_a_full_disk(stage: Stage) -> None:
    await _fill_disk(stage)
    stage.signal("engine-0", signal.SIGKILL)


async def _slow_disk(stage: Stage) -> None:
    await stage.hamper(SLOW_S, stage.duration_s + stage.target.within_s)


def _no_journal(target: Target) -> str:
    return "" if target.gateway.journal else "lifecycle.journal.keep is 0s: nothing is written"


def _shard(target: Target) -> Path | None:
    """Return the last weight file of the checkpoint, or None."""
    found = sorted(Path(target.engines[0].model).glob("*.safetensors"))
    return found[-1] if found else None


def _no_lock(target: Target) -> str:
    manifest = target.address.manifest
    if not manifest or not Path(manifest).with_suffix(".lock").exists():
        return "there is no lock beside the manifest: nobody would notice (`slipway lock`)"
    return "" if _shard(target) else f"no *.safetensors in {target.engines[0].model}"


def _flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 0x40]))


async def _bad_shard(stage: Stage) -> None:
    shard = _shard(stage.target)
    assert shard is not None, "it was asked for"
    stage.replace(shard, _flip_last_byte)
    code, said = await stage.reload(restart=True)
    named = "named" if shard.name in said else "not named"
    stage.seen["restart"] = f"refused with code {code}, the file is {named}"


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _no_key_file(target: Target) -> str:
    keys = target.gateway.api_keys
    return "" if keys is not None and keys.file else "endpoints.api_keys names no file here"


async def _bad_keys(stage: Stage) -> None:
    keys = stage.target.gateway.api_keys
    assert keys is not None and keys.file is not None, "it was asked for"
    stage.replace(Path(keys.file), _empty)
    code, _ = await stage.reload(restart=False)
    stage.seen["reload"] = "refused" if code else "taken"


def _no_certificate(target: Target) -> str:
    return "" if target.gateway.tls is not None else "endpoints.tls is not there"


async def _bad_certificate(stage: Stage) -> None:
    tls = stage.target.gateway.tls
    assert tls is not None, "it was asked for"
    stage.replace(Path(tls.certificate), _empty)
    code, _ = await stage.reload(restart=False)
    stage.seen["reload"] = "refused" if code else "taken"


def _on(target: Target, text: str, **more: object) -> Promise:
    """Return a promise without a restart."""
    return Promise(text, target.within_s, **more)  # type: ignore[arg-type]


SCENARIOS = (
    *(_killed_by(number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)),
    Scenario(
        "gateway-crash",
        "sends SIGKILL to the gateway",
        _kill_gateway,
        lambda target: _restarts(
            target, "clients with an Idempotency-Key come back and get the exact rest", program="gateway", lost=True
        ),
    ),
    Scenario("hang", "stops engine-0 (SIGSTOP)", _stop_engine, _hang, _no_stall_clock),
    Scenario("gateway-hang", "stops the gateway (SIGSTOP)", _stop_gateway, _gateway_hang, _no_gateway_clock),
    Scenario("oom", "gives engine-0 a cgroup with 8 MiB and fills it", _out_of_memory, _oom, _no_cgroup),
    Scenario(
        "dead-rank",
        "sends SIGKILL to one rank of an engine",
        _kill_rank,
        lambda target: _restarts(
            target, "the engine ends and is started again as a whole", causes=("exit-code",), program="ranks"
        ),
        lambda target: "" if target.pids("ranks") else "parallelism.tensor is 1: an engine has no ranks",
    ),
    Scenario(
        "disk-full",
        "fails every file write of gateway, engines and launcher",
        _fill_disk,
        lambda target: _on(
            target,
            "requests go on; slipway_journal_errors_total counts",
            rises=("slipway_journal_errors_total",) if target.gateway.journal else (),
        ),
    ),
    Scenario(
        "disk-full-crash",
        "fails file writes like disk-full, and sends SIGKILL to engine-0; the next engine cannot write either",
        _crash_on_a_full_disk,
        lambda target: _restarts(target, "as a crash; its crash bundle may be missing"),
    ),
    Scenario(
        "slow-disk",
        f"makes each write of the journal {SLOW_S:g} s slower",
        _slow_disk,
        lambda target: _on(
            target, f"a durable reply waits at most {DISK_S:g} s for the disk, before it begins", first_s=FIRST_S
        ),
        _no_journal,
    ),
    Scenario(
        "bad-shard",
        "replaces a weight file with a copy that has one flipped bit, and restarts engines",
        _bad_shard,
        lambda target: _on(
            target,
            "the lock refuses it by name, and nothing is changed",
            says={"restart": f"refused with code {exits.INTEGRITY.number}, the file is named"},
        ),
        _no_lock,
    ),
    Scenario(
        "full-queue",
        "sends requests until the queue refuses them",
        fill_queue,
        lambda target: _on(
            target,
            "503 with Retry-After; what was taken goes on, and the queue drains",
            refusals=True,
            says={"refusal": "503 with Retry-After"},
            rises=("slipway_admission_rejections_total",),
        ),
    ),
    Scenario(
        "slow-client",
        "opens 16 streams whose readers read one byte per second",
        read_slowly,
        lambda target: _on(target, "nobody else waits for them", first_s=FIRST_S),
    ),
    Scenario(
        "bad-keys",
        "replaces the API keys with an empty file, and reloads",
        _bad_keys,
        lambda target: _on(target, "the reload is refused, and the keys that were hold", says={"reload": "refused"}),
        _no_key_file,
    ),
    Scenario(
        "bad-certificate",
        "replaces the certificate with an empty file, and reloads",
        _bad_certificate,
        lambda target: _on(
            target, "the reload is refused, and new connections get the one before", says={"reload": "refused"}
        ),
        _no_certificate,
    ),
)
