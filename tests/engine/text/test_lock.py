"""Long texts and damaged patterns: the interpreter lock is free, and failures are errors of the checkpoint."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from engine.api.errors import CheckpointError
from engine.text import Tokenizer


def tokenizer(directory: Path, pattern: str) -> Tokenizer:
    library = Library(models.BPE(vocab={chr(code): code - 32 for code in range(32, 127)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    library.decoder = decoders.Fuse()
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Tokenizer(directory)


def longest_pause(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that `work` took in a thread, and the longest in which this thread did not run meanwhile."""
    thread = threading.Thread(target=work)
    began = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    return time.perf_counter() - began, longest


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, r"\s?[a-z]+")
    text = "hello world " * 30_000
    ids = made.encode(text)
    for work in (lambda: made.encode(text), lambda: made.encode_within(text, 10), lambda: made.decode(ids)):
        total, pause = longest_pause(work)
        assert pause < total / 2, (total, pause)


def test_a_pattern_that_fails_on_a_text_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, "(a|aa)+$")
    assert made.encode("ab")
    for encode in (
        lambda: made.encode("a" * 60 + "b"),
        lambda: made.encode_within("a" * 60 + "b", 9),
        lambda: made.encode_pair("a" * 60 + "b", "x"),
    ):
        with pytest.raises(CheckpointError, match="tokenizer fails on a text"):
            encode()
    assert made.encode("ab")
