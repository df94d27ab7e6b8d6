"""Sampling parameters by slot of the request table: written once when a request enters, read by every step.

Common parameters are numpy columns. Rare ones are stored only for slots that use them, so that a step can determine the
stages it needs in microseconds.
"""

from dataclasses import dataclass

import numpy as np

from engine.api.messages import AlignmentOptions, Sampling, SpeechRules

GREEDY_BELOW = 1e-5  # lower temperatures are greedy
LOWEST_TEMPERATURE = 0.01  # others are raised to this, so that logits / temperature does not overflow float32


@dataclass(frozen=True)
class Words:
    """Banned words of one request. A one-token word has an empty prefix."""

    prefixes: np.ndarray  # [words, longest prefix] int64, right-aligned, -1 in front
    lasts: np.ndarray  # [words] int64


@dataclass(frozen=True)
class LogprobRequest:
    """Requested logprobs of one request."""

    top: int  # number of most likely tokens; -1: the entire vocabulary
    processed: bool
    ids: tuple[int, ...] = ()  # these tokens instead


class Columns:
    """Parameters with one row per slot. `vocab`: number of logits."""

    def __init__(self, slots: int, vocab: int) -> None:
        self.vocab = vocab
        self.temperature = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self.seed = np.zeros(slots, np.uint64)
        self.repetition = np.ones(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.prompt_tokens = np.zeros(slots, np.int64)
        self.min_tokens = np.zeros(slots, np.int64)
        self.stop_ids: dict[int, np.ndarray] = {}  # only for slots with min_tokens
        self.allowed: dict[int, np.ndarray] = {}
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.bad_words: dict[int, Words] = {}
        self.logprobs: dict[int, LogprobRequest] = {}
        self.prompt_logprobs: dict[int, int] = {}
        self.speech: dict[int, SpeechRules] = {}
        self.alignment: dict[int, AlignmentOptions] = {}
        self.routed: set[int] = set()  # slots that return the selected experts
        self._allowed_bits: dict[int, np.ndarray] = {}

    @property
    def arrays(self) -> list[np.ndarray]:
        """The dense columns."""
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def write(self, slot: int, sampling: Sampling, *, prompt_tokens: int, stop_ids: tuple[int, ...]) -> None:
        """Set the parameters of a slot, replacing those of the previous request."""
        self.clear(slot)
        self.temperature[slot] = _temperature(sampling.temperature)
        self.top_k[slot] = sampling.top_k if 0 < sampling.top_k < self.vocab else 0
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.repetition[slot] = sampling.repetition_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        self.prompt_tokens[slot] = prompt_tokens
        self.min_tokens[slot] = sampling.min_tokens
        if sampling.min_tokens and stop_ids:
            # A checkpoint may name end tokens beyond its vocabulary; these are never sampled.
            self.stop_ids[slot] = np.array([i for i in stop_ids if i < self.vocab], np.int64)
        if sampling.allowed_token_ids is not None:
            self.allowed[slot] = np.array(sampling.allowed_token_ids, np.int64)
        if sampling.logit_bias:
            ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
            self.bias[slot] = ids, np.fromiter(sampling.logit_bias.values(), np.float32)
        if sampling.bad_words:
            self.bad_words[slot] = _words(sampling.bad_words)
        if sampling.logprobs is not None:
            top = 0 if sampling.logprob_ids else sampling.logprobs
            self.logprobs[slot] = LogprobRequest(top, sampling.logprobs_mode == "processed", sampling.logprob_ids)
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = sampling.prompt_logprobs
        if sampling.speech is not None:
            self.speech[slot] = sampling.speech
        if sampling.alignment is not None:
            self.alignment[slot] = sampling.alignment
        if sampling.return_routed_experts:
            self.routed.add(slot)

    def clear(self, slot: int) -> None:
        for sparse in (self.stop_ids, self.allowed, self.bias, self.bad_words, self.logprobs, self.prompt_logprobs):
            sparse.pop(slot, None)
        self.speech.pop(slot, None)
        self.alignment.pop(slot, None)
        self.routed.discard(slot)
        self._allowed_bits.pop(slot, None)

    def allowed_bits(self, slot: int) -> np.ndarray:
        """Return `allowed` of a slot as the words of a mask, computed on first use."""
        if slot not in self._allowed_bits:
            self._allowed_bits[slot] = as_bits(self.allowed[slot], self.vocab)
        return self._allowed_bits[slot]


def as_bits(ids: np.ndarray, vocab: int) -> np.ndarray:
    """Return token ids as the words of a mask, [ceil(vocab / 32)] uint32."""
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _temperature(value: float) -> float:
    return 0.0 if value < GREEDY_BELOW else max(value, LOWEST_TEMPERATURE)


def _words(words: tuple[tuple[int, ...], ...]) -> Words:
    longest = max(len(word) for word in words) - 1
    prefixes = np.full((len(words), longest), -1, np.int64)
    for index, word in enumerate(words):
        if len(word) > 1:
            prefixes[index, longest - len(word) + 1 :] = word[:-1]
    return Words(prefixes, np.array([word[-1] for word in words], np.int64))
