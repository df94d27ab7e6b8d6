"""`slipway serve` after its checks: run a plan in the foreground and map its outcome to an exit code."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.config import exits
from appliance.config.environment import environment
from appliance.config.gateway import with_values
from appliance.config.sections.secrets import SecretEnv
from appliance.hardware.machine import cgroup_folders
from appliance.hardware.nvml import device_state
from appliance.runtime import listener as listen
from appliance.supervisor import file_limit, rundir, shared_memory, signals, supervise
from appliance.supervisor.console import Console
from appliance.supervisor.crash_bundles import BundlePolicy, CrashBundleWriter
from appliance.supervisor.exit_status import memory_counters
from appliance.supervisor.hangs import Budgets
from appliance.supervisor.init import InitProcess, Outcome
from appliance.supervisor.monitor import Policy
from appliance.supervisor.reason import TERMINATION_LOG, Reason, termination_log, write_termination
from appliance.supervisor.supervise import Program, Service
from engine.api.printable import printable

if TYPE_CHECKING:
    from appliance.config.manifest import Manifest
    from appliance.config.overrides import Given
    from appliance.planning.plan import Plan
    from appliance.supervisor.reload import Reloader

SHELL = "/bin/sh"
NO_BUNDLES = BundlePolicy(keep=0)


def serve(plan: "Plan", given: "Given") -> int:
    """Launch the plan of `given` in the foreground. Return the exit code when everything has ended."""
    from appliance.planning.diff.config_snapshot import ConfigSnapshot
    from appliance.supervisor.reload import Reloader

    running = ConfigSnapshot.of(given, plan)
    manifest = plan.manifest
    restart, health, variables = manifest.lifecycle.restart, manifest.health, environment()
    policy = Policy(restart.max, restart.window, restart.backoff, restart.longest_backoff, restart.exhausted)
    service = Service(
        gateway=plan.gateway,
        engines=plan.engines,
        startup_s=manifest.health.startup_budget,
        restarts=policy,
        budgets=Budgets(
            loading_s=health.stalled_loading,
            busy_s=health.stalled_busy,
            idle_s=health.stalled_idle,
            testing_s=health.stalled_testing,
            gateway_s=health.stalled_gateway,
            step_s=plan.estimate.slowest_step_s,
        ),
        secrets=secret_names(manifest),
        other_cpus=plan.other_cpus,
        memory=str(memory_counters(list(cgroup_folders(Path("/"), "memory")))),
        job=plan.job,
    )
    return launch(
        service,
        variables,
        log=termination_log(variables),
        bundles=bundles(plan, variables),
        reloader=partial(Reloader, running),
    )


def bundles(plan: "Plan", environment: Mapping[str, str]) -> BundlePolicy:
    """Return where crash bundles are written: the configured folder, else next to the run directory."""
    wanted = plan.manifest.lifecycle.crash_bundles
    default = tuple(folder / f"slipway-crashes-{os.geteuid()}" for folder in rundir.folders(environment))
    folders = default if plan.crash_folder is None else (plan.crash_folder,)
    return BundlePolicy(folders, wanted.keep, wanted.size)


def secret_names(manifest: "Manifest") -> tuple[str, ...]:
    """Return the environment variables that a manifest declares as secrets."""
    return tuple(dict.fromkeys(secret.env for secret in manifest.secrets.values() if isinstance(secret, SecretEnv)))


def launch(
    service: Service,
    environment: Mapping[str, str],
    *,
    programs: Callable[[Service, Path], Sequence[Program]] = supervise.programs,
    log: Path = TERMINATION_LOG,
    bundles: BundlePolicy = NO_BUNDLES,
    reloader: "Callable[[Service, Path], Reloader] | None" = None,
) -> int:
    """Run the service in the foreground and return its exit code. `log` is the termination log. `programs` writes the
    configurations of the programs into the run directory and returns how to start them. With a `reloader` the manifest
    can be reloaded."""
    reported: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        if outcome not in reported:
            reported.append(outcome)
            _report(outcome, log)

    console = Console(sys.stdout.fileno(), service.gateway.observability.log_format)
    try:
        if not os.access(SHELL, os.X_OK):
            raise FileNotFoundError(f"{SHELL} is missing; Supervisor needs it to start programs")
        file_limit.raise_limit(service)
        if text := shared_memory.warning(service):
            console.message("slipway", f"warning: {text}")
        public = {name: value for name, value in environment.items() if name not in service.secrets}
        with (
            listen.open_listener(service.gateway.endpoints.host, service.gateway.endpoints.port) as listener,
            signals.stop_signals_pending(),  # until the init process handles them: the files are always removed
            rundir.run_directory(environment) as directory,
            _secret_files(service, environment) as secret_files,
        ):
            port = listener.getsockname()[1]
            service = replace(service, gateway=with_values(service.gateway, {"endpoints.port": port}))
            supervise.write(directory, programs(service, directory), service, secret_files)
            if service.other_cpus:
                os.sched_setaffinity(0, service.other_cpus)  # all programs inherit it; engines set their own affinity
            crashes = CrashBundleWriter(
                bundles,
                directory,
                secrets=[environment.get(name, "") for name in service.secrets],
                facts={"version": service.gateway.version, "manifest_sha256": service.gateway.manifest_sha256},
                memory=service.memory,
                device=device_state,
            )
            create_init = partial(
                InitProcess, service, directory, public, console, listener, crashes=crashes, report=report
            )
            outcome = asyncio.run(_run(create_init, service, directory, console, reloader))
    except listen.AddressUnavailable as error:
        outcome = Outcome(exits.PORT, str(error))
    except (rundir.NoRunDirectory, file_limit.FileLimitTooLow, OSError) as error:
        outcome = Outcome(exits.INTERNAL, f"cannot start: {error}")
    finally:
        console.close(timeout_s=0.2)
    if outcome.exit is not exits.OK:
        report(outcome)
    return outcome.exit.number


@contextlib.contextmanager
def _secret_files(service: Service, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield in-memory files with the values of the secrets, by name. The values are never on a disk, in an argument or
    in the environment of another program, and can be read at each start of the gateway."""
    files: dict[str, str] = {}
    with contextlib.ExitStack() as opened:
        for name in service.secrets:
            file = opened.enter_context(os.fdopen(os.memfd_create(name), "wb", buffering=0))
            file.write(os.fsencode(environment.get(name, "")))
            files[name] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield files


async def _run(
    create_init: Callable[[], InitProcess],
    service: Service,
    directory: Path,
    console: Console,
    reloader: "Callable[[Service, Path], Reloader] | None",
) -> Outcome:
    init = create_init()
    if reloader is None:
        return await init.run()
    from appliance.supervisor.control_protocol import serve_reloads

    handler = reloader(service, directory)
    init.manifest = str(handler.manifest)
    async with serve_reloads(handler, directory, console) as on_sighup:
        if not sys.stdin.isatty():  # closing a terminal also sends SIGHUP, and must stop the appliance
            init.on_sighup = on_sighup
        return await init.run()


def _report(outcome: Outcome, log: Path) -> None:
    reason = Reason(
        message=printable(outcome.message, keep="\n"),
        exit=outcome.exit.name,
        code=outcome.exit.number,
        cure=outcome.cure,
        program=outcome.program,
        cause=outcome.cause.name if outcome.cause else "",
        bundle=outcome.bundle,
        last_lines=tuple(map(printable, outcome.last_lines)),
    )
    text = msgspec.json.encode(reason)
    if sys.stderr.isatty():
        lines = [f"slipway: {reason.message}", *(f"    {line}" for line in reason.last_lines), outcome.cure]
        lines += [f"crash bundle: {outcome.bundle}"] if outcome.bundle else []
    else:
        lines = [text.decode()]
    with contextlib.suppress(OSError):  # a file on a full disk: the exit code is still set
        print("\n".join(lines), file=sys.stderr, flush=True)
    write_termination(reason, log)
