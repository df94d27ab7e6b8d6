"""Scheduler configuration, and the checks for requests that can never be served with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from engine.api.config import MAX_RUNNING, SpeculationConfig, num_slots
from engine.api.errors import RequestError
from engine.api.messages import AlignmentOptions, PoolingTask, SpeechRules, Submit
from engine.core.media import MediaLimits, check_items
from engine.kv.layout import Layout
from engine.models.parts import LongScaling, Rope


@dataclass(frozen=True, kw_only=True)
class PooledTasks:
    """Pooling tasks of a model and the limits of their requests."""

    tasks: tuple[PoolingTask, ...]
    width: int  # length of a vector
    last: bool  # the vector is the state of the last token, so cached tokens before it need no step
    dimensions: tuple[int, ...] = ()  # lengths to which vectors may be truncated
    any_dimensions: bool = False  # vectors may be truncated to any length
    segments: int = 1  # maximum number of segments of a prompt

    def check(self, submit: Submit) -> None:
        """Raise RequestError for an invalid pooling request."""
        pooling = submit.pooling
        if pooling is None or pooling.task not in self.tasks:
            what = "generate" if pooling is None else pooling.task
            raise RequestError(
                f"task {what}: not supported by this model; supported are {', '.join(self.tasks)}", "task"
            )
        if submit.max_tokens or submit.emitted or submit.grammar is not None:
            raise RequestError("a pooling request has no reply: max_tokens must be 0", "max_tokens")
        size, segments = pooling.dimensions, submit.segments
        if size is not None and size not in self.dimensions and not (self.any_dimensions and 1 <= size <= self.width):
            raise RequestError(f"dimensions: {size}: {self._lengths()}", "dimensions")
        if segments and (sum(segments) != len(submit.prompt) or min(segments) < 0):
            raise RequestError(
                f"segments have {sum(segments)} tokens in total, but the prompt has {len(submit.prompt)}", "segments"
            )
        if len(segments) > self.segments:
            raise RequestError(f"{len(segments)} segments: this model supports at most {self.segments}", "segments")

    def _lengths(self) -> str:
        if self.any_dimensions:
            return f"vectors can be truncated to 1 to {self.width} numbers"
        if self.dimensions:
            return f"vectors can be truncated to {', '.join(map(str, self.dimensions))} numbers"
        return f"this model's vectors have {self.width} numbers, and it was not trained for truncated ones"


@dataclass(frozen=True, kw_only=True)
class EncoderLimits:
    """Length limits of an encoder-decoder model, in tokens."""

    longest: int  # encoder input
    reply: int  # reply, including the tokens it begins with
    spectrogram: tuple[int, int] | None = None  # speech model: its inputs are spectrograms of these mels and frames

    def check(self, submit: Submit, room: int) -> None:
        """Raise RequestError for invalid lengths. room: the longest encoder input that fits into a step, next to one
        token of every running request."""
        source, begins = submit.source, len(submit.prompt) - submit.source
        longest = min(self.longest, room)
        if self.spectrogram is not None:
            self._check_audio(submit, self.spectrogram, room)
        if not 1 <= source <= longest:
            raise RequestError(f"the encoder input has {source} tokens; it must have 1 to {longest}", "prompt")
        if not 1 <= begins < self.reply:
            raise RequestError(
                f"the decoder prompt has {begins} tokens; it must have 1 to {self.reply - 1}",
                "decoder_prompt",
            )
        if submit.sampling.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not available for encoder-decoder models", "prompt_logprobs")
        if submit.sampling.alignment is not None:
            self._check_alignment(submit, submit.sampling.alignment)

    def _check_alignment(self, submit: Submit, wanted: AlignmentOptions) -> None:
        begins = len(submit.prompt) - submit.source
        if self.spectrogram is None or submit.max_tokens:
            raise RequestError("alignment: only prompts of speech models, without a reply, are aligned", "alignment")
        if not 0 <= wanted.first < begins or not 1 <= wanted.positions <= submit.source:
            raise RequestError(
                f"alignment: first={wanted.first}, positions={wanted.positions}: the prompt has {begins} tokens and "
                f"{submit.source} positions of audio",
                "alignment",
            )

    def _check_audio(self, submit: Submit, spectrogram: tuple[int, int], room: int) -> None:
        items, source = submit.media, submit.source
        if len(items) != 1 or items[0].modality != "audio" or source != self.longest:
            raise RequestError(f"media: the model reads one window of audio in {self.longest} positions", "media")
        check_items(submit)
        tensor = items[0].tensors.get("input_features")
        if items[0].spans != ((0, source),) or tensor is None or tensor.shape != spectrogram:
            raise RequestError(f"media: the window has no input_features of shape {list(spectrogram)}", "media")
        if tensor.dtype != "float32":
            raise RequestError(f"media: input_features are of type {tensor.dtype}, not float32", "media")
        if source > room:
            raise RequestError(
                f"a window has {source} positions, which are computed in one step with room for {room}; raise "
                "engine.scheduling.max_step_tokens",
                "media",
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Model properties and limits that the scheduler plans with."""

    layout: Layout
    blocks: int  # including the null block
    max_context: int
    vocab_size: int = 2**32  # number of logits
    max_running: int = MAX_RUNNING
    max_step_tokens: int = 512
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    prefix_cache: bool = True
    ropes: tuple[Rope, ...] = ()  # distinct rotary embeddings of the model
    pooled: PooledTasks | None = None  # the model pools and generates no tokens
    whole: bool = False  # prompts are computed in one step, because attention is bidirectional
    sources: EncoderLimits | None = None  # encoder-decoder model; its prompts are not cached
    snapshots: int | None = None  # recurrent or hybrid model: number of snapshots of its state
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters at the start, in the order of the worker
    adapter_slots: int | None = None  # LoRA adapters on the device at a time; None: all of them, always
    speculation: SpeculationConfig = SpeculationConfig()
    media: MediaLimits | None = None  # None if the model reads only text
    routes: bool = False  # the worker returns selected experts

    def speculates(self, submit: Submit) -> bool:
        """Return whether this request may have drafts."""
        constrained = submit.grammar is not None or submit.thinking is not None
        method = self.speculation.method
        return bool(submit.max_tokens) and method != "off" and (method != "jump-ahead" or constrained)

    @property
    def rolls_back(self) -> bool:
        """Return whether requests have a recurrent state, and drafts that may be rejected."""
        return self.snapshots is not None and self.speculation.enabled

    @property
    def slots(self) -> int:
        """Return the maximum number of running requests; each of them gets one token in every step."""
        return num_slots(self.max_running, self.max_step_tokens)

    def rope_limit(self, length: int) -> int:
        """Return the length to which a sequence may grow with the rotary scaling for `length`. Beyond it, all positions
        are recomputed with another scaling."""
        originals = [rope.scaling.original for rope in self.ropes if isinstance(rope.scaling, LongScaling)]
        return min((original for original in originals if original >= length), default=self.max_context)

    def longest(self, submit: Submit) -> int:
        """Return the maximum length of this request's sequence, regardless of its max_tokens."""
        if self.sources is None:
            return self.max_context
        return min(self.max_context, submit.source + self.sources.reply)

    def variants(self, length: int) -> tuple[bytes, ...]:
        """Return the cache key of this rotary scaling, on which the keys depend as on the tokens."""
        return tuple(str(rope.variant(length)).encode() for rope in self.ropes)

    def may_skip(self, submit: Submit) -> bool:
        """Return whether cached tokens of this request may be skipped. Pooling over all tokens needs their states."""
        pooling = submit.pooling
        if pooling is None or self.pooled is None:
            return True
        return self.pooled.last and pooling.task in ("embed", "classify")

    def check(self, submit: Submit) -> None:
        """Raise RequestError for a request that could not be served even as the only one."""
        length = len(submit.prompt)
        if not length:
            raise RequestError("the prompt has no tokens; give at least one", "prompt")
        room = self.max_context - (1 if submit.max_tokens else 0)
        if length > room:
            raise RequestError(
                f"the prompt has {length} tokens; max_context={self.max_context} leaves room for {room}", "prompt"
            )
        self._check_ids(submit)
        self._check_media(submit)
        if submit.sampling.return_routed_experts and not self.routes:
            raise RequestError(
                "return_routed_experts: this engine does not keep selected experts; set engine.return_routed_experts",
                "return_routed_experts",
            )
        if self.pooled is not None:
            self.pooled.check(submit)
        elif submit.pooling is not None:
            raise RequestError(
                f"task {submit.pooling.task}: not supported by this model; supported is generate", "task"
            )
        if self.sources is not None:
            self.sources.check(submit, self.max_step_tokens - self.slots)
        elif submit.source:
            raise RequestError("source: this model has no encoder; remove the field", "source")
        if self.whole and length > self.max_step_tokens:
            raise RequestError(
                f"the prompt has {length} tokens; this model must compute it in one step, and max_step_tokens="
                f"{self.max_step_tokens}",
                "prompt",
            )
        longest = min(length + submit.max_tokens, self.longest(submit))
        blocks = self.layout.blocks_for(longest, self.max_step_tokens)
        if blocks > self.blocks - 1:
            raise RequestError(
                f"prompt and max_tokens make up to {longest} tokens, which need {blocks} KV blocks; there are "
                f"{self.blocks - 1}: lower max_tokens, or raise hardware.kv_cache_memory",
                "max_tokens",
            )

    def _check_media(self, submit: Submit) -> None:
        if self.media is not None:
            self.media.check(submit, self.max_step_tokens - self.slots + 1)
        elif submit.media and (self.sources is None or self.sources.spectrogram is None):
            kind = submit.media[0].modality
            raise RequestError(f"media: this model reads only text; remove the {kind} from the prompt", "media")

    def _check_ids(self, submit: Submit) -> None:
        """Check token ids. They index tables of the worker: one out of range would crash the process."""
        sampling = submit.sampling
        named: dict[str, Iterable[int]] = {
            "prompt": submit.prompt,
            "emitted": submit.emitted,
            "eos_token_ids": submit.eos_token_ids,
            "stop_token_ids": submit.stop_token_ids,
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids or (),
            "bad_words": chain.from_iterable(sampling.bad_words),
            "speech": _rule_ids(sampling.speech),
        }
        for param, ids in named.items():
            found = tuple(ids)
            if found and (min(found) < 0 or max(found) >= self.vocab_size):
                wrong = next(id for id in found if not 0 <= id < self.vocab_size)
                raise RequestError(f"token id {wrong}: the vocabulary has ids 0 to {self.vocab_size - 1}", param)


def _rule_ids(rules: SpeechRules | None) -> tuple[int, ...]:
    if rules is None:
        return ()
    single = (one for one in (rules.timestamps, rules.no_timestamps) if one is not None)
    return (*chain.from_iterable(rules.begin), *single, rules.end, *rules.suppressed, *rules.suppressed_first)
