"""Which tokenizer a plan names, and that what is no tokenizer is refused before anything starts."""

import base64

import pytest

from appliance.lock.files import read_names
from appliance.plan.tokenizer import DESCRIBED, PLAIN, check_tokenizer, tokenizer_name
from engine.api.errors import CheckpointError
from engine.text.files import FILES
from tests.engine.text.conftest import llama_pieces, rank_lines


def test_a_plan_names_the_files_that_the_engine_reads_in_its_order():
    assert (*DESCRIBED, *PLAIN) == FILES


@pytest.mark.parametrize("make", [llama_pieces, rank_lines])
@pytest.mark.parametrize("name", PLAIN)
def test_a_whole_file_is_taken(tmp_path, name, make):
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
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing.*vocab\.json alone is not read"):
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
