"""CPU affinity of an engine process."""

import os

from engine.api.config import EngineConfig
from engine.api.errors import ConfigError


def bind(config: EngineConfig) -> None:
    """Restrict this process to its CPUs. All threads inherit this, so weights are allocated on the NUMA node of the
    threads that write them first. Raises ConfigError."""
    wanted = {*config.hardware.process_cpus, *config.hardware.cpus}
    if not wanted:
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        raise ConfigError(f"process_cpus={sorted(wanted)}: {error}") from error
    missing = wanted - os.sched_getaffinity(0)
    if missing:
        raise ConfigError(f"process_cpus={sorted(wanted)}: CPUs {sorted(missing)} are not available; set hardware.cpus")
