"""Write the run directory before supervisord starts: its configuration, and a script for each program of the service.

supervisord.conf contains fixed words only. In its `command=`, `;` starts a comment even inside quotes and `%` starts an
expansion, and the file cannot remove a variable from a program's environment. So each command is `/bin/sh NAME.sh`,
relative to the run directory; that script execs `exec_program.py NAME.exec`, which execs the program.

Reasons for the settings (all tested with Supervisor 4.3.0):
- `startsecs=0`: with a larger value an early exit leads to BACKOFF, where Supervisor loses the exit status and always
  restarts the program; with 0 every exit leads to EXITED, which keeps the status.
- `autorestart=false`: Supervisor's own restarts have no delay, and no limit once a program ran for `startsecs`. The
  restart monitor restarts programs through Supervisor, with backoff and within a window.
- `priority`: groups stop from the highest to the lowest, one after another: gateway, engines, monitor.
- `killasgroup` ends what a program left in its group; the launcher kills what left the group.
"""

import json
import math
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.config import gateway as gateway_config
from appliance.config.gateway import GatewayConfig
from appliance.runtime import listener as listen
from appliance.supervisor import exec_program, monitor
from appliance.supervisor.environment import ENGINE_VARIABLES
from appliance.supervisor.hangs import Budgets
from appliance.supervisor.reaper import MARK, ReaperConfig
from engine.api import config as engine_config
from engine.api.config import EngineConfig
from engine.api.errors import EXIT_PERMANENT
from engine.api.heartbeat import allocate_heartbeat

if TYPE_CHECKING:
    from appliance.checkpoints.download_spec import Job

EXEMPTIONS = "exemptions"
MIN_FILES = 256  # Supervisor does not start with a lower limit
CONTROL = "gateway.sock"
GATEWAY = "gateway.json"
ENGINES = "engines"  # the group of the engines
ENGINE_STOP_S = 2  # time between SIGTERM and SIGKILL for an engine, which has no state to save
# On shared cores this is a third of an engine thread's weight: engine steps have precedence, and the gateway still gets
# a quarter of a core that it competes for, so that sockets and tokens are not delayed. A value of 19 would leave it
# 1.5 %.
NICE = 5


@dataclass(frozen=True)
class Service:
    """Description of the service to launch. `gateway.engines` and each engine's `socket` are set when the run directory
    exists."""

    gateway: GatewayConfig
    engines: tuple[EngineConfig, ...]
    startup_s: float
    restarts: monitor.Policy
    budgets: Budgets = Budgets()  # when an engine counts as hung
    secrets: tuple[str, ...] = ()  # environment variables that only the gateway gets
    other_cpus: tuple[int, ...] = ()  # CPUs of all programs except the engines; empty: any CPU
    memory: str = ""  # file in which the kernel counts out-of-memory kills
    job: "Job | None" = None  # downloaded by each engine's program before it execs the engine


@dataclass(frozen=True)
class Program:
    """One program of the service."""

    name: str
    argv: tuple[str, ...]  # passed unchanged
    group: str  # programs of one group stop together
    priority: int  # groups stop by descending priority
    stop_s: int
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()  # further variables; `write` gets the files with their values
    nice: int = 0  # added to its priority, as in nice(1)
    leftovers: tuple[str, ...] = ()
    """Patterns of files that it may leave in the run directory; if set, a reaper (reaper.py) starts the program and
    removes them."""
    inherit: tuple[str, ...] | None = None
    """Patterns of the variables that it inherits from the launcher's environment; None: all."""
    announce: tuple[str, str] | None = None
    """A pipe, and a line to write to it before each start."""


def engine_names(service: Service) -> tuple[str, ...]:
    return tuple(f"engine-{index}" for index in range(len(service.engines)))


def programs(service: Service, directory: Path) -> tuple[Program, ...]:
    """Return gateway and engines, and write their configuration files to `directory`."""
    path = directory / GATEWAY
    gateway_config.write_config(gateway_with_paths(service, directory), path)
    gateway = gateway_program(service, (sys.executable, "-P", "-m", "appliance.server", str(path)))
    return gateway, *engine_programs(service, directory)


def gateway_with_paths(service: Service, directory: Path) -> GatewayConfig:
    """Return the gateway's configuration with all paths in the run directory."""
    journal, responses = service.gateway.journal, service.gateway.responses
    return msgspec.structs.replace(
        service.gateway,
        engines=tuple(str(_socket(directory, name)) for name in engine_names(service)),
        crash_exemptions=str(directory / EXEMPTIONS),
        control=str(directory / CONTROL),
        listener=str(directory / listen.LISTENER_SOCKET),
        journal=journal and str(directory / journal),
        responses=responses and str(directory / responses),
        run=str(directory),
    )


def _socket(directory: Path, name: str) -> Path:
    return directory / f"{name}.sock"


def engine_programs(service: Service, directory: Path) -> tuple[Program, ...]:
    """Return the engines, and write the configuration files for their next start to `directory`."""
    found = []
    if service.job is not None:
        (directory / "download.json").write_bytes(msgspec.json.encode(service.job))
    for name, config in zip(engine_names(service), service.engines, strict=True):
        path = directory / f"{name}.json"
        socket, heartbeat = str(_socket(directory, name)), str(directory / f"{name}.pulse")
        values = {"socket": socket, "lifecycle.heartbeat": heartbeat, "lifecycle.probe_s": service.budgets.probe_s}
        located = engine_config.with_values(config, values)
        engine_config.write_config(located, path)
        argv: tuple[str, ...] = (sys.executable, "-P", "-m", "engine", str(path))
        if service.job is not None:
            before = ("appliance.supervisor.download", str(directory / "download.json"), socket, heartbeat)
            argv = (sys.executable, "-P", "-m", *before, *argv)
        found.append(engine_program(service, name, argv, threads=config.hardware.threads))
    return tuple(found)


def gateway_program(service: Service, argv: tuple[str, ...]) -> Program:
    stop_s = math.ceil(service.gateway.drain_s) + 1
    return Program("gateway", argv, "gateway", 30, stop_s, environment=_threads(1), secrets=service.secrets, nice=NICE)


def engine_program(service: Service, name: str, argv: tuple[str, ...], *, threads: int) -> Program:
    token = service.job.spec.token if service.job else None
    secrets = (token.env,) if token and token.env else ()
    leftovers = (f"{name}.sock", f"{name}-ranks-*")
    return Program(
        name,
        argv,
        ENGINES,
        20,
        ENGINE_STOP_S,
        environment=_threads(threads),
        secrets=secrets,
        leftovers=leftovers,
        # A download needs credentials and proxies; the engine that follows it gets the same variables as any other.
        inherit=None if service.job is not None else ENGINE_VARIABLES,
    )


def _threads(count: int) -> dict[str, str]:
    """Return variables that limit thread pools; libraries otherwise size them by the machine's cores and ignore the
    cgroup."""
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def write(directory: Path, programs: Sequence[Program], service: Service, secret_files: Mapping[str, str]) -> None:
    """Write everything that supervisord needs to `directory`: its configuration, scripts, and the pipes to the
    launcher. `secret_files` has the paths from which the values of secrets are read, by name; no value is written."""
    password = secrets.token_urlsafe(24)
    monitor_config = monitor.Config(
        supervisor=str(directory / "supervisor.sock"),
        password=password,
        notices=str(directory / "notices"),
        exemptions=str(directory / EXEMPTIONS),
        policy=service.restarts,
        budgets=service.budgets,
        heartbeats={name: str(directory / f"{name}.pulse") for name in engine_names(service)},
        control=str(directory / CONTROL),
        directory=str(directory),
    )
    (directory / "monitor.json").write_bytes(msgspec.json.encode(monitor_config))
    for heartbeat in monitor_config.heartbeats.values():
        allocate_heartbeat(Path(heartbeat))  # now instead of at an engine's start, when the disk may be full
    listener = Program(
        "monitor",
        (sys.executable, "-P", "-m", "appliance.supervisor.monitor", str(directory / "monitor.json")),
        "monitor",
        -1,
        1,
        nice=NICE,
        announce=(
            monitor_config.notices,
            msgspec.json.encode(monitor.Notice(kind="started", program="monitor")).decode(),
        ),
    )
    for program in (*programs, listener):
        write_script(directory, program, secret_files, service.memory)
        os.mkfifo(directory / f"{program.name}.log", 0o600)
    os.mkfifo(directory / "notices", 0o600)
    os.mkfifo(directory / EXEMPTIONS, 0o600)
    (directory / "supervisord.conf").write_text(configuration(programs, password, root=os.geteuid() == 0))


def write_script(directory: Path, program: Program, secret_files: Mapping[str, str], memory: str) -> None:
    """Write the script with which Supervisor starts this program. `memory` is the file in which the kernel counts
    out-of-memory kills, for the reaper."""
    started = _through_reaper(directory, program, memory) if program.leftovers else program
    (directory / f"{program.name}.exec").write_text(exec_description(started, secret_files))
    words = (sys.executable, "-I", "-S", exec_program.__file__, f"{program.name}.exec")
    (directory / f"{program.name}.sh").write_bytes(os.fsencode(f"exec {shlex.join(words)}\n"))


def rewrite_script(directory: Path, program: Program, memory: str) -> None:
    """Write the script of a program again. The paths of its secrets are taken from the present script."""
    before = json.loads((directory / f"{program.name}.exec").read_text())["secrets"]
    write_script(directory, program, before, memory)


def _through_reaper(directory: Path, program: Program, memory: str) -> Program:
    """Return the program as started through its reaper, and write the reaper's configuration. The reaper's command line
    does not name the program's files, so that a search for the program by command line finds only the program."""
    config = ReaperConfig(
        program=program.name, argv=program.argv, directory=str(directory), files=program.leftovers, memory=memory
    )
    path = directory / f"{program.name}.reaper"
    path.write_bytes(msgspec.json.encode(config))
    argv = (sys.executable, "-P", "-m", "appliance.supervisor.reaper", str(path))
    return replace(program, argv=argv, environment={**program.environment, MARK: config.mark})


def exec_description(program: Program, secret_files: Mapping[str, str]) -> str:
    """Return the file from which exec_program.py starts the program, in the launcher's working directory."""
    description: dict[str, object] = {
        "argv": program.argv,
        "directory": os.getcwd(),
        "nice": program.nice,
        "environment": dict(sorted(program.environment.items())),
        "secrets": {name: secret_files[name] for name in program.secrets},
    }
    if program.inherit is not None:
        description["inherit"] = program.inherit
    if program.announce is not None:
        description["announce"] = program.announce
    return json.dumps(description)


def configuration(programs: Sequence[Program], password: str, *, root: bool) -> str:
    """Return the text of supervisord.conf. With `root` it has an explicit user, without which Supervisor warns that it
    runs as root."""
    access = [("username", "slipway"), ("password", password)]
    sections: list[tuple[str, list[tuple[str, object]]]] = [
        (
            "supervisord",
            [
                ("nodaemon", "true"),
                ("logfile", "/dev/null"),
                ("logfile_maxbytes", 0),
                ("loglevel", "warn"),
                ("pidfile", "supervisord.pid"),
                ("minfds", MIN_FILES),
                ("minprocs", 1),
                *([("user", "root")] if root else []),
            ],
        ),
        ("unix_http_server", [("file", "supervisor.sock"), ("chmod", "0700"), *access]),
        (
            "rpcinterface:supervisor",
            [("supervisor.rpcinterface_factory", "supervisor.rpcinterface:make_main_rpcinterface")],
        ),
        ("supervisorctl", [("serverurl", "unix://supervisor.sock"), *access]),
    ]
    sections += [(f"program:{program.name}", _program(program)) for program in programs]
    for name in dict.fromkeys(program.group for program in programs):
        members = [program for program in programs if program.group == name]
        joined = ",".join(program.name for program in members)
        sections.append((f"group:{name}", [("programs", joined), ("priority", members[0].priority)]))
    sections.append(("eventlistener:monitor", _listener()))
    return "\n".join("\n".join([f"[{name}]", *(f"{k}={v}" for k, v in keys), ""]) for name, keys in sections)


def _program(program: Program) -> list[tuple[str, object]]:
    return [
        ("command", f"/bin/sh {program.name}.sh"),
        ("autorestart", "false"),
        ("startsecs", 0),
        ("exitcodes", f"0,{EXIT_PERMANENT}"),  # affects only the log level with which Supervisor reports the exit
        ("stopsignal", "TERM"),
        ("stopwaitsecs", program.stop_s),
        ("killasgroup", "true"),
        ("redirect_stderr", "true"),
        ("stdout_logfile", f"{program.name}.log"),
        ("stdout_logfile_maxbytes", 0),
    ]


def _listener() -> list[tuple[str, object]]:
    return [
        ("command", "/bin/sh monitor.sh"),
        ("events", "PROCESS_STATE_RUNNING,PROCESS_STATE_EXITED,PROCESS_STATE_FATAL"),
        ("buffer_size", 100),
        ("autorestart", "true"),
        # The monitor keeps no state that is worth waiting for, and can be killed at any time.
        ("startsecs", 0),
        ("stopwaitsecs", 1),
        ("killasgroup", "true"),
        ("stdout_logfile", "NONE"),  # otherwise Supervisor writes a log into TMPDIR
        ("stderr_logfile", "monitor.log"),
        ("stderr_logfile_maxbytes", 0),
    ]
