"""Offline inference: `LLM(path).generate(prompts, params)`, with scheduler and worker in this process.

Requests take the same path as with a gateway, without the socket.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from engine.api.config import MAX_RUNNING, AdapterConfig, EngineConfig, TaskConfig, with_values
from engine.api.errors import ConfigError, EngineGone, RequestError
from engine.api.media import MediaItem
from engine.api.messages import (
    Abort,
    AdapterChanged,
    Alignment,
    Control,
    Delta,
    Failed,
    Finish,
    FromEngine,
    Grammar,
    LoadAdapter,
    Logprob,
    Output,
    Pooled,
    Pooling,
    Profile,
    Profiled,
    Sampling,
    Stats,
    Submit,
    Thinking,
    Timing,
    UnloadAdapter,
)
from engine.api.ranges import (
    check_lengths,
    check_logprobs,
    check_max_tokens,
    check_number,
    check_penalty,
    check_repetition,
    check_seed,
    check_stop,
    check_truncation,
    effective_bias,
    effective_temperature,
    effective_top_k,
)
from engine.arguments import ARGUMENTS, engine_config, python_names
from engine.beam_search import Beam, BeamParams, beam_search, with_text
from engine.core.loop import build_loop
from engine.formats.load_time import load_formats
from engine.kv.layout import Layout, cpu_kv_dtype, layout, page_shape, page_sizes
from engine.kv.layout import with_drafts as with_draft_pages
from engine.lowering.footprint import Holder, weight_bytes
from engine.media.spectrogram import Samples, spectrogram_item
from engine.metrics.reader import ENGINE, MetricValue, new_store, read
from engine.metrics.sequence import SequenceMetrics
from engine.metrics.store import MetricStore
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.draft import with_drafts
from engine.models.kv_scales import KNOWN, stated_format
from engine.models.media import bidirectional_tokens
from engine.models.parts import LatentAttention, Model, attentions, is_bidirectional, page_writers
from engine.models.stored import native_paths
from engine.structured.grammar import compiler_for
from engine.text import IncrementalDecoder, StopStrings, Tokenizer
from engine.text.files import has_tokenizer
from engine.worker.build import build_worker
from engine.worker.profiler import TorchTrace
from engine.worker.ranks import Ranks
from kernels.cpu.library import best, tiling
from kernels.fp8 import PRODUCTS
from kernels.jit import installed

STEP_TOKENS = 512
CACHE_SHARE = 0.5  # default KV cache size as a share of free memory
CACHE_BYTES = 2 << 30  # upper limit of that default, unless one request of full length needs more; pages are zeroed


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with images or videos, as the model's processor returns it."""

    ids: tuple[int, ...]  # with a placeholder for each embedding
    media: tuple[MediaItem, ...]


@dataclass(frozen=True)
class AudioPrompt:
    """Prompt of a speech model: a window of audio, and the first tokens of the reply."""

    spectrogram: Samples  # [mels, frames], from `engine.media.spectrogram.log_mel`
    ids: tuple[int, ...] = ()  # empty for the tokens that the checkpoint names


Prompt = str | Sequence[int] | MediaPrompt | AudioPrompt


class Params(Sampling, frozen=True, kw_only=True):
    """Parameters of `generate`: `Sampling` and the conditions to stop. Raises RequestError for a value that HTTP would
    refuse, with the same message."""

    seed: int | None = None  # type: ignore[assignment]  # default: random for each request
    max_tokens: int = 16
    stop: tuple[str, ...] = ()  # stop strings; a single string is allowed
    include_stop: bool = False  # keep the stop string in the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    adapter: str = ""  # name of a LoRA adapter; empty: the base model

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        msgspec.structs.force_setattr(self, "stop", stops)
        check_params(self)

    def sampling(self) -> Sampling:
        values = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        return Sampling(
            **{
                **values,
                "seed": secrets.randbits(63) if self.seed is None else self.seed,
                "temperature": effective_temperature(self.temperature),
                "top_k": effective_top_k(self.top_k),
                "logit_bias": {token: effective_bias(bias) for token, bias in self.logit_bias.items()},
            }
        )


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("top_k", "max_tokens", "min_tokens")
OPTIONAL = ("seed", "logprobs", "prompt_logprobs")


def check_params(params: Params) -> None:
    """Raise RequestError for the first value that has a wrong type or is out of range."""
    for name in (*NUMBERS, *INTEGERS, *OPTIONAL):
        value = getattr(params, name)
        if value is not None or name not in OPTIONAL:
            check_number(name, value, whole=name not in NUMBERS)
    effective_temperature(params.temperature)
    effective_top_k(params.top_k)
    check_truncation(params.top_p, params.min_p)
    check_repetition(params.repetition_penalty)
    check_penalty("presence_penalty", params.presence_penalty)
    check_penalty("frequency_penalty", params.frequency_penalty)
    check_max_tokens(params.max_tokens)
    check_lengths(params.min_tokens, params.max_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None:
            check_logprobs(name, count)
    if params.seed is not None:
        check_seed(params.seed)
    for token, bias in params.logit_bias.items():
        check_number("logit_bias", token, whole=True)
        check_number("logit_bias", bias)
    check_stop(params.stop)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise RequestError("allowed_token_ids is not None and empty!", "allowed_token_ids")


@dataclass
class Generation:
    """Result of one prompt."""

    prompt_ids: tuple[int, ...]
    text: str = ""  # stays "" for a checkpoint without a tokenizer
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)  # one for each id, if requested
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    routes: list[bytes] = field(default_factory=list)
    """Experts of each token of prompt and reply but the last, if requested: uint16 numbers, layer after layer."""
    alignment: Alignment | None = None  # if requested
    finish: Finish | None = None
    stop_reason: int | str | None = None  # stop string or stop token that ended the reply
    error: str | None = None  # message, if finish is "error"
    timing: Timing | None = None


class _Reply:
    """Builds the Generation of one request from its deltas."""

    def __init__(self, submit: Submit, params: Params, tokenizer: Tokenizer | None, store: MetricStore) -> None:
        prompt_ids = submit.prompt
        self.generation = Generation(prompt_ids)
        self._decoder = tokenizer and IncrementalDecoder(
            tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, include=params.include_stop, min_tokens=params.min_tokens)
        self._ends = {*submit.stop_token_ids, *(() if submit.ignore_eos else submit.eos_token_ids)}
        self.stopped = False
        self.pooled: Pooled | None = None
        self._submit, self._metrics, self._is_started = submit, SequenceMetrics(store, time.monotonic()), False

    def take(self, delta: Delta) -> bool:
        """Add a delta. Return True if it completed a stop string while the engine is still generating."""
        made = self.generation
        made.timing = delta.timing or made.timing
        self.pooled = delta.pooled or self.pooled
        if self.stopped:
            return False
        self._count(delta)
        if delta.prompt_logprobs is not None:
            made.prompt_logprobs = delta.prompt_logprobs
        made.routes += delta.routes
        made.alignment = delta.alignment or made.alignment
        for index, token in enumerate(delta.ids):
            made.ids.append(token)
            made.logprobs += delta.logprobs[index : index + 1]
            if self._decoder is None:
                continue
            # An end token is part of the ids but not of the text. The last token of a grammar is part of both.
            last = delta.finish == "stop" and index == len(delta.ids) - 1 and token in self._ends
            found = self._stops.push("" if last else self._decoder.push(token))
            made.text += found.text
            if found.stop is not None:
                made.finish, made.stop_reason, self.stopped = "stop", found.stop, True
                self._count_end("stop")
                return delta.finish is None
        if delta.finish is not None:
            self._count_end(delta.finish)
            made.text += self._stops.flush()
            made.finish, made.stop_reason = delta.finish, delta.stop_reason
        return False

    def _count(self, delta: Delta) -> None:
        """Count a delta, as the gateway does."""
        if not self._is_started and (delta.ids or delta.pooled is not None or delta.prompt_logprobs is not None):
            self._is_started = True
            cached = self.generation.timing.cached_tokens if self.generation.timing else 0
            self._metrics.prompt(len(self._submit.prompt), cached)
        if delta.ids:
            self._metrics.gain(len(delta.ids), time.monotonic(), is_first=not self.generation.ids)
        if delta.pooled is not None:
            self._metrics.pooled(time.monotonic())

    def _count_end(self, finish: Finish) -> None:
        submit, made = self._submit, self.generation
        self._metrics.end(finish, len(made.ids), submit.max_tokens, adapter=submit.adapter, timing=made.timing)

    @property
    def step_tokens(self) -> int:
        """Prompt tokens that no step has counted yet."""
        return 0 if self._is_started else len(self._submit.prompt)


class LLM:
    """A loaded checkpoint. Use it as a context manager, or call `close`. `generate` is not thread-safe across calls:
    calls from several threads run one after another.

    `overrides`: the arguments in engine/arguments.py; `adapters` is {name: folder}. Defaults follow from the checkpoint
    and the machine."""

    def __init__(self, path: str | Path, **overrides: Any) -> None:
        self._messages: SimpleQueue[list[FromEngine] | Exception] = SimpleQueue()
        with python_names():
            self.config, checkpoint = _config(Path(path), overrides)
            ranks = Ranks(self.config, self._messages.put) if self.config.parallelism.tensor > 1 else None
            self._worker = build_worker(self.config, lambda phase, fraction: None, ranks=ranks)
        self.vocab = checkpoint.model.embed.vocab
        self._eos = tuple(token for token in checkpoint.eos_token_ids if token < self.vocab)
        self._begins = checkpoint.begin_ids
        folder = checkpoint.path
        self.tokenizer = Tokenizer(folder) if has_tokenizer(folder) else None
        self._loop = build_loop(
            self.config,
            self._worker,
            self._messages.put,
            lambda compiled: compiler_for(self.config.model.path, self.vocab, compiled),
            trace=TorchTrace(self._worker.call) if self.config.observability.profiler_folder else None,
        )
        observed = self.config.observability
        self._metrics = new_store(
            self.config.model.max_context,
            speculates=self.config.speculation.enabled,
            costs=observed.step_costs is not None,
        )
        self._metrics.set("engine_up", 1, ENGINE)
        self._numbers = itertools.count()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.stats = Stats()

    def get_metrics(self) -> list[MetricValue]:
        """Return all metrics since the start, with the names and values of `/metrics` of a service."""
        with self._busy:
            self._read_stats()
        return self.read_metrics()

    def read_metrics(self) -> list[MetricValue]:
        """Return all metrics, as of the last report of the scheduler."""
        return read(self._metrics, Path(self.config.model.path).name)

    def _read_stats(self) -> None:
        """Wait for the current counters of the scheduler."""
        self._loop.post([Control("stats")])
        while not any(isinstance(message, Stats) for message in self._received()):
            pass

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sampling | Sequence[Params | Sampling] | None = None
    ) -> list[Generation]:
        """Return one Generation per prompt, in order.

        A prompt is text or token ids, with media in a `MediaPrompt`; with an encoder-decoder model it is the encoder
        input. `params` is one value for
        all prompts, or one each. Raises RequestError for an invalid request; the others are aborted then."""
        each = _each_prompt(prompts)
        wanted = _each_params(params, len(each))
        with self._busy:
            replies: dict[str, _Reply] = {}
            submits = []
            for prompt, one in zip(each, wanted, strict=True):
                submit, reply = self._submit(prompt, one)
                submits.append(submit)
                replies[submit.id] = reply
            self._loop.post(list(submits))
            self._collect(replies)
        return [reply.generation for reply in replies.values()]

    def pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling,
        segments: Sequence[tuple[int, ...]] | None = None,
        adapter: str = "",
    ) -> list[np.ndarray]:
        """Return the vectors of each prompt, in order: float32 of [size], or of [tokens, size] for per-token tasks.

        segments: lengths of the segments of each prompt. Raises RequestError for an invalid request, or for one whose
        output is not finite."""
        each = _each_prompt(prompts)
        cuts = segments or [()] * len(each)
        replies: dict[str, _Reply] = {}
        with self._busy:
            submits = []
            for prompt, cut in zip(each, cuts, strict=True):
                submit, reply = self._submit(prompt, Params(temperature=0.0, seed=0, adapter=adapter))
                submit = msgspec.structs.replace(submit, max_tokens=0, pooling=pooling, segments=cut, eos_token_ids=())
                submits.append(submit)
                replies[submit.id] = reply
            self._loop.post(list(submits))
            self._collect(replies)
        return [_array(reply) for reply in replies.values()]

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamParams) -> list[list[Beam]]:
        """Return the best continuations of each prompt, the best first. The text of a beam has no end token."""
        ids = [self._submit(prompt, Params())[0].prompt for prompt in _each_prompt(prompts)]
        ends = frozenset(self._eos)

        def extend(prompts: Sequence[tuple[int, ...]], count: int) -> list[Logprob]:
            params = Params(temperature=0.0, max_tokens=1, logprobs=min(count, self.vocab), ignore_eos=True)
            return [reply.logprobs[0] for reply in self.generate(list(prompts), params)]

        found = beam_search(ids, params, ends, extend)
        if self.tokenizer is None:
            return found
        decode = self.tokenizer.decode
        return [
            [with_text(beam, decode(list(beam.ids[:-1] if beam.finished else beam.ids))) for beam in beams]
            for beams in found
        ]

    def load_adapter(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter. It needs slots: `LLM(path, max_active=2)`. `replace`: read the files of a loaded adapter
        again. Raises ConfigError for an adapter that cannot be loaded."""
        self._change_adapter(LoadAdapter(name, str(folder), replace))

    def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter."""
        self._change_adapter(UnloadAdapter(name))

    def _change_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        with self._busy:
            self._loop.post([message])
            while True:
                for one in self._received():
                    if isinstance(one, AdapterChanged):
                        if one.error:
                            with python_names():
                                raise ConfigError(one.error)
                        return

    def start_profile(self) -> None:
        """Record operations and steps until `stop_profile`. Needs `LLM(path, profiler=FOLDER)`."""
        self._profile("start")

    def stop_profile(self) -> tuple[Path, ...]:
        """Write the files of the profile and return their paths."""
        return tuple(map(Path, self._profile("stop").files))

    def _profile(self, verb: Literal["start", "stop"]) -> Profiled:
        with self._busy:
            self._loop.post([Profile(verb)])
            while True:
                for one in self._received():
                    if isinstance(one, Profiled):
                        if one.error:
                            with python_names():
                                raise ConfigError(one.error)
                        return one

    def close(self) -> None:
        self._loop.stop()
        self._thread.join()
        self._worker.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run()
            self._messages.put(EngineGone("this LLM was closed"))
        except Exception as error:
            self._messages.put(error)

    def _submit(self, prompt: Prompt, params: Params, id: str | None = None) -> tuple[Submit, _Reply]:
        media: tuple[MediaItem, ...] = ()
        if isinstance(prompt, MediaPrompt):
            prompt, media = prompt.ids, prompt.media
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{self.config.model.path} has no tokenizer; give prompts as token ids", "prompt")
            prompt = self.tokenizer.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestError(f"{self.config.model.path} has no tokenizer; `stop` strings need one", "stop")
        begins = self._begins
        if isinstance(prompt, AudioPrompt):
            media, begins = (spectrogram_item(prompt.spectrogram),), prompt.ids or begins
            prompt = (0,) * (prompt.spectrogram.shape[1] // 2)
        ids = tuple(prompt)
        submit = Submit(
            str(next(self._numbers)) if id is None else id,
            (*ids, *begins),
            params.sampling(),
            0 if params.alignment is not None else params.max_tokens,  # the prompt is aligned, without a reply
            eos_token_ids=self._eos,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            grammar=params.grammar,
            thinking=params.thinking,
            source=len(ids) if self._begins else 0,
            adapter=params.adapter,
            media=media,
        )
        return submit, _Reply(submit, params, self.tokenizer, self._metrics)

    def _collect(self, replies: dict[str, _Reply]) -> None:
        """Wait until every request has ended. If one is refused, all end."""
        open_ids = set(replies)
        try:
            while open_ids:
                got = self._received()
                failed = {message.id: message for message in got if isinstance(message, Failed)}
                for message in got:
                    if isinstance(message, Output):
                        open_ids -= self._take(message, replies, failed)
                for refused in open_ids & failed.keys():
                    with python_names():
                        raise RequestError(failed[refused].message, failed[refused].param)
        finally:
            if open_ids:
                self._loop.post([Abort(tuple(open_ids))])

    def _received(self) -> list[FromEngine]:
        got = self._messages.get()
        if isinstance(got, Exception):
            self._messages.put(got)  # for the next call
            raise EngineGone(f"the engine is not running: {type(got).__name__}: {got}") from got
        for message in got:
            if isinstance(message, Stats):
                self.stats = message
                self._metrics.stats(0, message)
        return got

    def _take(self, output: Output, replies: dict[str, _Reply], failed: Mapping[str | None, Failed]) -> set[str]:
        """Distribute deltas. Return the ids of requests that ended. Deltas of aborted earlier requests are ignored."""
        ended, tokens = set(), 0
        for delta in output.deltas:
            reply = replies.get(delta.id)
            if reply is None:
                continue
            if delta.ids:
                tokens += reply.step_tokens + len(delta.ids)
            if reply.take(delta):
                self._loop.post([Abort((delta.id,))])
            if delta.finish is not None:
                ended.add(delta.id)
            if delta.finish == "error" and delta.id in failed:
                reply.generation.error = failed[delta.id].message
        if tokens:
            self._metrics.observe("iteration_tokens", tokens, ENGINE)
        return ended


def _array(reply: _Reply) -> np.ndarray:
    pooled = reply.pooled
    if pooled is None:
        raise RequestError(reply.generation.error or "the engine returned no vector", "prompt")
    return np.frombuffer(pooled.values, "<f4").reshape(pooled.shape)


def _each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | MediaPrompt | AudioPrompt):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        raise RequestError("prompts must be a text, a list of texts, or a list of lists of token ids", "prompt")
    return list(prompts)  # type: ignore[arg-type]  # the first element is not an id


def _each_params(params: Params | Sampling | Sequence[Params | Sampling] | None, count: int) -> list[Params]:
    if params is None:
        params = Params()
    if isinstance(params, Sampling):
        return [_params(params)] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} params for {count} prompts; pass one for all prompts, or one per prompt", "params"
        )
    return [_params(one) for one in params]


def as_params(given: Params | Sampling | None) -> Params:
    """Return parameters as `Params`, with the defaults for None."""
    return Params() if given is None else _params(given)


def _params(given: Params | Sampling) -> Params:
    if isinstance(given, Params):
        return given
    return Params(**{name: getattr(given, name) for name in Sampling.__struct_fields__})


def _config(path: Path, overrides: dict[str, Any]) -> tuple[EngineConfig, Checkpoint]:
    """Build the configuration with defaults from the checkpoint and the machine, and return the checkpoint too. Raises
    ConfigError for an unknown field."""
    unknown = overrides.keys() - ARGUMENTS.keys()
    if unknown:
        raise ConfigError(f"{', '.join(sorted(unknown))}: unknown argument; allowed are {', '.join(ARGUMENTS)}")
    task = overrides.get("task", TaskConfig())
    checkpoint = drafting = read_checkpoint(path, overrides.get("trust_remote_code", False), task=task)
    device = overrides.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = overrides.get("dtype") or ("float32" if device == "cpu" else checkpoint.dtype)
    kernels = overrides.get("kernels") or _kernels(device, dtype, checkpoint.model)
    defaults = {
        "model": str(checkpoint.path),
        "device": device,
        "dtype": dtype,
        "kv_bytes": 1,
        "max_context": checkpoint.model.max_context,
        "threads": torch.get_num_threads(),
        "kernels": kernels,
        "max_step_tokens": _step_tokens(checkpoint.model, overrides),
    }
    config = engine_config(**{**defaults, **overrides, "adapters": _adapters(overrides.get("adapters", {}))})
    defaulted = {"kv_dtype", "kv_bytes", "max_context"} - overrides.keys()
    if defaulted:
        drafting = _with_draft(config, checkpoint)
    if "kv_dtype" in defaulted:
        pages = _kv_dtype(drafting, device, dtype, kernels, overrides.get("weights", "stored"))
        config = with_values(config, {"quantization.kv_cache": pages})
    if "kv_bytes" not in overrides:
        config = with_values(config, {"memory.kv_cache": _cache_bytes(config, drafting)})
    if "max_context" not in overrides:
        config = with_values(config, {"model.max_context": _longest(config, drafting)})
    return config, checkpoint


def _adapters(folders: Mapping[str, str | Path]) -> tuple[AdapterConfig, ...]:
    if not isinstance(folders, Mapping):
        raise ConfigError(f"adapters={folders!r}: must be a mapping of names to folders")
    return tuple(AdapterConfig(name=name, path=str(folder)) for name, folder in folders.items())


def _kernels(device: str, dtype: str, model: Model) -> str:
    if model.foreign is not None:
        return "torch"
    if device == "cuda":
        return "triton" if installed() and model.audio is None else "torch"
    return best() if dtype == "float32" else "torch"


def _kv_dtype(checkpoint: Checkpoint, device: str, dtype: str, kernels: str, weights: str) -> str:
    """Return the default type of the pages, as `slipway plan` resolves it."""
    if stated := _stated_pages(checkpoint, device, kernels):
        return stated
    if device != "cpu" or dtype != "float32" or kernels == "triton":
        return dtype
    own = checkpoint.quantization
    held = kernels != "torch" and bool(native_paths(checkpoint.model, own, "compiled"))
    float16_scales = own is not None and own.float16_pages
    quantized = weights in load_formats("compiled") or held
    return cpu_kv_dtype(checkpoint.dtype, quantized=quantized, float16_scales=float16_scales)


def _stated_pages(checkpoint: Checkpoint, device: str, kernels: str) -> str:
    """Return the format that a checkpoint states for its KV cache, if these kernels have it for this model and those
    that draft, else ""."""
    model = checkpoint.model
    models = (model, *(draft.model for draft in checkpoint.drafts))
    stated = stated_format(checkpoint.path, checkpoint.config, model, checkpoint.tensors)
    if stated not in KNOWN or any(isinstance(part, LatentAttention) for one in models for part in attentions(one)):
        return ""
    if stated == "fp8":
        capable = device != "cuda" or torch.cuda.get_device_capability() >= PRODUCTS
        return stated if kernels == "triton" and capable else ""
    shapes = [{page_shape(part)[1:] for part in (*page_writers(one), *attentions(one))} for one in models]
    sizes = [size for own in shapes for _, size in own]
    divided = (stated, kernels == "triton") == ("int8", False) or all(size % 4 == 0 for size in sizes)
    return stated if model.foreign is None and all(len(own) <= 1 for own in shapes) and divided else ""


def _step_tokens(model: Model, overrides: Mapping[str, Any]) -> int:
    """Return the maximum tokens per step. A bidirectional prompt must fit into one step. An encoder input, and tokens
    of media that attend to one another, must fit together with one token of every running request."""
    context = overrides.get("max_context", model.max_context)
    if model.encoder is not None:
        return max(STEP_TOKENS, min(model.max_encoder_input, context) + overrides.get("max_running", MAX_RUNNING))
    if model.encoder_only:
        return STEP_TOKENS
    if is_bidirectional(model):
        return max(STEP_TOKENS, context)
    together = min(bidirectional_tokens(model.media), context)
    return max(STEP_TOKENS, together + overrides.get("max_running", MAX_RUNNING)) if together else STEP_TOKENS


def _cache_bytes(config: EngineConfig, checkpoint: Checkpoint) -> int:
    form = _form(config, checkpoint)
    if not form.groups:
        return 0
    one = (form.blocks_for(config.model.max_context, config.scheduling.max_step_tokens) + 1) * form.block_bytes
    holder = Holder(
        dtype=config.model.dtype,
        device=config.hardware.device,
        tiling=tiling(config.hardware.kernels, bf16=config.hardware.matmul_precision == "bfloat16"),
        bits=config.quantization.weights,
        group=config.quantization.group_size,
        head=config.quantization.head,
        embedding=config.quantization.embedding,
        triton=config.hardware.kernels == "triton",
    )
    weights = weight_bytes(checkpoint.model, checkpoint.tensors, checkpoint.quantization, holder)
    for number, draft in enumerate(checkpoint.drafts):
        of_draft = replace(holder, shares_tables=number > 0 or config.parallelism.tensor == 1)
        weights += weight_bytes(draft.model, draft.tensors, draft.quantization, of_draft)
    # On a CPU, all ranks share the same memory.
    sharing = config.parallelism.tensor if config.hardware.device == "cpu" else 1
    free = max(0, free_memory(config.hardware.device) - sharing * weights) // sharing
    return max(1, min(int(free * CACHE_SHARE), max(one, CACHE_BYTES), one * config.scheduling.max_running))


def _longest(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Return the model's maximum context, or the part of it that fits into the KV cache."""
    form = _form(config, checkpoint)
    return max(
        1,
        min(
            config.model.max_context,
            form.tokens_in(form.blocks(config.memory.kv_cache) - 1, config.scheduling.max_step_tokens),
        ),
    )


def _form(config: EngineConfig, checkpoint: Checkpoint) -> Layout:
    """Return the layout of the pages, including those of a draft model."""
    own = _own_form(config, checkpoint.model, config.parallelism.tensor)
    return with_draft_pages(own, [_own_form(config, draft.model, 1) for draft in checkpoint.drafts])


def _with_draft(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its draft model or prediction head, if the configuration has one."""
    own = config.speculation
    return with_drafts(checkpoint, own.method, own.model, tokens=own.tokens)


def _own_form(config: EngineConfig, model: Model, ranks: int) -> Layout:
    return layout(
        model,
        block_tokens=config.cache.block_tokens,
        **page_sizes(config.quantization.kv_cache),
        ranks=ranks,
    )


def free_memory(device: str) -> int:
    """Return the bytes that this process could still allocate."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free
