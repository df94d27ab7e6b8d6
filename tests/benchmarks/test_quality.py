"""The accuracy benchmark: its measures against plain formulas, and a whole run on a tiny GGUF file."""

import json
import math
import sys
from pathlib import Path

import gguf
import pytest
import torch

from benchmarks import quality
from benchmarks.quality import Logprobs, windows_of
from benchmarks.quality_files import tokenize, write_formats
from benchmarks.quality_llama import LlamaCpp
from tests.engine.layers.test_gguf import gguf_name, permute
from tests.engine.quantized_writers import random_model
from tests.tiers import thinned

ROOT = Path(__file__).resolve().parents[2]
TEXT = "A short text of 43 bytes, é and 1234 in it."


def byte_tokens():
    """GPT-2's characters for the 256 bytes, in the order of the bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A random tied Llama whose tokens are bytes, and "th", "he" and "12"; digits are never joined."""
    model = random_model("Llama", vocab_size=259, tie_word_embeddings=True)
    c = model.config
    path = tmp_path_factory.mktemp("quality") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_tokens(), "th", "he", "12"])
    writer.add_token_merges(["t h", "h e", "1 2"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if ".q_proj." in name:
            values = permute(values, c.num_attention_heads)
        if ".k_proj." in name:
            values = permute(values, c.num_key_value_heads)
        writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA_CPP = """
import ctypes, sys

__version__ = "1.2.3"
LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_Q4_0 = 7, 2
LLAMA_FTYPE_MOSTLY_Q4_K_M, LLAMA_FTYPE_MOSTLY_Q6_K, LLAMA_FTYPE_MOSTLY_IQ4_XS = 15, 18, 30
VOCAB = 259


class Settings:
    ftype = n_ctx = n_batch = n_ubatch = n_threads = n_threads_batch = 0


class Batch:
    def __init__(self, most):
        self.token, self.pos, self.n_seq_id, self.logits = ([0] * most for _ in range(4))
        self.seq_id = [[0] for _ in range(most)]


def nothing(*arguments):
    return 0


llama_model_quantize_default_params = llama_model_default_params = llama_context_default_params = Settings
llama_backend_init = llama_get_memory = llama_model_get_vocab = llama_synchronize = nothing
llama_model_load_from_file = llama_init_from_model = llama_memory_clear = nothing
llama_batch_init = lambda most, embed, rows: Batch(most)
llama_vocab_n_tokens = lambda vocab: VOCAB


def llama_model_quantize(source, target, settings):
    sys.path.insert(0, {root!r})
    from pathlib import Path
    from benchmarks.quality_files import write_formats
    kind = {{7: "Q8_0", 2: "Q4_0", 15: "Q5_1", 18: "Q8_0", 30: "Q5_0"}}[settings.ftype]
    folder = Path(target.decode()).parent / "made"
    write_formats(Path(source.decode()), folder, [kind])[kind].joinpath("model.gguf").rename(target.decode())


def llama_decode(context, batch):
    global logits
    logits = (ctypes.c_float * (batch.n_tokens * VOCAB))()
    for at in range(batch.n_tokens):
        assert batch.pos[at] == at and batch.logits[at]
        logits[at * VOCAB + batch.token[at]] = 5.0  # it expects each token once more
    return 0


def llama_get_logits(context):
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
"""
"""Fake of llama-cpp-python, which the tests do not install: has the calls of the benchmark, and known logits."""


@pytest.fixture
def llama_python(tmp_path):
    """An interpreter that has LLAMA_CPP."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "llama_cpp.py").write_text(LLAMA_CPP.format(root=str(ROOT)))
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site:$PYTHONPATH exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_llama_cpp_is_scored_at_the_same_positions(llama_python, tmp_path):
    """The logits of known tokens: 5 for the token itself, 0 for all others."""
    llama = LlamaCpp(llama_python)
    windows = [[5, 5, 5, 7], [9, 3]]
    found = llama.log_probabilities(tmp_path / "model.gguf", windows, 1)
    assert llama.version == "1.2.3" and [tuple(rows.shape) for rows in found] == [(3, 259), (1, 259)]
    total = math.log(math.exp(5) + 258)
    chosen = Logprobs(windows, found).chosen().tolist()
    assert chosen == pytest.approx([5 - total, 5 - total, -total, -total], rel=1e-6)


def test_a_failure_of_llama_cpp_is_reported(llama_python):
    llama = LlamaCpp(llama_python)
    with pytest.raises(SystemExit, match="score /no.gguf .* failed"):
        llama.log_probabilities(Path("/no.gguf"), [], 1)


@pytest.mark.parametrize("settings", thinned([4, len(quality.LLAMA_SETTINGS)], kept=[4]))
def test_a_run_beside_llama_cpp_measures_both_on_its_files(file, llama_python, tmp_path, monkeypatch, capsys, settings):
    (tmp_path / "text.txt").write_text("aabb" * 5)
    out = tmp_path / "found.json"
    names = [one.name for one in quality.LLAMA_SETTINGS[:settings]]
    arguments = ["--model", str(file), "--texts", str(tmp_path), "--kernels", "base", "--threads", "1"]
    monkeypatch.setattr(
        sys, "argv", ["quality", *arguments, "--out", str(out), "--llama-cpp", llama_python, "--settings", *names]
    )
    quality.main()
    found = json.loads(out.read_text())
    assert found["settings"]["llama_cpp"] == "1.2.3" and set(found["results"]) == {"float32 (torch)", *names}
    # 10 of the 19 tokens repeat the previous token; the others share the remaining probability.
    expected = math.exp(math.log(math.exp(5) + 258) - 5 * 10 / 19)
    for name in names:
        result = found["results"][name]["all"]
        if name.endswith("llama.cpp"):
            assert result["perplexity"] == pytest.approx(expected, rel=1e-5) and result["kl"] > 0
        else:
            assert abs(found["results"][name]["arithmetic"]["kl"]) < result["kl"]
    assert "llama-cpp-python 1.2.3" in capsys.readouterr().out


def test_text_is_tokenized_by_the_file(file):
    assert tokenize(file, TEXT) == list(TEXT.encode())
    assert tokenize(file, "the") == [256, ord("e")]


def test_windows_cover_each_text_once(file, tmp_path):
    for number, length in enumerate((1, 512, 1100)):
        (tmp_path / f"{number}.txt").write_text("x" * length)
    assert [len(window) for window in windows_of(file, tmp_path)] == [512, 512, 512, 76]
    assert [len(window) for window in windows_of(file, tmp_path, 1)] == [512, 512]


def test_differences_equal_the_formulas():
    dice = torch.Generator().manual_seed(0)
    windows = [[1, 0, 2], [2, 2]]
    base = [torch.randn(2, 3, generator=dice).log_softmax(1), torch.randn(1, 3, generator=dice).log_softmax(1)]
    other = [rows.add(torch.randn(rows.shape, generator=dice)).log_softmax(1) for rows in base]
    found = Logprobs(windows, other).difference(Logprobs(windows, base))
    p, q = torch.cat(base).exp().tolist(), torch.cat(other).exp().tolist()
    nll = [-math.log(row[token]) for row, token in zip(q, (0, 2, 2), strict=True)]
    was = [-math.log(row[token]) for row, token in zip(p, (0, 2, 2), strict=True)]
    assert found.perplexity == pytest.approx(math.exp(sum(nll) / 3), rel=1e-5)
    assert found.change == pytest.approx(math.exp((sum(nll) - sum(was)) / 3) - 1, rel=1e-5)
    divergence = sum(a * math.log(a / b) for one, two in zip(p, q, strict=True) for a, b in zip(one, two, strict=True))
    assert found.kl == pytest.approx(divergence / 3, rel=1e-4)
    tops = sum(one.index(max(one)) == two.index(max(two)) for one, two in zip(p, q, strict=True))
    assert found.same_top == pytest.approx(tops / 3)


def test_formats_have_the_weights_of_their_names(file, tmp_path):
    made = write_formats(file, tmp_path)
    tensors = {
        name: {one.name: one for one in gguf.GGUFReader(folder / "model.gguf").tensors} for name, folder in made.items()
    }
    for name, kind in (("plain", "F32"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("int8_restored", "F32")):
        assert tensors[name]["blk.0.ffn_up.weight"].tensor_type.name == kind
        assert tensors[name]["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert set(write_formats(file, tmp_path / "some", ["Q8_0", "plain"])) == {"original", "plain", "Q8_0"}
    for bits, levels in (("int8", 255), ("int4", 16)):
        row = torch.from_numpy(tensors[f"{bits}_restored"]["blk.0.ffn_up.weight"].data[0].copy())
        part = row if bits == "int8" else row[:32]
        assert 2 < len(part.unique()) <= levels and "output.weight" in tensors[f"{bits}_restored"]
    pairs = tensors["bf16_restored"], tensors["plain"]
    rounded, plain = (torch.from_numpy(one["blk.0.ffn_up.weight"].data.copy()) for one in pairs)
    assert torch.equal(rounded, plain.bfloat16().float()) and not torch.equal(rounded, plain)


def test_torch_simulates_products_of_bf16_numbers():
    x, weight = torch.randn(5, 300), torch.randn(7, 300)
    with quality.Bf16Products():
        found = torch.nn.functional.linear(x, weight)
    want = x.bfloat16().double() @ weight.bfloat16().double().T
    assert (found - want).abs().max() < 1e-4 < (x.double() @ weight.double().T - want).abs().max()


def test_a_run_writes_every_setting(file, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "found.json"
    arguments = [
        "--model",
        str(file),
        "--texts",
        str(tmp_path),
        "--kernels",
        "base",
        "--threads",
        "1",
        "--out",
        str(out),
    ]
    names = [one.name for one in quality.SETTINGS]
    monkeypatch.setattr(sys, "argv", ["quality", *arguments, "--settings", *names])
    quality.main()
    results = json.loads(out.read_text())["results"]
    assert set(results) == {"float32 (torch)", *names}
    assert results["float32 (torch)"]["all"]["kl"] == 0.0
    for name in ("stored", "original file"):
        assert abs(results[name]["arithmetic"]["kl"]) < 1e-6 and results[name]["all"]["same_top"] == 1.0
    assert results["int4"]["all"]["kl"] > results["int8"]["all"]["kl"] > 0
    for name in ("Q8_0", "int8", "Q4_0", "int4", "bfloat16 products"):
        assert results[name]["arithmetic"]["kl"] > 0
    assert "written to" in capsys.readouterr().out
