"""What happens to a request in an engine, token by token apart: told to the gateway, and by replays.

`str` of an event is a part of a sentence about the request. Ids are those of other requests.
"""

from typing import Literal

import msgspec

Finish = Literal["stop", "length", "abort", "error", "deadline"]


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """`prompt` and `emitted` tokens are known; `ahead` others wait before it."""

    prompt: int
    emitted: int
    ahead: int

    def __str__(self) -> str:
        known = counted(self.prompt, "prompt token") + (f" and {self.emitted:,} of its reply" if self.emitted else "")
        return f"queued with {known}" + (f", behind {counted(self.ahead, 'other')}" if self.ahead else "")


class Blocked(msgspec.Struct, frozen=True, tag="blocked"):
    """It is the first to wait, and cannot run: `needs` blocks of which `free` are there beside one for each that runs,
    or a place in the batch, which has `needs`. `holders`: who holds the most blocks, with how many."""

    lacks: Literal["blocks", "places"]
    needs: int
    free: int
    holders: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if self.lacks == "places":
            return f"first to wait: all {self.needs:,} places of the batch are taken (engine.scheduling.max_running)"
        held = ", ".join(f"{id} ({blocks:,})" for id, blocks in self.holders)
        need = f"first to wait: KV cache full, {self.needs:,} blocks needed and {self.free:,} free"
        return need + (f"; most are held by {held}" if held else "")


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """It runs from `step` on; `cached` of its `known` tokens came from the prefix cache."""

    step: int
    known: int
    cached: int

    def __str__(self) -> str:
        found = f"{self.cached:,} of {self.known:,} tokens were cached" if self.cached else "nothing of it was cached"
        return f"runs from step {self.step:,} on; {found}"


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """It gave its blocks to `by`, with so many tokens, and waits to be computed again; "" stands for itself."""

    step: int
    tokens: int
    by: str

    def __str__(self) -> str:
        whom = f"{self.by} needs its KV blocks" if self.by else "it needs more KV blocks itself"
        return f"preempted at {self.tokens:,} tokens in step {self.step:,}: {whom}"


class Outgrown(msgspec.Struct, frozen=True, tag="outgrown"):
    """It got longer than the rotary scaling of its cache is for, and is computed anew."""

    tokens: int

    def __str__(self) -> str:
        return f"computed anew: past {self.tokens:,} tokens positions are rotated otherwise"


class Expired(msgspec.Struct, frozen=True, tag="expired"):
    """A time passed until which it wanted its first token, or its end, while it ran or waited."""

    wanted: Literal["first token", "end"]
    running: bool

    def __str__(self) -> str:
        field = "ttft_deadline_ms" if self.wanted == "first token" else "deadline_ms"
        return f"its {field} passed while it {'ran' if self.running else 'waited'}"


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    finish: Finish
    tokens: int

    def __str__(self) -> str:
        return f"ends ({self.finish}) with {counted(self.tokens, 'token')}"


Event = Queued | Blocked | Admitted | Preempted | Outgrown | Expired | Ended


class Told(msgspec.Struct, frozen=True, tag="told"):
    """Events in order, each with its request's id and the engine's monotonic clock in seconds."""

    events: tuple[tuple[str, float, Event], ...]
