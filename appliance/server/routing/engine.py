"""One engine process as the router sees it."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from appliance.observability.metrics import now
from engine.api.client import EngineClient

Request = TypeVar("Request")


@dataclass
class Engine(Generic[Request]):
    """One engine process as the router sees it. `label` is its index as text, as metrics show it. `reserved`: a suspect
    is tried alone on it. `start_s`: what its last start took; `since_s`: when it was last
    seen to be gone, and `gap_s` how long it was. `answers`: it has answered a request of each kind since the gateway or
    its swapped successor started (server/first_requests.py). Until `ends_by_s`
    its end is no death but wanted, and then it is `swapped`: requests wait as long as the next start takes."""

    index: int
    client: EngineClient
    since_s: float
    was_ready: bool = False
    start_s: float = 0.0
    reserved: bool = False
    ends_by_s: float = 0.0
    swapped: bool = False
    answers: bool = False
    gap_s: float = 0.0
    open: dict[str, Request] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.index)

    @property
    def serves(self) -> bool:
        return self.client.state.kind == "ready"

    def returns_within(self, hold_s: float) -> bool:
        """Whether it is being started again, and will be back soon: its last start took no longer than `hold_s`, and
        it is not gone for longer either."""
        gone = self.was_ready and not self.serves
        soon = self.start_s <= hold_s and now() - self.since_s <= hold_s
        return gone and (self.swapped or soon)

    @property
    def phase(self) -> str:
        """starting, loading (or the engine's own word for it), ready, restarting, failed."""
        state = self.client.state
        if state.kind == "down":
            return "restarting" if self.was_ready else "starting"
        return state.phase if state.kind == "loading" else state.kind

    @property
    def detail(self) -> str:
        return self.client.state.detail

    @property
    def progress(self) -> float:
        return 1.0 if self.serves else self.client.state.fraction
