"""tekken.json against Mistral's own library: golden/tekken.json is the first 600 entries of Mistral's vocabulary of
September 2024 (Apache 2.0), tekken_ids.json what mistral-common 1.13.1 made of texts with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api.errors import CheckpointError
from engine.api.messages import Grammar
from engine.structured.grammar import Compiler
from engine.text import IncrementalDecoder, Tokenizer, decode_all

HERE = Path(__file__).parent / "golden"
GOLDEN = json.loads((HERE / "tekken_ids.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(HERE)


@pytest.mark.parametrize("row", GOLDEN["texts"], ids=range(len(GOLDEN["texts"])))
def test_ids_are_those_of_mistral_common_and_lead_back_to_the_text(tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    assert tokenizer.encode(row["text"], add_special_tokens=False) == row["ids"]
    assert tokenizer.encode(row["text"]) == row["with begin"]
    assert tokenizer.decode(row["with begin"]) == row["text"]
    assert decode_all(IncrementalDecoder(tokenizer), row["with begin"]) == row["text"]


def test_every_token_has_the_bytes_and_the_name_that_mistral_common_gives_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == GOLDEN["n_words"] == 604
    assert [tokenizer.token_string(token) for token in range(24)] == GOLDEN["special"]
    assert [tokenizer.token_bytes(token).hex() for token in range(24, 604)] == GOLDEN["bytes"]
    assert tokenizer.special_ids == set(range(24))


def test_begin_end_and_padding_are_named_without_a_tokenizer_config(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id) == (GOLDEN["bos"], GOLDEN["eos"])
    assert tokenizer.convert_tokens_to_ids([tokenizer.special_tokens[key] for key in ("pad_token", "unk_token")]) == [
        GOLDEN["pad"],
        GOLDEN["unk"],
    ]


def test_special_tokens_in_a_rendered_prompt_are_one_id_each(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>[INST]Hello[/INST]", add_special_tokens=False)
    assert ids == [1, 3, *next(row["ids"] for row in GOLDEN["texts"] if row["text"] == "Hello"), 4]


def changed(folder: Path, **changes: Any) -> Path:
    file = json.loads((HERE / "tekken.json").read_text())
    (folder / "tekken.json").write_text(json.dumps({**file, **changes}))
    return folder


def test_special_tokens_that_the_file_names_take_their_places(tmp_path: Path) -> None:
    named = [{"rank": 0, "token_str": "<s>"}, {"rank": 3, "token_str": "[THINK]", "is_control": False}]
    tokenizer = Tokenizer(changed(tmp_path, special_tokens=named))
    assert [tokenizer.token_string(token) for token in range(5)] == [
        *("<s>", "<SPECIAL_1>", "<SPECIAL_2>", "[THINK]", "<SPECIAL_4>")
    ]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, None)
    assert 3 not in tokenizer.special_ids and tokenizer.encode("[THINK]") == [0, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": None}, "is not a tekken tokenizer"),
        ({"config": {}}, "is not a tekken tokenizer"),
        ({"vocab": [{"rank": 0, "token_bytes": "%"}]}, "is not a tekken tokenizer"),
        ({"vocab": [{"rank": 1, "token_bytes": "AA=="}]}, "vocab must list tokens by rank"),
        ({"special_tokens": [{"rank": 24, "token_str": "x"}]}, "special_tokens must have ranks from 0 to 23"),
        ({"special_tokens": [{"rank": 1, "token_str": "x"}] * 2}, "special_tokens must have ranks from 0 to 23"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tekken\.json: .*{words}"):
        Tokenizer(changed(tmp_path, **changes))


def test_a_tokenizer_json_beside_it_wins(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    (tmp_path / "tekken.json").write_text("{")
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dirs["byte_level"] / "tokenizer.json").read_bytes())
    assert Tokenizer(tmp_path).convert_tokens_to_ids("<|end|>") == 0


def test_a_grammar_holds_over_its_tokens(tokenizer: Tokenizer) -> None:
    compiler = Compiler(HERE, tokenizer.vocab_size)
    words = (b"then", b"here", b"in")
    matcher = compiler.compile(Grammar("regex", "then|here|in"), end_ids=(2,))
    mask = matcher.mask()
    allowed = {token for token in range(604) if int(mask[token // 32]) >> token % 32 & 1}
    compiler.close()
    starts = {word[:length] for word in words for length in range(1, len(word) + 1)}
    assert (
        allowed == {token for token in range(24, 604) if tokenizer.token_bytes(token) in starts} and len(allowed) == 6
    )
