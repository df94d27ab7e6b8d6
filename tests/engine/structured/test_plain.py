"""Masks over the vocabularies of SentencePiece's and tiktoken's files."""

import random

import pytest

from engine.api.messages import Grammar
from engine.structured.grammar import compiler_for
from engine.text import Tokenizer
from tests.engine.structured.test_grammar import LANGUAGES
from tests.engine.text import conftest as text

plain_dirs = text.plain_dirs

KINDS = ["pieces", "ranks", "qwen"]


@pytest.fixture
def opened(plain_dirs):
    made = []

    def build(kind):
        tokenizer = Tokenizer(plain_dirs[kind])
        compiler = compiler_for(str(plain_dirs[kind]), tokenizer.vocab_size + 3)
        made.append(compiler)
        return tokenizer, compiler

    yield build
    for compiler in made:
        compiler.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_random_walk_over_masks_stays_in_the_language(kind, language, opened, allowed):
    """SO-01"""
    tokenizer, compiler = opened(kind)
    grammar, accepts = LANGUAGES[language]
    for seed in range(5):
        rng, ids = random.Random(seed), []
        matcher = compiler.compile(grammar, [tokenizer.eos_id])
        while not matcher.finished:
            choice = allowed(matcher.mask())
            assert len(ids) < 600 and max(choice) < tokenizer.vocab_size
            closing = [
                i for i in choice if i == tokenizer.eos_id or tokenizer.token_bytes(i) in (b'"', b"]", b"}", b"2")
            ]
            ids.append(rng.choice(closing) if closing and rng.random() < 0.5 else rng.choice(choice))
            matcher.advance(ids[-1])
        assert accepts(tokenizer.decode(ids)), tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_tokens_of_a_texts_beginning_are_allowed(kind, opened, allowed):
    tokenizer, compiler = opened(kind)
    words = ("the fox: 中文", "def add", " quick")  # several, or the one way to begin would be forced
    matcher = compiler.compile(Grammar("regex", "|".join(words)), [tokenizer.eos_id])
    starts = {
        token
        for token in range(tokenizer.vocab_size)
        if token not in tokenizer.special_ids
        and (piece := tokenizer.token_bytes(token))
        and any(word.encode().startswith(piece) for word in words)
    }
    assert len(starts) >= 5 and set(allowed(matcher.mask())) == starts


@pytest.mark.parametrize("kind", KINDS)
def test_no_special_token_is_text(kind, opened, allowed):
    tokenizer, compiler = opened(kind)
    matcher = compiler.compile(Grammar("regex", r"(.|\n)+"), [])
    assert not set(allowed(matcher.mask())) & tokenizer.special_ids


def test_a_special_token_may_be_part_of_a_lark_grammar(opened, allowed):
    tokenizer, compiler = opened("ranks")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    matcher = compiler.compile(Grammar("lark", 'start: <|im_start|> "a"'), [])
    assert allowed(matcher.mask()) == [start]
