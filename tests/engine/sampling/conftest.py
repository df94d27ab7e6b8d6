"""Reference implementation of the sampling stages, row by row in float64 numpy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from engine.api.messages import Sampling
from engine.sampling.columns import Columns
from engine.sampling.noise import Noise
from engine.sampling.pipeline import Prepared, Sampled
from engine.sampling.rows import Rows
from kernels.cpu.library import best
from kernels.cpu.program import Team

MAX_CONTEXT = 40


@dataclass(frozen=True)
class Request:
    """A row of a test: its sampling parameters and the tokens so far."""

    sampling: Sampling
    prompt: tuple[int, ...] = (1, 2)
    reply: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    mask: np.ndarray | None = None  # [vocab] bool


def stage_allowed(x: np.ndarray, request: Request) -> np.ndarray:
    chosen = request.sampling.allowed_token_ids
    return x if chosen is None else np.where(np.isin(np.arange(len(x)), chosen), x, -np.inf)


def stage_bias(x: np.ndarray, request: Request) -> np.ndarray:
    x = x.copy()
    for token, value in request.sampling.logit_bias.items():
        x[token] += value
    return x


def stage_min_tokens(x: np.ndarray, request: Request) -> np.ndarray:
    if len(request.reply) >= request.sampling.min_tokens:
        return x
    masked = x.copy()
    masked[[i for i in request.stop_ids if i < len(x)]] = -np.inf
    return x if np.isneginf(masked).all() else masked


def stage_repetition(x: np.ndarray, request: Request) -> np.ndarray:
    x, r = x.copy(), request.sampling.repetition_penalty
    for token in set(request.prompt + request.reply):
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    return x


def stage_reply(x: np.ndarray, request: Request) -> np.ndarray:
    x = x.copy()
    for token in set(request.reply):
        x[token] -= request.sampling.frequency_penalty * request.reply.count(token)
        x[token] -= request.sampling.presence_penalty
    return x


def stage_bad_words(x: np.ndarray, request: Request) -> np.ndarray:
    x = x.copy()
    for word in request.sampling.bad_words:
        before = word[:-1]
        if len(before) <= len(request.reply) and request.reply[len(request.reply) - len(before) :] == before:
            x[word[-1]] = -np.inf
    return x


def stage_temperature(x: np.ndarray, request: Request) -> np.ndarray:
    t = request.sampling.temperature
    return x if t < 1e-5 else x / max(t, 0.01)


def _best_first(x: np.ndarray) -> np.ndarray:
    return np.argsort(-x, kind="stable")


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def _keep(x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(np.isin(np.arange(len(x)), kept), x, -np.inf)


def cut_min_p(x: np.ndarray, request: Request) -> np.ndarray:
    p = _softmax(x)
    return np.where(p >= request.sampling.min_p * p.max(), x, -np.inf)


def cut_top_k(x: np.ndarray, request: Request) -> np.ndarray:
    k = request.sampling.top_k
    return x if k < 1 else _keep(x, _best_first(x)[:k])


def cut_top_p(x: np.ndarray, request: Request) -> np.ndarray:
    if request.sampling.top_p >= 1:
        return x
    order = _best_first(x)
    reached = np.cumsum(_softmax(x)[order]) >= request.sampling.top_p
    return _keep(x, order[: int(np.argmax(reached)) + 1] if reached.any() else order)


LOGIT_PROCESSORS = (
    stage_allowed,
    stage_bias,
    stage_min_tokens,
    stage_repetition,
    stage_reply,
    stage_bad_words,
    stage_temperature,
)
TRUNCATION = (cut_min_p, cut_top_k, cut_top_p)


@dataclass(frozen=True)
class Reference:
    """Logits of a row, float64; the draw comes from softmax(processed), or is its argmax if greedy."""

    raw: np.ndarray
    processed: np.ndarray


def reference(logits: np.ndarray, request: Request) -> Reference:
    x = logits.astype(np.float64)
    if request.mask is not None:
        x = np.where(request.mask, x, -np.inf)
    raw = x
    stages = LOGIT_PROCESSORS if request.sampling.temperature < 1e-5 else LOGIT_PROCESSORS + TRUNCATION
    for stage in stages:
        x = stage(x, request)
    return Reference(raw, x)


def pack(mask: np.ndarray) -> np.ndarray:
    words = np.zeros(-(-len(mask) // 32) * 4, np.uint8)
    bits = np.packbits(mask, bitorder="little")
    words[: len(bits)] = bits
    return words.view(np.uint32)


class Bench:
    """Puts requests into the slots of a table and samples them, in one batch. Slots are reused from call to call."""

    def __init__(self, vocab: int, slots: int = 64, team: Team | None = None) -> None:
        self.vocab = vocab
        self.columns = Columns(slots, vocab)
        self.tokens = np.full((slots, MAX_CONTEXT), vocab - 1, np.int32)  # stale tokens of earlier requests
        self.noise = Noise(vocab, torch.device("cpu"), team)

    def rows(self, requests: Sequence[Request], slots: Sequence[int] | None = None) -> Rows:
        slots = list(range(len(requests))) if slots is None else list(slots)
        for slot, request in zip(slots, requests, strict=True):
            known = request.prompt + request.reply
            self.tokens[slot, : len(known)] = known
            self.columns.write(slot, request.sampling, prompt_tokens=len(request.prompt), stop_ids=request.stop_ids)
        return Rows(
            np.array(slots, np.int64),
            np.array([len(request.prompt + request.reply) for request in requests], np.int64),
            self.columns,
            self.tokens,
            {i: pack(request.mask) for i, request in enumerate(requests) if request.mask is not None},
        )

    def sample(self, logits: np.ndarray, requests: Sequence[Request], slots: Sequence[int] | None = None) -> Sampled:
        prepared = Prepared(self.rows(requests, slots), self.noise)
        return prepared.finish(torch.from_numpy(logits.astype(np.float32).copy()))


@pytest.fixture(scope="session", params=["torch", best()])
def some_team(request: pytest.FixtureRequest) -> Iterator[Team | None]:
    """torch, and the compiled kernels for this CPU."""
    team = Team(request.param, 3) if request.param != "torch" else None
    yield team
    if team is not None:
        team.close()


@pytest.fixture
def bench(some_team: Team | None) -> Callable[..., Bench]:
    return partial(Bench, team=some_team)


@pytest.fixture
def request_of() -> type[Request]:
    return Request


@pytest.fixture
def oracle() -> Callable[[np.ndarray, Request], Reference]:
    return reference


@pytest.fixture
def softmax() -> Callable[[np.ndarray], np.ndarray]:
    return _softmax
