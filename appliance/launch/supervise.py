"""The service as programs under Supervisor: what is written into the run directory before supervisord starts.

supervisord.conf holds fixed words only. Its `command=` takes `;` for a comment even inside quotes and `%` for an
expansion, and a program's environment cannot lose a variable there; so each command is `/bin/sh NAME.sh`, relative to
the run directory, and that script replaces itself with `begin.py NAME.begin`, which becomes the program.

Why these settings (all tried with Supervisor 4.3.0):
- `startsecs=0`: with more, an early death goes to BACKOFF, where Supervisor forgets the exit status and restarts the
  program whatever it was; with 0 every death ends in EXITED, which keeps the status.
- `autorestart=false`: Supervisor's own restarts have no delay and no limit once a program ran for `startsecs`. The
  sentinel restarts, with backoff and within a window, through Supervisor.
- `priority`: groups stop from the highest to the lowest, one after another: gateway, engines, sentinel.
- `killasgroup` for what a program left in its group; the launcher's sweep for what left the group.
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

import msgspec

from appliance.gateway import config as gateway_config
from appliance.gateway.config import GatewayConfig
from appliance.launch import begin, listen, sentinel
from appliance.launch.environment import ENGINE_VARIABLES
from appliance.launch.hangs import Budgets
from appliance.launch.keeper import MARK, Kept
from appliance.source.order import Job
from engine.api import config as engine_config
from engine.api.config import EngineConfig
from engine.api.errors import EXIT_PERMANENT
from engine.api.heartbeat import allocate_heartbeat

PARDONS = "pardons"
MIN_FILES = 256  # below which Supervisor does not start
CONTROL = "gateway.sock"
GATEWAY = "gateway.json"
ENGINES = "engines"  # their group
ENGINE_STOP_S = 2  # time an engine gets from SIGTERM to SIGKILL: it has nothing to save
# Where cores are shared, a third of an engine thread's weight: a step goes first, and the gateway still gets a quarter
# of a core that it competes for, so that sockets and tokens never wait long. 19 would leave it 1.5 %.
NICE = 5


@dataclass(frozen=True)
class Service:
    """What is to be launched. `gateway.engines` and each engine's `socket` are filled in when the run directory exists.
    `secrets` names the environment variables that only the gateway gets. `other_cpus`: where all but the engines run
    (empty: anywhere). `budgets`: when an engine counts as hung. `memory`: the file in which the kernel counts what it
    kills for memory."""

    gateway: GatewayConfig
    engines: tuple[EngineConfig, ...]
    startup_s: float
    restarts: sentinel.Policy
    budgets: Budgets = Budgets()
    secrets: tuple[str, ...] = ()
    other_cpus: tuple[int, ...] = ()
    memory: str = ""
    job: Job | None = None  # downloaded by each engine's program before it becomes the engine


@dataclass(frozen=True)
class Program:
    """One process. Programs of one group stop together; groups stop by descending priority. `argv` arrives as it is.
    `secrets` names variables that it gets beside `environment`, whose values `write` is told the files of. `nice` is
    added to its priority, as in nice(1). `leaves`: patterns of what it may leave in the run directory; with it comes a
    keeper, which removes all that a dead one left (keeper.py)."""

    name: str
    argv: tuple[str, ...]
    group: str
    priority: int
    stop_s: int
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    nice: int = 0
    leaves: tuple[str, ...] = ()
    keep: tuple[str, ...] | None = None
    """Patterns of the variables that it gets from the launcher's environment; None: all."""
    announce: tuple[str, str] | None = None
    """A pipe, and a line that is written to it before each start."""


def engine_names(service: Service) -> tuple[str, ...]:
    return tuple(f"engine-{index}" for index in range(len(service.engines)))


def programs(service: Service, directory: Path) -> tuple[Program, ...]:
    """Gateway and engines, with their configuration files written to `directory`."""
    path = directory / GATEWAY
    gateway_config.write_config(told_gateway(service, directory), path)
    gateway = gateway_program(service, (sys.executable, "-P", "-m", "appliance.gateway", str(path)))
    return gateway, *engine_programs(service, directory)


def told_gateway(service: Service, directory: Path) -> GatewayConfig:
    """The gateway's configuration with all places in the run directory."""
    journal, responses = service.gateway.journal, service.gateway.responses
    return msgspec.structs.replace(
        service.gateway,
        engines=tuple(str(_socket(directory, name)) for name in engine_names(service)),
        pardons=str(directory / PARDONS),
        control=str(directory / CONTROL),
        door=str(directory / listen.DOOR),
        journal=journal and str(directory / journal),
        responses=responses and str(directory / responses),
        run=str(directory),
    )


def _socket(directory: Path, name: str) -> Path:
    return directory / f"{name}.sock"


def engine_programs(service: Service, directory: Path) -> tuple[Program, ...]:
    """The engines, with their configuration files written to `directory`: what each finds at its next start."""
    found = []
    if service.job is not None:
        (directory / "download.json").write_bytes(msgspec.json.encode(service.job))
    for name, config in zip(engine_names(service), service.engines, strict=True):
        path = directory / f"{name}.json"
        socket, pulse = str(_socket(directory, name)), str(directory / f"{name}.pulse")
        told = msgspec.structs.replace(config, socket=socket, pulse=pulse, probe_s=service.budgets.probe_s)
        engine_config.write_config(told, path)
        argv: tuple[str, ...] = (sys.executable, "-P", "-m", "engine", str(path))
        if service.job is not None:
            before = ("appliance.source", str(directory / "download.json"), socket, pulse)
            argv = (sys.executable, "-P", "-m", *before, *argv)
        found.append(engine_program(service, name, argv, threads=config.threads))
    return tuple(found)


def gateway_program(service: Service, argv: tuple[str, ...]) -> Program:
    stop_s = math.ceil(service.gateway.drain_s) + 1
    return Program("gateway", argv, "gateway", 30, stop_s, environment=_threads(1), secrets=service.secrets, nice=NICE)


def engine_program(service: Service, name: str, argv: tuple[str, ...], *, threads: int) -> Program:
    token = service.job.order.token if service.job else None
    secrets = (token.env,) if token and token.env else ()
    leaves = (f"{name}.sock", f"{name}-ranks-*")
    return Program(
        name,
        argv,
        ENGINES,
        20,
        ENGINE_STOP_S,
        environment=_threads(threads),
        secrets=secrets,
        leaves=leaves,
        # A download needs credentials and proxies; the engine that follows it gets the same variables as any other.
        keep=None if service.job is not None else ENGINE_VARIABLES,
    )


def _threads(count: int) -> dict[str, str]:
    """Thread pools that libraries would otherwise size by the machine's cores, whatever the cgroup allows."""
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def write(directory: Path, programs: Sequence[Program], service: Service, secret_files: Mapping[str, str]) -> None:
    """Everything that supervisord needs, in `directory`: its configuration, scripts, and the pipes to the launcher.
    `secret_files` are where the values of secrets are read, by their names; no value is written."""
    password = secrets.token_urlsafe(24)
    watch = sentinel.Config(
        supervisor=str(directory / "supervisor.sock"),
        password=password,
        notices=str(directory / "notices"),
        pardons=str(directory / PARDONS),
        policy=service.restarts,
        budgets=service.budgets,
        pulses={name: str(directory / f"{name}.pulse") for name in engine_names(service)},
        control=str(directory / CONTROL),
        directory=str(directory),
    )
    (directory / "sentinel.json").write_bytes(msgspec.json.encode(watch))
    for pulse in watch.pulses.values():
        allocate_heartbeat(Path(pulse))  # now, and not when an engine starts: the disk may be full then
    listener = Program(
        "sentinel",
        (sys.executable, "-P", "-m", "appliance.launch.sentinel", str(directory / "sentinel.json")),
        "sentinel",
        -1,
        1,
        nice=NICE,
        announce=(watch.notices, msgspec.json.encode(sentinel.Notice(kind="started", program="sentinel")).decode()),
    )
    for program in (*programs, listener):
        write_script(directory, program, secret_files, service.memory)
        os.mkfifo(directory / f"{program.name}.log", 0o600)
    os.mkfifo(directory / "notices", 0o600)
    os.mkfifo(directory / PARDONS, 0o600)
    (directory / "supervisord.conf").write_text(configuration(programs, password, root=os.geteuid() == 0))


def write_script(directory: Path, program: Program, secret_files: Mapping[str, str], memory: str) -> None:
    """What Supervisor starts as this program from now on. `memory`: where its keeper finds what the kernel counts."""
    started = _kept(directory, program, memory) if program.leaves else program
    (directory / f"{program.name}.begin").write_text(beginning(started, secret_files))
    words = (sys.executable, "-I", "-S", begin.__file__, f"{program.name}.begin")
    (directory / f"{program.name}.sh").write_bytes(os.fsencode(f"exec {shlex.join(words)}\n"))


def rewrite_script(directory: Path, program: Program, memory: str) -> None:
    """Write the script of a program anew. Its secrets are read from the files of which its script says now."""
    before = json.loads((directory / f"{program.name}.begin").read_text())["secrets"]
    write_script(directory, program, before, memory)


def _kept(directory: Path, program: Program, memory: str) -> Program:
    """The program as its keeper starts it, and what the keeper is told written down: its own command line does not
    name the program's files, so that whoever looks for the program finds that."""
    kept = Kept(program=program.name, argv=program.argv, directory=str(directory), files=program.leaves, memory=memory)
    path = directory / f"{program.name}.kept"
    path.write_bytes(msgspec.json.encode(kept))
    argv = (sys.executable, "-P", "-m", "appliance.launch.keeper", str(path))
    return replace(program, argv=argv, environment={**program.environment, MARK: kept.mark})


def beginning(program: Program, secret_files: Mapping[str, str]) -> str:
    """Return the file for begin.py, which becomes the program in the launcher's own working directory."""
    told: dict[str, object] = {
        "argv": program.argv,
        "directory": os.getcwd(),
        "nice": program.nice,
        "environment": dict(sorted(program.environment.items())),
        "secrets": {name: secret_files[name] for name in program.secrets},
    }
    if program.keep is not None:
        told["keep"] = program.keep
    if program.announce is not None:
        told["announce"] = program.announce
    return json.dumps(told)


def configuration(programs: Sequence[Program], password: str, *, root: bool) -> str:
    """The text of supervisord.conf. `root`: without an explicit user Supervisor warns that it runs as root."""
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
    sections.append(("eventlistener:sentinel", _listener()))
    return "\n".join("\n".join([f"[{name}]", *(f"{k}={v}" for k, v in keys), ""]) for name, keys in sections)


def _program(program: Program) -> list[tuple[str, object]]:
    return [
        ("command", f"/bin/sh {program.name}.sh"),
        ("autorestart", "false"),
        ("startsecs", 0),
        ("exitcodes", f"0,{EXIT_PERMANENT}"),  # decides only how loud Supervisor logs the end
        ("stopsignal", "TERM"),
        ("stopwaitsecs", program.stop_s),
        ("killasgroup", "true"),
        ("redirect_stderr", "true"),
        ("stdout_logfile", f"{program.name}.log"),
        ("stdout_logfile_maxbytes", 0),
    ]


def _listener() -> list[tuple[str, object]]:
    return [
        ("command", "/bin/sh sentinel.sh"),
        ("events", "PROCESS_STATE_RUNNING,PROCESS_STATE_EXITED,PROCESS_STATE_FATAL"),
        ("buffer_size", 100),
        ("autorestart", "true"),
        # The sentinel keeps no state worth waiting for; it may be killed as often as anyone likes.
        ("startsecs", 0),
        ("stopwaitsecs", 1),
        ("killasgroup", "true"),
        ("stdout_logfile", "NONE"),  # else Supervisor writes one into TMPDIR
        ("stderr_logfile", "sentinel.log"),
        ("stderr_logfile_maxbytes", 0),
    ]
