"""Tokenizer against transformers' own loading of the same directories."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.api.errors import CheckpointError
from engine.text import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello",
    " leading and  double   spaces ",
    "What is 17 + 25?\n\n\tTabs",
    "héllo 中文 👩‍👩‍👧 हिन्दी \u0085\u2028 e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>already</s>",
    "two words and 漢字<think>x</think>",
    "<|late|>a<|late_end|>",
]
KINDS = ["byte_level", "byte_level_bos", "byte_fallback", "byte_fallback_eos", "metaspace", "late_tokens"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_texts_equal_transformers(tokenizer_dirs: dict[str, Path], kind: str, special: bool) -> None:
    ours, theirs = Tokenizer(tokenizer_dirs[kind]), AutoTokenizer.from_pretrained(tokenizer_dirs[kind])
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_and_special_ids_equal_transformers(tokenizer_dirs: dict[str, Path], kind: str) -> None:
    ours, theirs = Tokenizer(tokenizer_dirs[kind]), AutoTokenizer.from_pretrained(tokenizer_dirs[kind])
    assert ours.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert {key: ours.special_tokens[key] for key in ours.special_tokens} == {
        key: value for key, value in theirs.special_tokens_map.items() if isinstance(value, str)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_of_all_ids_concatenate_to_the_text(tokenizer_dirs: dict[str, Path], kind: str) -> None:
    tokenizer = Tokenizer(tokenizer_dirs[kind])
    for text in TEXTS[2:]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert tokenizer.decode(ids, skip_special_tokens=False) in (joined, joined.removeprefix(" "))
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b"" == tokenizer.token_bytes(-1)


def test_convert_tokens_to_ids_takes_a_string_a_list_and_an_empty_list(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer(tokenizer_dirs["byte_level"])
    assert tokenizer.convert_tokens_to_ids("<|end|>") == 0
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "no such token", "<|end|>"]) == [1, None, 0]
    assert tokenizer.convert_tokens_to_ids([]) == []
    assert tokenizer.token_string(0) == "<|end|>" and tokenizer.token_string(10**6) is None


def test_truncation_and_padding_stored_in_the_file_have_no_effect(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    data = json.loads((tokenizer_dirs["byte_level"] / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    plain = Tokenizer(tokenizer_dirs["byte_level"])
    for text in ("a", "a much longer text than three tokens"):
        assert Tokenizer(tmp_path).encode(text) == plain.encode(text)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 3'])
def test_a_damaged_file_is_named(tokenizer_dirs: dict[str, Path], tmp_path: Path, name: str, damage: str) -> None:
    for file in tokenizer_dirs["byte_level"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(damage)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Tokenizer(tmp_path)


def test_chat_templates_come_from_the_config_a_list_or_a_file(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dirs["byte_level"] / "tokenizer.json").read_bytes())
    assert Tokenizer(tmp_path).chat_template is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert Tokenizer(tmp_path).chat_template == "one"
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]})
    )
    assert Tokenizer(tmp_path).chat_template == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(tmp_path).chat_template == "file"
