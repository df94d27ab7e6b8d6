"""All scenarios. docs/operations.md lists their promises too; a test compares the names."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from appliance.chaos.fault_injector import FaultInjector, FaultNotInjected
from appliance.chaos.load_generator import fill_queue, read_slowly
from appliance.chaos.scenario import Promise, Scenario
from appliance.chaos.target import Target
from appliance.config import exits
from appliance.server.reply_store.log import DISK_S
from appliance.supervisor.watchdog import CHECK_INTERVAL_S, PROBE_INTERVAL_S

CGROUP_BYTES = 8 * 2**20
MEMORY_HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"
SLOW_S = 10 * DISK_S
REPLY_START_S = 5 * DISK_S  # allows for a busy machine
BLOCKED_PROGRAMS = ("supervisord", "gateway", "launcher", "monitor")  # supervisord's children cannot write either


def _restart_promise(
    target: Target, text: str, *, program: str = "engine-0", notice_s: float = 0.0, **more: object
) -> Promise:
    """Return a promise of a restart: `notice_s` until the crash, the longest backoff of the policy, and a start."""
    within_s = notice_s + target.monitor_config.policy.backoff_s + target.within_s
    return Promise(text, within_s, program, **more)  # type: ignore[arg-type]


async def _signal_engine(injector: FaultInjector, number: signal.Signals) -> None:
    injector.signal("engine-0", number)


def _killed_by(number: signal.Signals) -> Scenario:
    name = {"SIGKILL": "crash", "SIGSEGV": "segfault", "SIGTERM": "exit"}[number.name]
    how = () if number is signal.SIGTERM else (f"killed by {number.name}",)
    causes = ("signal",) if how else ("exit-code", "signal")
    return Scenario(
        name,
        f"sends {number.name} to engine-0",
        partial(_signal_engine, number=number),
        lambda target: _restart_promise(
            target,
            "the engine restarts, and its requests resume after their last token",
            causes=causes,
            exit_details=how,
        ),
    )


async def _kill_gateway(injector: FaultInjector) -> None:
    injector.signal("gateway", signal.SIGKILL)


async def _stop_engine(injector: FaultInjector) -> None:
    injector.stop_process("engine-0")


async def _stop_gateway(injector: FaultInjector) -> None:
    injector.stop_process("gateway")


def _gateway_limit_disabled(target: Target) -> str:
    return "" if target.monitor_config.budgets.gateway_s else "health.stalled_gateway is 0s, so a hang is not detected"


def _gateway_hang(target: Target) -> Promise:
    text = "the gateway restarts within health.stalled_gateway; clients with an Idempotency-Key get the exact rest"
    notice_s = target.monitor_config.budgets.gateway_s + PROBE_INTERVAL_S + 2 * CHECK_INTERVAL_S
    return _restart_promise(target, text, notice_s=notice_s, program="gateway", may_lose_requests=True)


def _stall_limit_disabled(target: Target) -> str:
    budgets = target.monitor_config.budgets
    return (
        ""
        if budgets.busy_s and budgets.idle_s
        else "health.stalled_busy or stalled_idle is 0s, so a hang is not detected"
    )


def _hang(target: Target) -> Promise:
    budgets = target.monitor_config.budgets
    text = "the restart monitor kills the engine within health.stalled_*, and its requests resume"
    notice_s = max(budgets.busy_s, budgets.idle_s) + 2 * CHECK_INTERVAL_S
    return _restart_promise(target, text, notice_s=notice_s, causes=("hang",))


def _cgroup_unavailable(target: Target) -> str:
    folder = target.memory_counters.parent
    if folder == Path("/proc"):
        return "there is no memory cgroup; the scenario `crash` sends the same signal"
    if not os.access(folder, os.W_OK):
        return f"no limit can be set in {folder} of another user; the scenario `crash` sends the same signal"
    if (folder / "cgroup.controllers").exists() and "memory" not in (folder / "cgroup.subtree_control").read_text():
        return f"{folder} does not delegate the memory controller; the scenario `crash` sends the same signal"
    return ""


async def _out_of_memory(injector: FaultInjector) -> None:
    """Move the engine to a cgroup with little memory and start a program there that exceeds it.

    The kernel kills the larger process first, which is the engine, and then the program.
    """
    engine, folder = injector.pid("engine-0"), injector.target.memory_counters.parent / "slipway-chaos"
    try:
        injector.move_to_cgroup(engine, folder)
        limit = next(folder / name for name in ("memory.max", "memory.limit_in_bytes") if (folder / name).exists())
        limit.write_text(str(CGROUP_BYTES))
        Path(f"/proc/{engine}/oom_score_adj").write_text("1000")
        script = "import pathlib, os, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n" + MEMORY_HOG
        procs = str(folder / "cgroup.procs")
        hog = subprocess.Popen([sys.executable, "-P", "-c", script, procs], stderr=subprocess.DEVNULL)
    except OSError as error:
        raise FaultNotInjected(f"{folder}: {error.strerror}") from error
    try:
        await asyncio.wait_for(asyncio.to_thread(hog.wait), injector.target.within_s)
    finally:
        hog.kill()


def _oom(target: Target) -> Promise:
    # The cgroup of the killed process counts the kill. Only version 2 counts it in the parent groups too.
    counted = (target.memory_counters.name == "memory.events",)
    causes = ("oom-kill",) if counted[0] else ("signal", "oom-kill")
    return _restart_promise(target, "as `crash`; the crash bundle says oom-kill (cgroup v2)", causes=causes)


async def _kill_rank(injector: FaultInjector) -> None:
    ranks = injector.target.pids("ranks")
    if not ranks:
        raise FaultNotInjected("no rank is running")
    with contextlib.suppress(ProcessLookupError):
        os.kill(injector.rng.choice(ranks), signal.SIGKILL)


async def _fill_disk(injector: FaultInjector) -> None:
    reapers = [f"engine-{index}-reaper" for index in range(len(injector.target.engines))]
    engines = [f"engine-{index}" for index in range(len(injector.target.engines))]
    injector.block_writes(*BLOCKED_PROGRAMS, *reapers, *engines)


async def _crash_on_a_full_disk(injector: FaultInjector) -> None:
    await _fill_disk(injector)
    injector.signal("engine-0", signal.SIGKILL)


async def _slow_disk(injector: FaultInjector) -> None:
    await injector.throttle_journal(SLOW_S, injector.duration_s + injector.target.within_s)


def _journal_disabled(target: Target) -> str:
    return "" if target.gateway.journal else "lifecycle.journal.keep is 0s, so there is no journal"


def _last_shard(target: Target) -> Path | None:
    """Return the last weight file of the checkpoint, or None."""
    found = sorted(Path(target.engines[0].model.path).glob("*.safetensors"))
    return found[-1] if found else None


def _lock_missing(target: Target) -> str:
    manifest = target.address.manifest
    if not manifest or not Path(manifest).with_suffix(".lock").exists():
        return "the manifest has no lock, so the damage is not detected; create one with `slipway lock`"
    return "" if _last_shard(target) else f"no *.safetensors in {target.engines[0].model.path}"


def _flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 0x40]))


async def _bad_shard(injector: FaultInjector) -> None:
    shard = _last_shard(injector.target)
    assert shard is not None, "`unavailable` checks it"
    injector.replace_file(shard, _flip_last_byte)
    code, output = await injector.reload(restart=True)
    named = "named" if shard.name in output else "not named"
    injector.observations["restart"] = f"refused with code {code}, the file is {named}"


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _key_file_missing(target: Target) -> str:
    keys = target.gateway.api_keys
    return "" if keys is not None and keys.file else "endpoints.api_keys does not name a file"


async def _bad_keys(injector: FaultInjector) -> None:
    keys = injector.target.gateway.api_keys
    assert keys is not None and keys.file is not None, "`unavailable` checks it"
    injector.replace_file(Path(keys.file), _empty)
    code, _ = await injector.reload(restart=False)
    injector.observations["reload"] = "refused" if code else "accepted"


def _certificate_missing(target: Target) -> str:
    return "" if target.gateway.tls is not None else "endpoints.tls is not set"


async def _bad_certificate(injector: FaultInjector) -> None:
    tls = injector.target.gateway.tls
    assert tls is not None, "`unavailable` checks it"
    injector.replace_file(Path(tls.certificate), _empty)
    code, _ = await injector.reload(restart=False)
    injector.observations["reload"] = "refused" if code else "accepted"


def _stays_ready(target: Target, text: str, **more: object) -> Promise:
    """Return a promise without a restart."""
    return Promise(text, target.within_s, **more)  # type: ignore[arg-type]


SCENARIOS = (
    *(_killed_by(number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)),
    Scenario(
        "gateway-crash",
        "sends SIGKILL to the gateway",
        _kill_gateway,
        lambda target: _restart_promise(
            target,
            "clients with an Idempotency-Key reconnect and get the exact rest",
            program="gateway",
            may_lose_requests=True,
        ),
    ),
    Scenario("hang", "stops engine-0 (SIGSTOP)", _stop_engine, _hang, _stall_limit_disabled),
    Scenario("gateway-hang", "stops the gateway (SIGSTOP)", _stop_gateway, _gateway_hang, _gateway_limit_disabled),
    Scenario("oom", "gives engine-0 a cgroup with 8 MiB and fills it", _out_of_memory, _oom, _cgroup_unavailable),
    Scenario(
        "dead-rank",
        "sends SIGKILL to one rank of an engine",
        _kill_rank,
        lambda target: _restart_promise(
            target, "the engine exits and restarts with all its ranks", causes=("exit-code",), program="ranks"
        ),
        lambda target: "" if target.pids("ranks") else "parallelism.tensor is 1: an engine has no ranks",
    ),
    Scenario(
        "disk-full",
        "fails every file write of gateway, engines and launcher",
        _fill_disk,
        lambda target: _stays_ready(
            target,
            "requests continue; slipway_journal_errors_total increases",
            increasing=("slipway_journal_errors_total",) if target.gateway.journal else (),
        ),
    ),
    Scenario(
        "disk-full-crash",
        "fails file writes like disk-full, and sends SIGKILL to engine-0; the next engine cannot write either",
        _crash_on_a_full_disk,
        lambda target: _restart_promise(target, "as `crash`; there may be no crash bundle"),
    ),
    Scenario(
        "slow-disk",
        f"makes each write of the journal {SLOW_S:g} s slower",
        _slow_disk,
        lambda target: _stays_ready(
            target, f"a durable reply waits at most {DISK_S:g} s for the disk before it begins", first_s=REPLY_START_S
        ),
        _journal_disabled,
    ),
    Scenario(
        "bad-shard",
        "replaces a weight file with a copy that has one flipped bit, and restarts engines",
        _bad_shard,
        lambda target: _stays_ready(
            target,
            "the reload is refused with the name of the file, and nothing changes",
            observations={"restart": f"refused with code {exits.INTEGRITY.number}, the file is named"},
        ),
        _lock_missing,
    ),
    Scenario(
        "full-queue",
        "sends requests until the queue refuses them",
        fill_queue,
        lambda target: _stays_ready(
            target,
            "503 with Retry-After; accepted requests continue, and the queue drains",
            may_refuse=True,
            observations={"refusal": "503 with Retry-After"},
            increasing=("slipway_admission_rejections_total",),
        ),
    ),
    Scenario(
        "slow-client",
        "opens 16 streams whose readers read one byte per second",
        read_slowly,
        lambda target: _stays_ready(target, "other clients do not wait for them", first_s=REPLY_START_S),
    ),
    Scenario(
        "bad-keys",
        "replaces the API keys with an empty file, and reloads",
        _bad_keys,
        lambda target: _stays_ready(
            target, "the reload is refused, and the previous keys remain valid", observations={"reload": "refused"}
        ),
        _key_file_missing,
    ),
    Scenario(
        "bad-certificate",
        "replaces the certificate with an empty file, and reloads",
        _bad_certificate,
        lambda target: _stays_ready(
            target,
            "the reload is refused, and new connections get the previous certificate",
            observations={"reload": "refused"},
        ),
        _certificate_missing,
    ),
)
