"""What a scenario is: one small declaration of a fault, what it needs, and what the appliance promises to do then."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.chaos.target import Target

if TYPE_CHECKING:
    from appliance.chaos.fault_injector import Stage


@dataclass(frozen=True)
class Promise:
    """What must be true afterwards, beside: each probe got what it asked for, the same tokens as before; nothing of the
    fault is left. `text` says it in words.

    `restarts`: this program is another process, within `within_s` of the fault, and the service is ready; "" is none:
    then it is ready all the time. `causes`, one of which the crash bundle has; `hows`, one of which it says. `lost`:
    requests without an Idempotency-Key may be, and whose connection breaks comes back. `refusals`: requests may be
    refused, with 503 and a Retry-After. `rises` and `stands`: metrics that do, and do not, count up during the fault.
    `first_s`: in which the answer to each stream begins, 0 for any time.
    `says`: what the fault itself saw, by its name in `Stage.seen`."""

    text: str
    within_s: float
    restarts: str = ""
    causes: tuple[str, ...] = ()
    hows: tuple[str, ...] = ()
    lost: bool = False
    refusals: bool = False
    rises: tuple[str, ...] = ()
    stands: tuple[str, ...] = ()
    first_s: float = 0.0
    says: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """`lacks(target)`: why it cannot be made there, "" if it can. `make(stage)` makes the fault; what takes it back it
    tells the stage before. A fault that restarts nothing is held for the duration that was asked for."""

    name: str
    about: str
    make: Callable[["Stage"], Awaitable[None]]
    promise: Callable[[Target], Promise]
    lacks: Callable[[Target], str] = lambda target: ""
