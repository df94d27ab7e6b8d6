"""The running appliance under test, as seen from outside: run directory, configurations and files."""

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
from appliance.supervisor.reaper import ReaperConfig
from appliance.supervisor.rundir import Address
from appliance.supervisor.supervise import GATEWAY
from engine.api.config import EngineConfig
from engine.api.errors import ConfigError


@dataclass(frozen=True)
class CrashBundle:
    """Crash information from a crash bundle."""

    program: str
    cause: str
    how: str
    at_s: float  # Unix time


@dataclass(frozen=True)
class Target:
    """The appliance under test."""

    directory: Path
    address: Address
    key: str = ""  # API key of the service; "" if it needs none
    within_s: float = 20.0  # maximum duration of a start

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def gateway(self) -> GatewayConfig:
        """Current configuration of the gateway. A reload changes it."""
        return read_config(self.directory / GATEWAY)

    @property
    def engines(self) -> tuple[EngineConfig, ...]:
        files = sorted(self.directory.glob("engine-*.json"), key=lambda path: int(path.stem.removeprefix("engine-")))
        return tuple(msgspec.json.decode(path.read_bytes(), type=EngineConfig) for path in files)

    @property
    def monitor_config(self) -> monitor.Config:
        """Configuration of the restart monitor: stall limits and restart policy."""
        return msgspec.json.decode((self.directory / "monitor.json").read_bytes(), type=monitor.Config)

    @property
    def memory_counters(self) -> Path:
        """File in which the kernel counts out-of-memory kills, as the engines' subreapers know it."""
        config = msgspec.json.decode((self.directory / "engine-0.reaper").read_bytes(), type=ReaperConfig)
        return Path(config.memory)

    @property
    def deterministic(self) -> bool:
        """The same request always gives the same tokens, regardless of the batch (docs/operations.md)."""
        return all(engine.hardware.batch_invariant for engine in self.engines)

    def pids(self, name: str) -> list[int]:
        return programs.programs(self.address.pid).get(name, [])

    def pid(self, name: str) -> int:
        """Return the process ID of a program, or 0 without one."""
        return programs.program(self.address.pid, name)

    def bundles(self) -> list[CrashBundle]:
        """Return the crash bundles from all folders of this appliance, the oldest first."""
        found = []
        for place in self.address.crashes:
            for path in Path(place).glob("*/death.json"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    document = json.loads(path.read_text())
                    at_s = datetime.fromisoformat(document["time"]).timestamp()
                    found.append(CrashBundle(document["program"], document["cause"], document["how"], at_s))
        return sorted(found, key=lambda bundle: bundle.at_s)

    def recent_crashes(self, program: str) -> int:
        """Return the number of crash bundles of a program within the window of the restart limit."""
        since_s = (datetime.now(UTC) - timedelta(seconds=self.monitor_config.policy.window_s)).timestamp()
        own = max(since_s, _started_s(self.address.pid))
        return sum(1 for bundle in self.bundles() if bundle.program == program and bundle.at_s >= own)


def _started_s(pid: int) -> float:
    """Return the Unix time at which a process was started."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + programs.start_ticks(pid) / os.sysconf("SC_CLK_TCK")


def key_of(config: GatewayConfig, given: str) -> str:
    """Return an API key for a service: the given one, or the first of its list.

    Raise ConfigError without a readable key.
    """
    if given or config.api_keys is None:
        return given
    key = clear_key(config.api_keys)
    if not key:
        raise ConfigError("endpoints.api_keys: the list has only hashes of keys; pass a key with --api-key")
    return key
