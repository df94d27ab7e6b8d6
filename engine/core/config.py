"""What the scheduler is told once, and which requests can never be served under it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from engine.api.errors import RequestError
from engine.api.messages import Submit
from engine.kv.layout import Layout
from engine.models.parts import LongScaling, Rope


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`blocks` count the null block. `ropes` are the distinct rotations of the model, `vocab_size` its logits."""

    layout: Layout
    blocks: int
    max_context: int
    vocab_size: int = 2**32
    max_running: int = 256
    max_step_tokens: int = 512
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    prefix_cache: bool = True
    ropes: tuple[Rope, ...] = ()

    @property
    def slots(self) -> int:
        """Requests that run at once: no more than get one token each in every step."""
        return min(self.max_running, self.max_step_tokens)

    def rope_limit(self, length: int) -> int:
        """How long a sequence may grow whose tokens are rotated for this length, before all are rotated anew."""
        originals = [rope.scaling.original for rope in self.ropes if isinstance(rope.scaling, LongScaling)]
        return min((original for original in originals if original >= length), default=self.max_context)

    def variants(self, length: int) -> tuple[bytes, ...]:
        """What the keys of a sequence rotated for this length depend on, beside its tokens."""
        return tuple(str(rope.variant(length)).encode() for rope in self.ropes)

    def check(self, submit: Submit) -> None:
        """Raises RequestError for a request that could not be served were it alone."""
        length = len(submit.prompt)
        if not length:
            raise RequestError("the prompt has no tokens; give at least one", "prompt")
        room = self.max_context - (1 if submit.max_tokens else 0)
        if length > room:
            raise RequestError(
                f"the prompt has {length} tokens; max_context={self.max_context} leaves room for {room}", "prompt"
            )
        self._check_ids(submit)
        longest = min(length + submit.max_tokens, self.max_context)
        blocks = self.layout.blocks_for(longest, self.max_step_tokens)
        if blocks > self.blocks - 1:
            raise RequestError(
                f"prompt and max_tokens make up to {longest} tokens, which need {blocks} KV blocks; there are "
                f"{self.blocks - 1}: lower max_tokens, or give the engine more cache memory",
                "max_tokens",
            )

    def _check_ids(self, submit: Submit) -> None:
        """Token ids index tables of the worker: one out of range would end the process, not the request."""
        sampling = submit.sampling
        named: dict[str, Iterable[int]] = {
            "prompt": submit.prompt,
            "emitted": submit.emitted,
            "eos_token_ids": submit.eos_token_ids,
            "stop_token_ids": submit.stop_token_ids,
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids or (),
            "bad_words": chain.from_iterable(sampling.bad_words),
        }
        for param, ids in named.items():
            found = tuple(ids)
            if found and (min(found) < 0 or max(found) >= self.vocab_size):
                wrong = next(id for id in found if not 0 <= id < self.vocab_size)
                raise RequestError(f"token id {wrong}: the vocabulary has ids 0 to {self.vocab_size - 1}", param)
