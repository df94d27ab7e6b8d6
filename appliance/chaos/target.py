"""The running appliance that faults are made in, as it is known from outside: run directory, configurations, files."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from appliance.config.gateway import GatewayConfig, read_config
from appliance.security.keys import clear_key
from appliance.supervisor import monitor, programs
from appliance.supervisor.reaper import Kept
from appliance.supervisor.rundir import Address
from appliance.supervisor.supervise import GATEWAY
from engine.api.config import EngineConfig
from engine.api.errors import ConfigError


@dataclass(frozen=True)
class Bundle:
    """What a crash bundle says of a death. `at_s`: Unix time."""

    program: str
    cause: str
    how: str
    at_s: float


@dataclass(frozen=True)
class Target:
    """`key` is an API key of the service, "" where it wants none. `within_s`: how long a start may take, beyond what is
    measured of it."""

    directory: Path
    address: Address
    key: str = ""
    within_s: float = 20.0

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def gateway(self) -> GatewayConfig:
        """As it is now: a reload changes it."""
        return read_config(self.directory / GATEWAY)

    @property
    def engines(self) -> tuple[EngineConfig, ...]:
        files = sorted(self.directory.glob("engine-*.json"), key=lambda path: int(path.stem.removeprefix("engine-")))
        return tuple(msgspec.json.decode(path.read_bytes(), type=EngineConfig) for path in files)

    @property
    def watch(self) -> monitor.Config:
        """Of the sentinel: when an engine hangs, and how often it is started again."""
        return msgspec.json.decode((self.directory / "sentinel.json").read_bytes(), type=monitor.Config)

    @property
    def memory(self) -> Path:
        """The file in which the kernel counts what it kills for memory, as keepers are told it."""
        kept = msgspec.json.decode((self.directory / "engine-0.kept").read_bytes(), type=Kept)
        return Path(kept.memory)

    @property
    def exact(self) -> bool:
        """Whether the same request gives the same tokens, whatever runs beside it (docs/operations.md)."""
        return all(engine.invariant for engine in self.engines)

    def pids(self, name: str) -> list[int]:
        return programs.programs(self.address.pid).get(name, [])

    def pid(self, name: str) -> int:
        """0 where the program has no process now."""
        return programs.program(self.address.pid, name)

    def bundles(self) -> list[Bundle]:
        """Of all places where this appliance may have written some, oldest first."""
        found = []
        for place in self.address.crashes:
            for path in Path(place).glob("*/death.json"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    said = json.loads(path.read_text())
                    at_s = datetime.fromisoformat(said["time"]).timestamp()
                    found.append(Bundle(said["program"], said["cause"], said["how"], at_s))
        return sorted(found, key=lambda bundle: bundle.at_s)

    def recent_deaths(self, program: str) -> int:
        """How many crash bundles of a program are younger than the window in which restarts are counted."""
        since_s = (datetime.now(UTC) - timedelta(seconds=self.watch.policy.window_s)).timestamp()
        own = max(since_s, _started_s(self.address.pid))
        return sum(1 for bundle in self.bundles() if bundle.program == program and bundle.at_s >= own)


def _started_s(pid: int) -> float:
    """Unix time at which a process was started."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + programs.began(pid) / os.sysconf("SC_CLK_TCK")


def key_of(config: GatewayConfig, given: str) -> str:
    """An API key for a service: the given one, or the first of its own. Raises ConfigError where there is none that can
    be read."""
    if given or config.api_keys is None:
        return given
    key = clear_key(config.api_keys)
    if not key:
        raise ConfigError("endpoints.api_keys: the list has hashes of keys only; name a key with --api-key")
    return key
