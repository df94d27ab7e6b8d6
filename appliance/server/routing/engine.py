"""State of one engine process in the router."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from appliance.observability.metrics import now
from engine.api.client import EngineClient

Request = TypeVar("Request")


@dataclass
class Engine(Generic[Request]):
    """State of one engine process in the router."""

    index: int  # also its label in metrics
    client: EngineClient
    since_s: float  # when its connection was last lost, or the start of the gateway
    was_ready: bool = False
    start_s: float = 0.0  # how long its last start took
    reserved: bool = False  # a poison candidate is tested alone on it
    ends_by_s: float = 0.0  # until this time its exit is expected and does not count as a crash
    # it has exited as expected; requests wait for its successor, however long that takes to start
    swapped: bool = False
    # it has answered a request of each kind since the gateway or its successor started (first_requests.py)
    answers: bool = False
    gap_s: float = 0.0  # how long it was unavailable the last time
    open: dict[str, Request] = field(default_factory=dict)  # requests that it computes, by key

    @property
    def label(self) -> str:
        return str(self.index)

    @property
    def serves(self) -> bool:
        return self.client.state.kind == "ready"

    def returns_within(self, hold_s: float) -> bool:
        """Return if the engine is restarting and will soon be back.

        That holds if its last start took no longer than `hold_s` and it has not been gone for longer either.
        """
        gone = self.was_ready and not self.serves
        soon = self.start_s <= hold_s and now() - self.since_s <= hold_s
        return gone and (self.swapped or soon)

    @property
    def phase(self) -> str:
        """One of starting, loading (or the engine's own name for that phase), ready, restarting, failed."""
        state = self.client.state
        if state.kind == "down":
            return "restarting" if self.was_ready else "starting"
        return state.phase if state.kind == "loading" else state.kind

    @property
    def why_gone(self) -> str:
        state = self.client.state
        return state.message if state.kind == "failed" else "the connection closed"

    @property
    def detail(self) -> str:
        return self.client.state.detail

    @property
    def progress(self) -> float:
        return 1.0 if self.serves else self.client.state.fraction
