"""Tokenizer of a plan; a file that is no tokenizer is refused before the start."""

import base64
import json
import os

import pytest

from appliance.lockfile.files import read_names
from appliance.planning.tokenizer import DESCRIBED, PLAIN, check_tokenizer, tokenizer_name
from engine.api.errors import CheckpointError
from engine.text.added import MAX_TOKENS
from engine.text.files import FILES
from engine.text.tokenizer import Tokenizer
from tests.engine.text.conftest import byte_level, llama_pieces, rank_lines


def test_a_plan_names_the_files_that_the_engine_reads_in_its_order():
    assert (*DESCRIBED, *PLAIN) == FILES


@pytest.mark.parametrize("make", [llama_pieces, rank_lines])
@pytest.mark.parametrize("name", PLAIN)
def test_a_complete_tokenizer_file_is_accepted(tmp_path, name, make):
    (tmp_path / name).write_bytes(make())
    check_tokenizer(tmp_path)
    assert tokenizer_name(tmp_path) == name


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"{}", b"IQ== one\n"])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is neither a SentencePiece model"):
        check_tokenizer(tmp_path)


def test_no_file_is_refused_with_the_one_to_bring(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing.*vocab\.json alone is not supported"):
        check_tokenizer(tmp_path)


def test_a_lock_holds_what_is_read(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for name in ("tokenizer.model", "added_tokens.json", "chat_template.json"):
        (tmp_path / name).write_bytes(base64.b64encode(b"x"))
    assert set(read_names(tmp_path)) == {
        *("tokenizer.model", "added_tokens.json", "chat_template.json", "model.safetensors")
    }
    (tmp_path / "tokenizer.json").write_text("{}")
    assert set(read_names(tmp_path)) == {"tokenizer.json", "chat_template.json", "model.safetensors"}


def with_id(name: str, token: int) -> bytes:
    """A tokenizer's file in which one token has this id."""
    if name == "tiktoken.model":
        return rank_lines() + f"{base64.b64encode(b'zebra').decode()} {token}\n".encode()
    described = json.loads(byte_level().to_str())
    if name == "vocabulary":
        described["model"]["vocab"]["zebra"] = token
    else:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        described["added_tokens"].append({"id": token, "content": "<zebra>", **flags})
    return json.dumps(described).encode()


@pytest.mark.parametrize("name", ["vocabulary", "added", "tiktoken.model"])
@pytest.mark.parametrize("token", [MAX_TOKENS, 2**32 - 1])
def test_a_token_with_an_absurd_id_is_refused_by_check_and_by_the_gateway(tmp_path, name, token):
    file = tmp_path / (name if name in PLAIN else "tokenizer.json")
    file.write_bytes(with_id(name, token))
    if name == "added":  # the library numbers added tokens itself
        assert Tokenizer(tmp_path).vocab_size < MAX_TOKENS
    for read in (check_tokenizer,) if name == "added" else (check_tokenizer, Tokenizer):
        wrong = rf"{file.name}: (has a token with the id {token}|is not a tokenizer)"
        with pytest.raises(CheckpointError, match=wrong):
            read(tmp_path)


def test_an_added_token_of_the_configuration_with_an_absurd_id_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(rank_lines())
    added = {"added_tokens_decoder": {str(2**32 - 1): {"content": "<zebra>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: has a token with the id 4294967295"):
        Tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: has a token with the id 4294967295"):
        check_tokenizer(tmp_path)


@pytest.mark.parametrize("name", [*DESCRIBED, *PLAIN])
def test_a_pipe_in_the_place_of_a_tokenizer_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="named pipe"):
        check_tokenizer(tmp_path)
