"""Compile grammars to matchers with llguidance (https://github.com/guidance-ai/llguidance), for one model's vocabulary.

A matcher follows one sequence: `mask` returns the allowed next tokens, `advance` consumes the sampled one. End tokens
belong to the request and not to the language: they are allowed exactly when the language accepts the text so far.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, Final

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from engine.api.errors import CheckpointError, RequestError
from engine.api.messages import Grammar, Thinking
from engine.structured.definition import LIMITS, PARAM, definition, reason
from engine.structured.thinking import Budget
from engine.structured.vocabulary import read_vocabulary
from engine.text import Tokenizer

Mask = NDArray[np.uint32]

MAX_CACHED: Final = 256  # compiled grammars that are kept, most recently used ones
MAX_CACHED_BYTES: Final = 8 << 20  # limit of their source size; compiled, they take about fifty times as much
THREADS: Final = 2  # compiler threads, so that one long compilation does not block the others
_STACK: Final = 64 << 20  # bytes; compilers are recursive
_WORD_BITS: Final = 32


class Matcher:
    """State of one sequence in its language. Must be used by one thread at a time."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab: int,
        end_ids: frozenset[int],
        encode: Callable[[str], list[int]] = lambda text: [],
    ) -> None:
        """encode: tokenizes text that the language forces."""
        self.matcher = matcher
        self._encode = encode
        self.vocab = vocab
        self._words = -(-vocab // _WORD_BITS)
        self._end_ids = end_ids
        self._places, self._bits = _bits(token for token in end_ids if token < vocab)
        self._last = np.uint32((1 << (vocab % _WORD_BITS or _WORD_BITS)) - 1)
        self._ended = False

    @property
    def free(self) -> int:
        """Number of first tokens that need no mask: always 0."""
        return 0

    @property
    def finished(self) -> bool:
        """Whether an end token was consumed, or only an end token may follow."""
        return self._ended or bool(self.matcher.is_stopped())

    def mask(self) -> Mask:
        """Return the allowed next tokens: bit i % 32 of word i // 32. The caller owns the array. Raises RequestError if
        no token is allowed."""
        (mask,) = fill([self])
        if isinstance(mask, RequestError):
            raise mask
        return mask

    def mask_or_error(self, row: Mask) -> Mask | RequestError:
        """Convert a row filled by llguidance to a mask: remove the vocabulary's end token, and add the request's end
        tokens where the reply may end. A stop token that is text and the only option stays allowed; it ends the
        reply."""
        if self.matcher.is_error():
            return RequestError(f"the grammar cannot continue: {_reason(self.matcher.get_error())}", PARAM)
        mask = row[: self._words]
        mask[-1] &= self._last
        text = mask[self._places] & self._bits
        if len(self._places):
            mask[self._places] &= ~self._bits
            if self.finished or self.matcher.is_accepting():
                mask[self._places] |= self._bits
        if not mask.any():
            mask[self._places] |= text
        if not mask.any():
            return RequestError("no token of this model's vocabulary fits the grammar here", PARAM)
        return mask

    def fork(self) -> "Matcher":
        """Return an independent copy."""
        copied = copy(self)
        copied.matcher = self.matcher.deep_copy()
        return copied

    def forced(self) -> tuple[int, ...]:
        """Return the usual tokens of the text that must follow. Others with the same text are allowed as well."""
        if self.finished:
            return ()
        text = self.matcher.compute_ff_bytes().decode("utf-8", "ignore")
        return tuple(self._encode(text)) if text else ()

    def advance(self, token: int) -> None:
        """Consume the sampled token. Raises RequestError if the language does not allow it."""
        if token in self._end_ids and (self.finished or self.matcher.is_accepting()):
            self._ended = True
            return
        if self.finished or not self.matcher.consume_token(token):
            if self.matcher.is_error():
                raise RequestError(f"the grammar cannot continue: {_reason(self.matcher.get_error())}", PARAM)
            raise RequestError(f"token {token} does not fit the grammar here", PARAM)


def fill(matchers: Sequence[Matcher], executor: LLExecutor | None = None) -> list[Mask | RequestError]:
    """Return the mask of each sequence, or the error if no token is allowed. The rows are in one new array. With an
    executor, llguidance releases the interpreter lock once for all of them."""
    if not matchers:
        return []
    width = matchers[0].vocab // _WORD_BITS + 1  # including the vocabulary's end token, which may need another word
    rows = np.zeros((len(matchers), width), np.uint32)
    asked = [(each.matcher, number) for number, each in enumerate(matchers) if not each.finished]
    size = width * 4
    if executor is not None and len(asked) > 1:
        executor.unsafe_compute_mask_ptr(asked, rows.ctypes.data, size, len(matchers))
    else:
        for matcher, number in asked:
            matcher.unsafe_compute_mask_ptr(rows.ctypes.data + number * size, size)
    return [each.mask_or_error(row) for each, row in zip(matchers, rows, strict=True)]


class Compiler:
    """Compiles grammars for the tokenizer in `directory`. `vocab`: number of the model's logits. `compiled` is called
    with the duration of each compilation in seconds, or 0 for a cached grammar, in any thread."""

    def __init__(self, directory: Path, vocab: int, compiled: Callable[[float], None] | None = None) -> None:
        self._directory, self._vocab = directory, vocab
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._tell = compiled or _ignore_duration
        # LLMatcher releases the interpreter lock while it compiles.
        before = threading.stack_size(_STACK)
        self._pool = ThreadPoolExecutor(THREADS, "grammar")
        for _ in range(THREADS):  # start the threads while the stack size is set
            self._pool.submit(_nothing)
        threading.stack_size(before)
        self._executor = LLExecutor(1)
        self.nothing: Mask = np.zeros(-(-vocab // _WORD_BITS), np.uint32)
        """The mask that allows no token."""

    def start(
        self, grammar: Grammar | None, end_ids: Iterable[int], thinking: Thinking | None = None
    ) -> Future[Matcher | Budget[Matcher]]:
        """Start to compile in another thread; a cached grammar is available at once. The future raises RequestError for
        an unsupported grammar; if it is cancelled early, nothing is compiled. With a thinking budget, the matcher
        enforces both, or only the budget."""
        ends = frozenset(end_ids)
        known = None if grammar is None or thinking is not None else self._known(grammar)
        if known is None:
            return self._pool.submit(self._limited, grammar, ends, thinking)
        self._tell(0.0)
        done = Future[Matcher | Budget[Matcher]]()
        done.set_result(Matcher(known, self._vocab, ends, self._encode))
        return done

    def compile(self, grammar: Grammar, end_ids: Iterable[int]) -> Matcher:
        return self._pool.submit(self._matcher, grammar, frozenset(end_ids)).result()

    def masks(self, matchers: Sequence[Matcher | Budget[Matcher]]) -> list[Mask | RequestError | None]:
        """Return for each sequence the mask, None if all tokens are allowed, or the error if none is."""
        inner = [each.inner if isinstance(each, Budget) else each for each in matchers]
        filled = iter(fill([each for each in inner if each is not None], self._executor))
        masks: list[Mask | RequestError | None] = []
        for matcher, within in zip(matchers, inner, strict=True):
            mask = None if within is None else next(filled)
            if isinstance(matcher, Budget) and not isinstance(mask, RequestError):
                mask = matcher.limited(mask)
            masks.append(mask)
        return masks

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _known(self, grammar: Grammar) -> LLMatcher | None:
        """Return a copy of a cached matcher."""
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    def _limited(
        self, grammar: Grammar | None, end_ids: frozenset[int], thinking: Thinking | None
    ) -> Matcher | Budget[Matcher]:
        matcher = None if grammar is None else self._matcher(grammar, end_ids)
        if thinking is not None:
            return Budget(thinking, self._text.token_bytes, self._vocab, matcher)
        assert matcher is not None, "the request has no constraint"
        return matcher

    @cached_property
    def _text(self) -> Tokenizer:
        try:
            return Tokenizer(self._directory)
        except CheckpointError as error:
            raise RequestError(f"a thinking budget needs a tokenizer: {error}", "thinking_token_budget") from error

    def _matcher(self, grammar: Grammar, end_ids: frozenset[int]) -> Matcher:
        known = self._known(grammar)  # another request may have compiled it meanwhile
        seconds = 0.0
        if known is None:
            began = monotonic()
            self._keep(grammar, self._compile(grammar))
            seconds = monotonic() - began
            known = self._known(grammar)
        self._tell(seconds)
        assert known is not None, "the newest grammar is never evicted"
        return Matcher(known, self._vocab, end_ids, self._encode)

    def _encode(self, text: str) -> list[int]:
        return self._text.encode(text)

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        with self._lock:
            self._compiled[grammar] = matcher
            size = sum(len(each.text) for each in self._compiled)
            while len(self._compiled) > MAX_CACHED or (size > MAX_CACHED_BYTES and len(self._compiled) > 1):
                oldest, _ = self._compiled.popitem(last=False)
                size -= len(oldest.text)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, definition(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(reason(grammar.kind, matcher.get_error()), PARAM)
        return matcher

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return read_vocabulary(self._directory, self._vocab)
        except (CheckpointError, ValueError) as error:
            raise RequestError(
                f"this model's tokenizer cannot be used for structured output: {error}; the directory needs a "
                f"tokenizer of byte-level or byte-fallback tokens",
                PARAM,
            ) from error


def compiler_for(model_directory: str, vocab: int, compiled: Callable[[float], None] | None = None) -> Compiler:
    return Compiler(Path(model_directory), vocab, compiled)


def _bits(ids: Iterable[int]) -> tuple[NDArray[np.int64], Mask]:
    """Return the indexes of the words that contain these ids' bits, each once, and the bits."""
    words: dict[int, int] = {}
    for token in ids:
        words[token // _WORD_BITS] = words.get(token // _WORD_BITS, 0) | 1 << token % _WORD_BITS
    return np.fromiter(words, np.int64, len(words)), np.fromiter(words.values(), np.uint32, len(words))


def _reason(error: str) -> str:
    """Return the message without the dump of the parser's state."""
    return error.split("\n<")[0].strip()


def _ignore_duration(_: float) -> None:
    pass


def _nothing() -> None:
    pass
