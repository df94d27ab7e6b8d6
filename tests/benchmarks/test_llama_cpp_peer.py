"""Comparisons with llama.cpp in `benchmarks.lora` and `benchmarks.speculation`. A library without computation replaces
llama-cpp-python, and checks the positions of tokens in the cache."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks import speculation
from benchmarks.backends.gguf_file import write_adapter
from benchmarks.llama_cpp_peer import LlamaCppPeer
from benchmarks.lora import main, write_adapters
from benchmarks.speculation import Scenario, Text, measure
from engine.llm import LLM

DEMO = Path(__file__).resolve().parents[2] / "manifests" / "demo"
LIBRARY = '''
"""Records calls in the file of LLAMA_LOG."""
import ctypes, json, os, shutil

llama_adapter_lora_p_ctypes = ctypes.c_void_p
LLAMA_FTYPE_MOSTLY_Q8_0 = 7
length = {}


class Record:
    def __getattr__(self, name):
        return None


def log(**line):
    with open(os.environ["LLAMA_LOG"], "a") as file:
        file.write(json.dumps(line) + "\\n")


def llama_batch_init(count, embeddings, rows):
    batch = Record()
    batch.token, batch.pos, batch.n_seq_id, batch.logits = ([0] * count for _ in range(4))
    batch.seq_id = [[0] for _ in range(count)]
    return batch


def llama_decode(context, batch):
    for at in range(batch.n_tokens):
        row = batch.seq_id[at][0]
        assert batch.pos[at] == length.get(row, 0), (row, batch.pos[at], length)
        length[row] = batch.pos[at] + 1
    log(tokens=batch.token[: batch.n_tokens])
    return 0


def llama_memory_clear(memory, data):
    length.clear()


def llama_memory_seq_rm(memory, row, first, last):
    length[row] = first
    return True


def llama_model_quantize(source, target, settings):
    shutil.copy(source.decode(), target.decode())
    return 0


def llama_adapter_lora_init(model, path):
    log(adapter=path.decode())
    return 1


def llama_set_adapters_lora(context, adapters, count, scales):
    assert adapters[0] == 1 and scales[0] == 1.0
    log(active=count == 1)
    return 0


def llama_vocab_n_tokens(vocab):
    return 1257


def llama_log_callback(function):
    return function


def __getattr__(name):
    if not name.startswith("llama_"):
        raise AttributeError(name)
    return lambda *given: Record()
'''
LOOKUP = """
class LlamaPromptLookupDecoding:
    def __init__(self, max_ngram_size, num_pred_tokens):
        self.most = num_pred_tokens

    def __call__(self, ids):
        found = list(ids)
        for end in range(len(found) - 1, 1, -1):
            if found[end - 2 : end] == found[-2:]:
                return found[end : end + self.most]
        return []
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the library for child processes. Return the file of its calls."""
    folder = tmp_path / "site" / "llama_cpp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(LIBRARY)
    (folder / "llama_speculative.py").write_text(LOOKUP)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setenv("LLAMA_LOG", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The demo, in a folder where the converted file may be written."""
    folder = tmp_path / "demo"
    folder.mkdir()
    for file in DEMO.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def calls(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_adapter_alternates_with_the_base(library: Path, demo: Path, tmp_path: Path):
    sizes = "--rows 2 --adapters 2 --rank 3 --tokens 4 --rounds 2 --weights stored"
    options = ["--checkpoint", str(demo), "--python", f"llama.cpp={sys.executable}"]
    (result,) = main([*sizes.split(), *options])
    assert result.peer_base is not None and result.peer_base.median > 0 and result.peer_relative is not None
    found = calls(library)
    assert [one["active"] for one in found if "active" in one] == [False, True] * 3
    assert sum(len(one.get("tokens", ())) == 2 for one in found) == 6 * 4, "steps of both rows"


def test_an_adapter_file_has_the_matrices_by_their_names_in_llama_cpp(tmp_path: Path):
    (folder,) = write_adapters(DEMO, tmp_path, 1, 2).values()
    reader = gguf.GGUFReader(write_adapter(DEMO, folder))
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["adapter.type"].contents() == "lora"
    assert reader.fields["adapter.lora.alpha"].contents() == 2.0
    shapes = {one.name: tuple(one.shape[::-1]) for one in reader.tensors}
    assert len(shapes) == 4 * 7 * 2
    assert shapes["blk.3.ffn_down.weight.lora_a"] == (2, 640) and shapes["blk.0.attn_q.weight.lora_b"] == (256, 2)
    assert all(np.isfinite(one.data).all() for one in reader.tensors)


def test_lookup_of_llama_cpp_runs_in_the_same_rounds(library: Path, demo: Path):
    text = Text((5, 6, 7, 8, 9, 10, 11, 5, 6), (7, 8, 9, 10, 11, 20, 21))
    with (
        LLM(demo, speculation="off", max_context=64) as llm,
        LlamaCppPeer(sys.executable, demo, "stored", threads=1, tokens=64) as peer,
    ):
        results = measure("rag", Scenario((text,), ("off",)), {"off": llm}, 1, peer, 3)
    rates = {one.mode: one for one in results}
    assert list(rates) == ["off", *speculation.PEER] and rates["llama.cpp"].relative.median == 1.0
    steps = [one["tokens"] for one in calls(library) if len(one["tokens"]) != len(text.prompt)]
    plain, drafted = [7, 8, 9, 10, 11, 20], [[7, 8, 9, 10], [11, 5], [20]]
    assert steps == ([[token] for token in plain] + drafted) * 2
