"""Tokens by which a reranker answers, with tokenizers of every kind, against the libraries' own files."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece

from engine.api.config import TaskConfig
from engine.api.errors import TaskError
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import TokenLogits
from tests.engine.layers.conftest import random_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("reranker")
    random_model("qwen3").save_pretrained(folder)
    return (folder / "config.json").read_bytes()


def answers(tmp_path: Path, config: bytes, texts: Path, *words: str) -> tuple[int, ...]:
    """The ids that a checkpoint with these text files is scored by."""
    folder = tmp_path / "served"
    shutil.copytree(texts, folder, dirs_exist_ok=True)
    (folder / "config.json").write_bytes(config)
    first, second = words
    model = read_checkpoint(folder, weights=False, task=TaskConfig("score", score_tokens=(first, second))).model
    assert model.pooler is not None
    (found,) = (stage for stage in model.pooler.stages if isinstance(stage, TokenLogits))
    return found.tokens


@pytest.mark.parametrize("kind", ["pieces", "pieces_legacy", "pieces_unigram"])
def test_words_of_sentencepiece(tmp_path: Path, config: bytes, plain_dirs: dict[str, Path], kind: str) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(plain_dirs[kind] / "tokenizer.model"))
    pieces = [library.id_to_piece(token) for token in range(library.get_piece_size())]
    words = [piece for piece in pieces if piece[0] == "\u2581" and piece[1:].isascii() and piece[1:].isalpha()]
    alone = next(word for word in words if word[1:] not in pieces)
    other = next(piece for piece in pieces if piece.isascii() and piece.isalpha())
    spelled = answers(tmp_path, config, plain_dirs[kind], alone, other)
    assert spelled == (library.piece_to_id(alone), library.piece_to_id(other))
    assert answers(tmp_path, config, plain_dirs[kind], alone[1:], other) == spelled, "as a text begins with it"


@pytest.mark.parametrize("kind", ["ranks", "ranks_bos", "qwen"])
def test_words_of_tiktoken(tmp_path: Path, config: bytes, plain_dirs: dict[str, Path], kind: str) -> None:
    (file,) = (path for path in plain_dirs[kind].iterdir() if path.name != "tokenizer_config.json")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in file.read_bytes().splitlines()}
    whole = next(piece for piece in ranks if len(piece) > 2 and piece.isalpha() and piece.isascii())
    spaced = next(piece for piece in ranks if len(piece) > 2 and piece[:1] == b" " and piece[1:].isalpha())
    found = answers(tmp_path, config, plain_dirs[kind], whole.decode(), spaced.decode())
    assert found == (ranks[whole], ranks[spaced])


def test_words_of_a_tokenizer_json_and_tokens_that_were_added(
    tmp_path: Path,
    config: bytes,
    tokenizer_dirs: dict[str, Path],
) -> None:
    texts = tokenizer_dirs["byte_level"]
    file = json.loads((texts / "tokenizer.json").read_text())
    added = file["added_tokens"][0]
    spelled = next(name for name in file["model"]["vocab"] if name[0] == "\u0120" and name[1:].isalpha())
    ids = (added["id"], file["model"]["vocab"][spelled])
    assert answers(tmp_path, config, texts, added["content"], spelled) == ids
    assert answers(tmp_path, config, texts, added["content"], f" {spelled[1:]}") == ids


@pytest.mark.parametrize("kind", ["pieces", "pieces_unigram", "ranks"])
@pytest.mark.parametrize("word", ["hello, nowhere", "\u4e2d\u6587\u5b57", ""])
def test_words_of_several_tokens_or_none_are_refused(
    tmp_path: Path,
    config: bytes,
    plain_dirs: dict[str, Path],
    kind: str,
    word: str,
) -> None:
    with pytest.raises(
        TaskError, match=r"model.pooling.score_tokens: .* is not one token of .*; name two words that are"
    ):
        answers(tmp_path, config, plain_dirs[kind], "e", word)


def test_identical_score_tokens_are_rejected(tmp_path: Path, config: bytes, plain_dirs: dict[str, Path]) -> None:
    with pytest.raises(TaskError, match="'e' and 'e' are the same token"):
        answers(tmp_path, config, plain_dirs["ranks"], "e", "e")


def test_a_checkpoint_without_a_tokenizer_says_what_is_missing(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(TaskError, match=r"model.task: score needs the ids of yes and no: .*tokenizer.json"):
        answers(tmp_path, config, tmp_path / "none", "yes", "no")
