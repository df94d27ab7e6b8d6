"""Which CPUs a process of the engine runs on."""

import os

from engine.api.config import EngineConfig
from engine.api.errors import ConfigError


def bind(config: EngineConfig) -> None:
    """Lets this process run on its own CPUs only: all threads inherit that, so the weights come to lie in memory of
    their node, whose threads write them first. Raises ConfigError."""
    wanted = {*config.process_cpus, *config.cpus}
    if not wanted:
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        raise ConfigError(f"process_cpus={sorted(wanted)}: {error}") from error
    missing = wanted - os.sched_getaffinity(0)
    if missing:
        raise ConfigError(f"process_cpus={sorted(wanted)}: {sorted(missing)} are not this process's; set hardware.cpus")
