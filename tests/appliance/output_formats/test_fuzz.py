"""Every format with random text, split in any way, including the tokens of several tokenizers. `make fuzz TEXTS=10000
SEED=7` reads TEXTS texts of each format; each seed gives another order."""

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText, joined
from appliance.output_formats.formats import CALLS, HARMONY, REASONINGS, THINK, named_call
from appliance.output_formats.reader import reader_of
from engine.text import IncrementalDecoder, Tokenizer
from tests.appliance.output_formats.goldens import FUNCTIONS, GOLDENS

DEMO = Path(__file__).parents[3] / "manifests" / "demo"
SEED = int(os.environ.get("FUZZ_SEED", "20260"))
# Formats by name; each call syntax is paired with a reasoning syntax.
FORMATS = {calls.name: OutputFormat(REASONINGS[at % len(REASONINGS)], calls) for at, calls in enumerate(CALLS)} | {
    "harmony": HARMONY,
    "named": OutputFormat(THINK, named_call("weather")),
    "think": OutputFormat(THINK),
}
TEXTS = int(os.environ.get("FUZZ_TEXTS", -(-10_000 // len(FORMATS))))  # of each format
SCRAPS = (
    '{"name": "f", "arguments": {',
    '"a": 1',
    "}",
    "}}",
    "]",
    "[",
    '"',
    "\\",
    "\n",
    " ",
    "x",
    "<",
    ">",
    "f(a=",
    ")",
)
SCRAPS += ("'", ",", ":", "=", "中", "😀", "é", "null", "-1.5e3", "\\u00e9", "</", "weather", ";", "`", "\t", "{", "|")


def events_of(form: OutputFormat, pieces: Sequence[str], reasons: bool) -> list[Event]:
    reader = reader_of(form, functions=FUNCTIONS, reasons=reasons)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return joined([*events, *reader.finish()])


def cuts(text: str, chance: random.Random) -> list[str]:
    places = sorted(chance.choices(range(len(text) + 1), k=chance.randint(1, 6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def fuzzed(name: str, form: OutputFormat, chance: random.Random) -> str:
    """Return a text of the format's own pieces, split and mixed with others, or a golden output with a fault."""
    marks = [*form.markers(), *SCRAPS]
    golden = GOLDENS.get(name, GOLDENS["hermes"])
    if chance.random() < 0.5:
        return "".join(chance.choices(marks, k=chance.randint(1, 14)))
    text = chance.choice((golden.one, golden.none, golden.hard, golden.two))
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice((chance.choice(marks), "")) + text[at + chance.randint(0, 3) :]
    return text


@pytest.mark.slow
def test_fuzzed_texts_read_the_same_whole_and_in_pieces() -> None:
    """TC-01: 10,000 texts or more, split at random and into characters, cause no exception and no invented event.
    Each call syntax is paired with a reasoning syntax."""
    chance = random.Random(SEED)
    numbered = list(enumerate(FORMATS.items()))
    print(f"{TEXTS:,} texts of each of {len(FORMATS)} formats, seed {SEED}")
    for number, (at, (name, form)) in itertools.product(range(TEXTS), numbered):
        reasons = number % 5 == 0
        if form.channels is None:
            form = replace(form, reasoning=REASONINGS[(at + number) % len(REASONINGS)])
        text = fuzzed(name, form, chance)
        whole = events_of(form, [text], reasons)
        assert events_of(form, cuts(text, chance), reasons) == whole, (name, text)
        if number % 4 == 0:
            assert events_of(form, list(text), reasons) == whole, (name, text)
        check(whole, text, name)


def check(events: list[Event], text: str, name: str) -> None:
    """Check that calls come in order, that each begins once, and that all reported text is in the input."""
    begun = -1
    for event in events:
        match event:
            case CallStart(index, _, _):
                assert index == begun + 1, (name, text)
                begun = index
            case CallArguments(index, _) | CallBroken(index, _):
                assert index == begun, (name, text)
            case Content(said) | ReasoningText(said):
                assert said and "\ufffd" not in said, (name, text)


# Tokenizers


def _unigram() -> Backend:
    """Build a tokenizer like SentencePiece: a space is a separate character, and unknown characters fall back to
    bytes."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.UnigramTrainer(
        vocab_size=700, special_tokens=["<unk>", *fallback], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_corpus(), trainer)
    vocabulary = backend.model
    pieces = [(backend.id_to_token(token), -float(token) / 50) for token in range(backend.get_vocab_size())]
    del vocabulary
    made = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = backend.normalizer
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _bytes() -> Backend:
    """Build a tokenizer in which every byte is a token, with no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: at for at, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe() -> Backend:
    """Build a byte-level tokenizer trained on outputs of the formats, so that its tokens cross markers; some markers
    are single tokens, some of them special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=[], show_progress=False, max_token_length=12
    )
    backend.train_from_iterator(_corpus(), trainer)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "<tool_call>", "</arg_value>")])
    backend.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("[TOOL_CALLS]", "<|channel|>", "<|message|>")]
    )
    return backend


def _corpus() -> list[str]:
    return [text for golden in GOLDENS.values() for text in (golden.one, golden.none, golden.hard, golden.two)]


def _saved(make: Callable[[], Backend], folder: Path) -> Tokenizer:
    make().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize("kind", ["demo", "bytes", "unigram", "bpe"])
def test_tokens_of_any_tokenizer_read_the_same(kind: str, tmp_path: Path) -> None:
    """TC-01: goldens and fuzzed texts token by token, with no broken character."""
    makers = {"bytes": _bytes, "unigram": _unigram, "bpe": _bpe}
    tokenizer = Tokenizer(DEMO) if kind == "demo" else _saved(makers[kind], tmp_path)
    chance = random.Random(SEED)
    for name, form in FORMATS.items():
        golden = GOLDENS.get(name, GOLDENS["hermes"])
        texts = [golden.hard, golden.two, *(fuzzed(name, form, chance) for _ in range(4))]
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
            pieces = [decoder.push(token) for token in ids]
            if kind == "unigram":
                text = text.replace("▁", " ")  # its own sign of a space
            assert "".join(pieces) == text, "the tokenizer itself loses nothing"
            events = events_of(form, pieces, False)
            assert events == events_of(form, [text], False), (name, text)
            check(events, text, name)
