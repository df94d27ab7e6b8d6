"""Scheduling events of a request, sent to the gateway and produced by replays. Tokens are not events.

`str(event)` is a phrase about the request. Ids in an event are those of other requests.
"""

from typing import Literal

import msgspec

Finish = Literal["stop", "length", "abort", "error", "deadline"]


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """The request was queued."""

    prompt: int  # prompt tokens
    emitted: int  # reply tokens that an earlier engine produced
    ahead: int  # requests before it in the queue

    def __str__(self) -> str:
        known = counted(self.prompt, "prompt token") + (
            f" and {counted(self.emitted, 'reply token')}" if self.emitted else ""
        )
        return f"queued with {known}" + (f", behind {counted(self.ahead, 'other')}" if self.ahead else "")


class Blocked(msgspec.Struct, frozen=True, tag="blocked"):
    """The request is first in the queue and cannot be scheduled."""

    lacks: Literal["blocks", "places"]
    needs: int  # blocks; or the number of places in the batch, all taken
    free: int  # free blocks, without one for each running request
    holders: tuple[tuple[str, int], ...] = ()  # (request, number of blocks) with the most blocks

    def __str__(self) -> str:
        if self.lacks == "places":
            return (
                f"first in the queue: all {self.needs:,} places of the batch are taken (engine.scheduling.max_running)"
            )
        held = ", ".join(f"{id} ({blocks:,})" for id, blocks in self.holders)
        need = f"first in the queue: KV cache full, {self.needs:,} blocks needed and {self.free:,} free"
        return need + (f"; the largest users are {held}" if held else "")


class AdapterMissing(msgspec.Struct, frozen=True, tag="adapter_missing"):
    """The LoRA adapter of the request is not on the device. Requests behind it are scheduled meanwhile."""

    name: str
    slots: int  # number of adapter slots, all in use; 0: the adapter is being read

    @property
    def lacks(self) -> str:
        return "adapter slot" if self.slots else "adapter"

    def __str__(self) -> str:
        if not self.slots:
            return f"waits until adapter {self.name} is read"
        return f"waits for adapter {self.name}: all {self.slots:,} slots are used (adapter_loading.max_active)"


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The request was scheduled."""

    step: int  # first step
    known: int  # its tokens
    cached: int  # how many of them were in the prefix cache

    def __str__(self) -> str:
        found = f"{self.cached:,} of {self.known:,} tokens were cached" if self.cached else "no tokens were cached"
        return f"scheduled in step {self.step:,}; {found}"


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """The request was preempted and will be recomputed."""

    step: int
    tokens: int  # computed tokens at that time
    by: str  # request that gets the blocks; "": the request itself needs more blocks than are free

    def __str__(self) -> str:
        whom = f"{self.by} needs its KV blocks" if self.by else "no free KV blocks are left for its next tokens"
        return f"preempted at {self.tokens:,} tokens in step {self.step:,}: {whom}"


class Outgrown(msgspec.Struct, frozen=True, tag="outgrown"):
    """The request grew past the length of its RoPE scaling factor and is recomputed with the next one."""

    tokens: int

    def __str__(self) -> str:
        return f"recomputed: positions past {self.tokens:,} tokens use another RoPE scaling"


class Expired(msgspec.Struct, frozen=True, tag="expired"):
    """A deadline of the request passed."""

    wanted: Literal["first token", "end"]
    running: bool  # False: it was queued

    def __str__(self) -> str:
        field = "ttft_deadline_ms" if self.wanted == "first token" else "deadline_ms"
        return f"{field} passed while the request was {'running' if self.running else 'queued'}"


class Ended(msgspec.Struct, frozen=True, tag="ended", omit_defaults=True):
    finish: Finish
    tokens: int
    drafted: int = 0  # draft tokens
    accepted: int = 0  # draft tokens that became reply tokens

    def __str__(self) -> str:
        drafts = f"; {self.accepted:,} of {counted(self.drafted, 'draft token')} accepted" if self.drafted else ""
        return f"ends ({self.finish}) with {counted(self.tokens, 'token')}{drafts}"


Event = Queued | Blocked | AdapterMissing | Admitted | Preempted | Outgrown | Expired | Ended


class TimelineEvents(msgspec.Struct, frozen=True, tag="told"):
    """Events in order: (request id, time of the engine's monotonic clock in seconds, event)."""

    events: tuple[tuple[str, float, Event], ...]
