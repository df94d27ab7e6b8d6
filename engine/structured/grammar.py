"""Grammars compiled to matchers by llguidance (https://github.com/guidance-ai/llguidance), for one model's vocabulary.

A matcher follows one sequence: `mask` says which tokens may come next, `advance` takes the one that did. End tokens are
the request's own and not part of the language: they may come exactly when the language accepts the text so far.
"""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from engine.api.errors import CheckpointError, RequestError
from engine.api.messages import Grammar, Thinking
from engine.structured.thinking import Budget
from engine.structured.vocabulary import read_vocabulary
from engine.text import Tokenizer

PARAM: Final = "structured_outputs"
MAX_TEXT = 1 << 18  # characters of a grammar's source; what is larger is no schema that a person wrote
MAX_CACHED = 64  # compiled languages kept, most recently used ones
_WORD_BITS = 32

# Fuel is llguidance's own measure of work; these end a compilation or a mask within seconds and tens of milliseconds.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=20_000_000,
    step_lexer_fuel=500_000,
    step_max_items=100_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,  # the long form shows the parser's inner state, which tells a caller nothing
)


class Matcher:
    """One sequence's place in its language. Belongs to one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab: int, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._end_ids = end_ids
        self._ends = _bits(end_ids, vocab)
        self._ended = False

    @property
    def finished(self) -> bool:
        """An end token was taken, or nothing but an end token may follow."""
        return self._ended or bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.uint32]:
        """Tokens that may come next: bit i % 32 of word i // 32. The array is the caller's. Raises RequestError where
        nothing may follow."""
        mask = np.zeros(self._vocab // _WORD_BITS + 1, np.uint32)
        if not self.finished:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
        mask = mask[: len(self._ends)] & ~self._ends
        mask[self._vocab // _WORD_BITS :] &= np.uint32((1 << self._vocab % _WORD_BITS) - 1)
        if self.finished or self._matcher.is_accepting():
            mask |= self._ends
        if not mask.any():
            raise RequestError("the grammar has come to a place where no token of this model's vocabulary fits", PARAM)
        return mask

    def advance(self, token: int) -> None:
        """Takes the token that was sampled. Raises RequestError if the language has no place for it."""
        if token in self._end_ids and (self.finished or self._matcher.is_accepting()):
            self._ended = True
            return
        if self.finished or not self._matcher.consume_token(token):
            self._check()
            raise RequestError(f"token {token} does not fit the grammar here", PARAM)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot go on: {_reason(self._matcher.get_error())}", PARAM)


class Compiler:
    """Compiles grammars for the tokenizer in `directory`; `vocab` is the width of the model's logits."""

    def __init__(self, directory: Path, vocab: int) -> None:
        self._directory, self._vocab = directory, vocab
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        # one thread: LLMatcher lets go of the interpreter lock while it compiles, and languages are few
        self._pool = ThreadPoolExecutor(1, "grammar")

    def start(
        self, grammar: Grammar | None, end_ids: Iterable[int], thinking: Thinking | None = None
    ) -> Future[Matcher | Budget]:
        """Compiles beside the caller. The future raises RequestError for a grammar that cannot be served. With a
        thinking budget the matcher holds to both, or to it alone."""
        return self._pool.submit(self._limited, grammar, frozenset(end_ids), thinking)

    def compile(self, grammar: Grammar, end_ids: Iterable[int]) -> Matcher:
        return self._pool.submit(self._matcher, grammar, frozenset(end_ids)).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _limited(self, grammar: Grammar | None, end_ids: frozenset[int], thinking: Thinking | None) -> Matcher | Budget:
        matcher = None if grammar is None else self._matcher(grammar, end_ids)
        if thinking is not None:
            return Budget(thinking, self._text.token_bytes, self._vocab, matcher)
        assert matcher is not None, "nothing limits the request"
        return matcher

    @cached_property
    def _text(self) -> Tokenizer:
        try:
            return Tokenizer(self._directory)
        except CheckpointError as error:
            raise RequestError(f"a thinking budget needs a tokenizer: {error}", "thinking_token_budget") from error

    def _matcher(self, grammar: Grammar, end_ids: frozenset[int]) -> Matcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(self._compiled[grammar].deep_copy(), self._vocab, end_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text) > MAX_TEXT:
            raise RequestError(f"the grammar has {len(grammar.text)} characters; at most {MAX_TEXT} are allowed", PARAM)
        if "\0" in grammar.text:
            raise RequestError("the grammar contains a NUL character", PARAM)
        matcher = LLMatcher(self._tokenizer, _definition(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(f"invalid {_KINDS[grammar.kind]}: {_reason(matcher.get_error())}", PARAM)
        return matcher

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return read_vocabulary(self._directory, self._vocab)
        except (CheckpointError, ValueError) as error:
            raise RequestError(
                f"this model's tokenizer cannot be used for structured output: {error}; the directory needs a "
                f"tokenizer.json or tekken.json of byte-level or byte-fallback tokens",
                PARAM,
            ) from error


def compiler_for(model_directory: str, vocab: int) -> Compiler:
    return Compiler(Path(model_directory), vocab)


_KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


def _definition(grammar: Grammar) -> str:
    """llguidance's own form of a grammar."""
    match grammar.kind:
        case "json_schema":
            try:
                return str(LLMatcher.grammar_from_json_schema(grammar.text))
            except ValueError as error:
                raise RequestError(f"invalid JSON schema: {error}", PARAM) from error
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(grammar.text))


def _bits(ids: frozenset[int], vocab: int) -> NDArray[np.uint32]:
    mask = np.zeros(-(-vocab // _WORD_BITS), np.uint32)
    for token in ids:
        if token < vocab:
            mask[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS)
    return mask


def _reason(error: str) -> str:
    """The message without the dump of the parser's state that may follow it."""
    return error.split("\n<state>")[0].strip()
