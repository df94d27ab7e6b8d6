"""Declaration of a scenario: a fault, its requirements, and the promised behaviour of the appliance."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.chaos.target import Target

if TYPE_CHECKING:
    from appliance.chaos.fault_injector import FaultInjector


@dataclass(frozen=True)
class Promise:
    """Promised behaviour after a fault.

    Two promises are always checked: each probe gets a reply with the same tokens as before, and no part of the fault is
    left.
    """

    text: str  # the promise in words
    within_s: float  # maximum time from the fault until the service is ready again
    restarts: str = ""  # program that must have a new process; "": the service stays ready all the time
    causes: tuple[str, ...] = ()  # allowed causes in the crash bundle
    exit_details: tuple[str, ...] = ()  # allowed details of the cause in the crash bundle
    may_lose_requests: bool = (
        False  # requests without an Idempotency-Key may fail, and clients with one may have to reconnect
    )
    may_refuse: bool = False  # requests may be rejected with 503 and a Retry-After
    increasing: tuple[str, ...] = ()  # metrics that must increase during the fault
    constant: tuple[str, ...] = ()  # metrics that must not increase
    first_s: float = 0.0  # maximum time until each stream begins; 0: no limit
    # expected observations of the fault itself, by name in `FaultInjector.observations`
    observations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """A fault and its promise. A fault without a restart is held for the requested duration."""

    name: str
    about: str
    inject: Callable[["FaultInjector"], Awaitable[None]]  # makes the fault, after registering its rollback steps
    promise: Callable[[Target], Promise]
    unavailable: Callable[[Target], str] = lambda target: ""  # reason why it is not possible on a target, or ""
