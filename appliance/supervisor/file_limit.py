"""Limit of open files (ulimit -n): raised to the hard limit, and checked before anything starts."""

import resource

from appliance.supervisor.supervise import MIN_FILES, Service

MOST = 2**16
_OF_GATEWAY = 128  # modules, logs, journals, sockets and pipes
_OF_ENGINE = 8


class FileLimitTooLow(Exception):
    """Raised if the hard limit of open files is too low. The message says how many are needed and how to raise it."""


def needed(service: Service) -> int:
    """Return how many files the gateway may have open when all engines are full, at least the number that Supervisor
    needs."""
    return max(MIN_FILES, _OF_GATEWAY + sum(_OF_ENGINE + engine.scheduling.max_running for engine in service.engines))


def raise_limit(service: Service) -> None:
    """Raise the soft limit to the hard limit; all programs inherit it. Raise FileLimitTooLow if the hard limit is too
    low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = needed(service)
    most = MOST if hard == resource.RLIM_INFINITY else hard
    if most < need:
        raise FileLimitTooLow(
            f"the limit of open files (ulimit -n) is {hard}, and {need} are needed: raise it with `ulimit -n {need}`, "
            f"`docker run --ulimit nofile={need}` or LimitNOFILE={need} in a systemd unit, or lower "
            "engine.scheduling.max_running"
        )
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, MOST)), hard))
