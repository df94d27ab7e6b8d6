"""What the scheduler is told once, and which requests can never be served under it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from engine.api.errors import RequestError
from engine.api.messages import PoolingTask, Submit
from engine.kv.layout import Layout
from engine.models.parts import LongScaling, Rope


@dataclass(frozen=True, kw_only=True)
class PooledTasks:
    """What a model that pools may be asked for: vectors have `width` numbers and may be cut to `dimensions`, prompts
    have up to `segments`. `last`: its vector is the state of the last token, so that those before need no step."""

    tasks: tuple[PoolingTask, ...]
    width: int
    last: bool
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False
    segments: int = 1

    def check(self, submit: Submit) -> None:
        """Raises RequestError."""
        pooling = submit.pooling
        if pooling is None or pooling.task not in self.tasks:
            what = "tokens" if pooling is None else pooling.task
            raise RequestError(f"{what} were asked for; this model is served to {', '.join(self.tasks)}", "task")
        if submit.max_tokens or submit.emitted or submit.grammar is not None:
            raise RequestError("a prompt that is pooled has no reply: max_tokens must be 0", "max_tokens")
        size, segments = pooling.dimensions, submit.segments
        if size is not None and size not in self.dimensions and not (self.any_dimensions and 1 <= size <= self.width):
            raise RequestError(f"dimensions: {size}: {self._lengths()}", "dimensions")
        if segments and (sum(segments) != len(submit.prompt) or min(segments) < 0):
            raise RequestError(f"segments of {segments} tokens: the prompt has {len(submit.prompt)}", "segments")
        if len(segments) > self.segments:
            raise RequestError(f"{len(segments)} segments: this model tells {self.segments} apart", "segments")

    def _lengths(self) -> str:
        if self.any_dimensions:
            return f"vectors can be cut to 1 to {self.width} numbers"
        if self.dimensions:
            return f"vectors can be cut to {', '.join(map(str, self.dimensions))} numbers"
        return f"this model's vectors have {self.width} numbers, and it was not trained to have them cut"


@dataclass(frozen=True, kw_only=True)
class EncoderLimits:
    """What an encoder-decoder model has positions for, in tokens: of a source, and of a reply with what it
    begins with."""

    longest: int
    reply: int

    def check(self, submit: Submit, room: int) -> None:
        """Raises RequestError. room: the longest source that fits into a step, beside one token of everybody."""
        source, begins = submit.source, len(submit.prompt) - submit.source
        longest = min(self.longest, room)
        if not 1 <= source <= longest:
            raise RequestError(
                f"the prompt, which the encoder reads, has {source} tokens; it must have 1 to {longest}", "prompt"
            )
        if not 1 <= begins < self.reply:
            raise RequestError(
                f"the reply begins with {begins} tokens of the prompt; it must begin with 1 to {self.reply - 1}",
                "decoder_prompt",
            )
        if submit.sampling.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: a source is read both ways, and its tokens have none", "prompt_logprobs"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`blocks` count the null block. `ropes` are the distinct rotations of the model, `vocab_size` its logits.
    `pooled`: the model pools, and gives no tokens. `whole`: a prompt is computed in one step, because it is read both
    ways. `sources`: the model reads one of each request, and nothing is cached of it for others."""

    layout: Layout
    blocks: int
    max_context: int
    vocab_size: int = 2**32
    max_running: int = 256
    max_step_tokens: int = 512
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    prefix_cache: bool = True
    ropes: tuple[Rope, ...] = ()
    pooled: PooledTasks | None = None
    whole: bool = False
    sources: EncoderLimits | None = None

    @property
    def slots(self) -> int:
        """Requests that run at once: no more than get one token each in every step."""
        return min(self.max_running, self.max_step_tokens)

    def rope_limit(self, length: int) -> int:
        """How long a sequence may grow whose tokens are rotated for this length, before all are rotated anew."""
        originals = [rope.scaling.original for rope in self.ropes if isinstance(rope.scaling, LongScaling)]
        return min((original for original in originals if original >= length), default=self.max_context)

    def longest(self, submit: Submit) -> int:
        """Tokens of this request's sequence at most, whatever it asks for."""
        if self.sources is None:
            return self.max_context
        return min(self.max_context, submit.source + self.sources.reply)

    def variants(self, length: int) -> tuple[bytes, ...]:
        """What the keys of a sequence rotated for this length depend on, beside its tokens."""
        return tuple(str(rope.variant(length)).encode() for rope in self.ropes)

    def may_skip(self, submit: Submit) -> bool:
        """Whether a step for its first tokens may be left out where the cache has them."""
        pooling = submit.pooling
        if pooling is None or self.pooled is None:
            return True
        return self.pooled.last and pooling.task in ("embed", "classify")

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
        if self.pooled is not None:
            self.pooled.check(submit)
        elif submit.pooling is not None:
            raise RequestError(f"{submit.pooling.task} was asked for; this model is served to generate", "task")
        if self.sources is not None:
            self.sources.check(submit, self.max_step_tokens - self.slots)
        elif submit.source:
            raise RequestError("source: this model has no encoder that could read one", "source")
        if self.whole and length > self.max_step_tokens:
            raise RequestError(
                f"the prompt has {length} tokens; it is read both ways, in one step, and max_step_tokens="
                f"{self.max_step_tokens}",
                "prompt",
            )
        longest = min(length + submit.max_tokens, self.longest(submit))
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
