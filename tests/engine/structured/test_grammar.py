"""Masks of grammars: random walks over them stay in the language, whatever the vocabulary."""

import json
import random
import re
import threading
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer

from engine.api.errors import RequestError
from engine.api.messages import Grammar
from engine.structured import grammar as module
from engine.structured.definition import MAX_TEXT
from engine.structured.grammar import MAX_CACHED, THREADS, Compiler, compiler_for, fill

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["ab", "abc", "你好"]},
        "size": {"type": "integer", "minimum": -9, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
LARK = 'start: "[" pair ("," pair)* "]"\npair: KEY "=" value\nvalue: "true" | "12" | start\nKEY: /[ab]{1,3}/\n'
REGEX = r"(你|好|😀|a){2,5}-[0-9]{1,3}"
ENDS = {"byte level": "<|end|>", "byte fallback": "</s>"}


def in_lark(text: str) -> bool:
    """A recursive descent for LARK, by hand."""

    def value(at: int) -> int:
        for word in ("true", "12"):
            if text.startswith(word, at):
                return at + len(word)
        return whole(at)

    def whole(at: int) -> int:
        if not text.startswith("[", at):
            raise ValueError(text)
        while True:
            key = re.compile("[ab]{1,3}=").match(text, at + 1)
            if key is None:
                raise ValueError(text)
            at = value(key.end())
            if text.startswith("]", at):
                return at + 1
            if not text.startswith(",", at):
                raise ValueError(text)

    return whole(0) == len(text)


LANGUAGES = {
    "schema": (
        Grammar("json_schema", json.dumps(SCHEMA)),
        lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None,
    ),
    "regex": (Grammar("regex", REGEX), lambda text: re.fullmatch(REGEX, text)),
    "lark": (Grammar("lark", LARK), in_lark),
}


class Walk:
    """Draws tokens among the allowed ones until the end, shortest ways preferred after a while."""

    def __init__(self, directory: Path, name: str, *, extra: int = 3) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.vocab = self.tokenizer.get_vocab_size() + extra  # a model's logits may be wider than its tokenizer
        self.end = self.tokenizer.token_to_id(ENDS[name])
        self.compiler = compiler_for(str(directory), self.vocab)

    def text(self, grammar: Grammar, seed: int, allowed) -> str:
        rng = random.Random(seed)
        matcher = self.compiler.compile(grammar, [self.end])
        ids: list[int] = []
        while not matcher.finished:
            assert len(ids) < 600, self.tokenizer.decode(ids)
            choice = allowed(matcher.mask())
            # mostly what closes something, or the walk through strings and lists would not end
            closing = [i for i in choice if i == self.end or self.tokenizer.decode([i]) in ('"', "]", "}", "2")]
            token = rng.choice(closing) if closing and rng.random() < 0.5 else rng.choice(choice)
            assert token < self.tokenizer.get_vocab_size(), "an id without text"
            matcher.advance(token)
            ids.append(token)
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture
def walk(tokenizer_directory):
    made: list[Walk] = []

    def build(name: str) -> Walk:
        made.append(Walk(tokenizer_directory(name), name))
        return made[-1]

    yield build
    for one in made:
        one.compiler.close()


@pytest.mark.parametrize("name", list(ENDS))
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_random_walk_over_masks_stays_in_the_language(name, language, walk, allowed):
    grammar, accepts = LANGUAGES[language]
    walker = walk(name)
    texts = [walker.text(grammar, seed, allowed) for seed in range(8)]
    assert len(set(texts)) > 4
    for text in texts:
        assert accepts(text), text


def test_end_tokens_are_allowed_exactly_when_the_text_is_complete(walk, allowed):
    """SO-03"""
    walker = walk("byte level")
    a, other_end = walker.tokenizer.token_to_id("a"), walker.vocab - 1
    matcher = walker.compiler.compile(Grammar("regex", "a{2,3}"), [walker.end, other_end, 10**6])
    seen = []
    for _ in range(3):
        seen.append({walker.end, other_end} & set(allowed(matcher.mask())))
        matcher.advance(a)
    assert seen == [set(), set(), {walker.end, other_end}]
    assert matcher.finished
    assert allowed(matcher.mask()) == [walker.end, other_end]


@pytest.mark.parametrize("ending", ["taken", "complete"])
def test_a_matcher_is_finished_by_an_end_token_or_when_nothing_may_follow(ending, walk):
    walker = walk("byte level")
    matcher = walker.compiler.compile(Grammar("regex", "a+b?"), [walker.end])
    matcher.advance(walker.tokenizer.token_to_id("a"))
    assert not matcher.finished
    matcher.advance(walker.end if ending == "taken" else walker.tokenizer.token_to_id("b"))
    assert matcher.finished


def test_no_special_token_is_text(walk, allowed):
    walker = walk("byte level")
    matcher = walker.compiler.compile(Grammar("regex", "(?s:.*)"), [])
    special = {walker.tokenizer.token_to_id(token) for token in ("<|end|>", "<|call|>")}
    assert not special & set(allowed(matcher.mask()))


def test_an_added_token_that_is_not_special_is_text_whatever_it_looks_like(walk, allowed):
    walker = walk("byte level")
    matcher = walker.compiler.compile(Grammar("lark", 'start: "<tool_call>" "ab"'), [walker.end])
    marker = walker.tokenizer.token_to_id("<tool_call>")
    assert marker in allowed(matcher.mask())
    matcher.advance(marker)
    assert walker.tokenizer.token_to_id("ab") in allowed(matcher.mask())


def test_a_special_token_may_be_part_of_a_lark_grammar(walk, allowed):
    walker = walk("byte level")
    matcher = walker.compiler.compile(Grammar("lark", 'start: <|call|> "ab"'), [walker.end])
    call = walker.tokenizer.token_to_id("<|call|>")
    assert allowed(matcher.mask()) == [call]
    matcher.advance(call)
    assert walker.tokenizer.token_to_id("ab") in allowed(matcher.mask())


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "object'), "JSON schema"),
        (Grammar("json_schema", '{"type": "nothing"}'), "nothing"),
        (Grammar("json_schema", "[1]"), "schema"),
        (Grammar("regex", "[.*"), "unclosed character class"),
        (Grammar("regex", "a\0b"), "NUL"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("lark", "start: ("), "Lark"),
        (Grammar("regex", "a" * (MAX_TEXT + 1)), "characters"),
    ],
)
def test_a_wrong_grammar_is_an_error_of_its_request(grammar, reason, walk, allowed):
    walker = walk("byte level")
    with pytest.raises(RequestError, match=reason) as caught:
        walker.compiler.compile(grammar, [walker.end])
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 1500
    assert walker.text(LANGUAGES["regex"][0], 0, allowed)


def test_deep_nesting_ends_in_an_error_or_a_matcher_never_in_a_crash(walk):
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    walker = walk("byte level")
    try:
        matcher = walker.compiler.compile(Grammar("json_schema", json.dumps(schema)), [walker.end])
    except RequestError as error:
        assert "nest" in str(error) or "recursion" in str(error) or "deep" in str(error)
    else:
        assert matcher.mask().any()


def test_a_token_outside_the_language_is_refused(walk):
    walker = walk("byte level")
    matcher = walker.compiler.compile(Grammar("regex", "a{2}"), [walker.end])
    for token in (walker.tokenizer.token_to_id("b"), walker.end):
        with pytest.raises(RequestError, match="grammar"):
            walker.compiler.compile(Grammar("regex", "a{2}"), [walker.end]).advance(token)
    matcher.advance(walker.tokenizer.token_to_id("a"))


def test_dead_end_of_a_grammar_is_an_error(tmp_path, allowed):
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"z"})  # a vocabulary that cannot write a z
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = Compiler(tmp_path, len(alphabet))
    matcher = compiler.compile(Grammar("regex", "az"), [])
    matcher.advance(alphabet.index("a"))
    with pytest.raises(RequestError, match=r"no token|cannot continue"):
        matcher.mask()
    compiler.close()


def test_matchers_of_one_grammar_have_separate_states(walk, allowed):
    walker = walk("byte level")
    grammar = Grammar("regex", "ab|cd")
    one, two = (walker.compiler.compile(grammar, [walker.end]) for _ in range(2))
    one.advance(walker.tokenizer.token_to_id("c"))
    fresh = walker.compiler.compile(grammar, [walker.end])
    assert allowed(two.mask()) == allowed(fresh.mask()) != allowed(one.mask())


def test_the_cache_of_grammars_is_bounded(walk):
    walker = walk("byte level")
    for number in range(MAX_CACHED + 5):
        walker.compiler.compile(Grammar("regex", f"a{{{number + 1}}}"), [])
    assert len(walker.compiler._compiled) == MAX_CACHED


def test_a_directory_without_a_usable_tokenizer_says_so(tmp_path):
    compiler = compiler_for(str(tmp_path), 100)
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        compiler.compile(Grammar("regex", "a"), [])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="needs a tokenizer of byte-level or byte-fallback tokens"):
        compiler.compile(Grammar("regex", "a"), [])
    compiler.close()


def test_compilation_runs_in_a_thread_of_its_own(walk):
    walker = walk("byte level")
    threads = []
    future = walker.compiler.start(LANGUAGES["schema"][0], [walker.end])
    future.add_done_callback(lambda _: threads.append(threading.current_thread().name))
    assert future.result().mask().any()
    walker.compiler.close()
    assert threads[0] == threading.current_thread().name or threads[0].startswith("grammar")


def test_the_cache_is_bounded_in_bytes_as_well(walk, monkeypatch):
    walker = walk("byte level")
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", 30)
    for text in ("a" * 20, "b" * 20, "c" * 40, "d" * 5):
        assert walker.compiler.compile(Grammar("regex", text), []).mask().any()
    assert [each.text for each in walker.compiler._compiled] == ["d" * 5]


def test_a_known_grammar_waits_for_no_compilation(tokenizer_directory):
    """SO-06: a cached grammar is ready at once even if all threads are busy; a cancelled compilation never starts."""
    seconds = []
    compiler = Compiler(tokenizer_directory("byte level"), 300, seconds.append)
    known, other = Grammar("regex", "ab"), Grammar("regex", "cd")
    compiler.compile(known, [])
    gate = threading.Event()
    busy = [compiler._pool.submit(gate.wait, 60) for _ in range(THREADS)]
    assert compiler.start(known, []).done()
    waiting = compiler.start(other, [])
    assert not waiting.done() and waiting.cancel()
    gate.set()
    assert all(each.result() for each in busy)
    compiler.close()
    assert seconds[0] > 0 and seconds[1:] == [0.0]
    assert other not in compiler._compiled


def test_masks_of_a_batch_are_those_of_each_row(walk, allowed):
    walker = walk("byte level")
    letters = [walker.tokenizer.token_to_id(letter) for letter in "ab"]
    texts = ("ab", "a|b", "[ab]c", "(a|bc)*", "a")

    def matchers():
        made = [walker.compiler.compile(Grammar("regex", text), [walker.end]) for text in texts]
        for matcher in made[:2]:
            matcher.advance(letters[0])
        made[4].advance(letters[0])
        return made

    alone = [matcher.mask() for matcher in matchers()]
    for found in (walker.compiler.masks(matchers()), fill(matchers())):
        assert [allowed(mask) for mask in found] == [allowed(mask) for mask in alone]
    assert fill([]) == []


def test_dead_end_does_not_affect_other_rows(walk):
    walker = walk("byte level")
    dead, alive = (walker.compiler.compile(Grammar("regex", text), []) for text in ("a", "b+"))
    dead.advance(walker.tokenizer.token_to_id("a"))
    first, second = walker.compiler.masks([dead, alive])
    assert isinstance(first, RequestError) and second.any()


def test_a_stop_token_that_the_language_needs_as_text_may_come_there(walk, allowed):
    """It ends the reply, which is then the beginning of a sentence: better than an error."""
    walker = walk("byte level")
    a, b = (walker.tokenizer.token_to_id(letter) for letter in "ab")
    matcher = walker.compiler.compile(Grammar("regex", "a|cba"), [b])
    assert b not in allowed(matcher.mask())
    matcher.advance(walker.tokenizer.token_to_id("c"))
    assert allowed(matcher.mask()) == [b]
    other = walker.compiler.compile(Grammar("regex", "ab?"), [b])
    other.advance(a)
    assert allowed(other.mask()) == [b]


def test_long_forced_text_is_fast(walk, allowed):
    walker = walk("byte level")
    a = walker.tokenizer.token_to_id("a")
    matcher = walker.compiler.compile(Grammar("regex", "ba{4000000000}"), [walker.end])
    matcher.advance(walker.tokenizer.token_to_id("b"))
    assert a in allowed(matcher.mask())
    matcher.advance(a)
    assert walker.end not in allowed(matcher.mask())
