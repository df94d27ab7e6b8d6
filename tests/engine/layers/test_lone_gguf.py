"""A GGUF file without a config.json: rotary positions, end tokens, and the path by which it is named."""

import json
import math
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine import LLM, Params
from engine.api.errors import CheckpointError
from engine.gguf.file import GgufFile
from engine.models.checkpoint import read_checkpoint
from engine.models.gguf_families import Keys
from tests.engine.layers.test_gguf import Type, want, write
from tests.engine.text.test_gguf_tokenizer import KINDS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_factors(writer, config):
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    dim = config.hidden_size // config.num_attention_heads
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    context = LLAMA3["original_max_position_embeddings"]
    low, high = (context / LLAMA3[f"{name}_freq_factor"] for name in ("low", "high"))
    factors = []
    for freq in freqs:
        length = 2 * math.pi / freq
        if length < high:
            factors.append(1)
        elif length > low:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (context / length - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    assert len(set(factors)) > 2
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def yarn(writer, config):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def spiral(writer, config):
    writer.add_string("llama.rope.scaling.type", "spiral")


def linear(writer, config):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


SCALED = {
    "llama3": (llama3_factors, LLAMA3),
    "yarn": (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "linear": (linear, {"rope_type": "linear", "factor": 2.0}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_are_read_from_the_file(kind, tmp_path, driver, ids):
    extra, scaling = SCALED[kind]
    folder, prompt = write(tmp_path / "m", {}, config=False, extra=extra), ids(37, 1)
    wanted = want(folder, prompt, "Llama", {"rope_scaling": scaling})
    torch.testing.assert_close(driver(folder).run(prompt, 5), wanted, atol=1e-4, rtol=0)
    plain = want(folder, prompt, "Llama", {})
    assert (wanted - plain).abs().max() > 1e-2


def test_another_scaling_is_refused(tmp_path):
    folder = write(tmp_path / "m", {}, config=False, extra=spiral)
    with pytest.raises(CheckpointError, match=r"llama\.rope\.scaling\.type is 'spiral'; supported are linear and yarn"):
        read_checkpoint(folder)


@pytest.mark.parametrize("listed", [(), ("66", "22"), (1.5, 2.5), (-1, 0)])
def test_a_list_without_sizes_is_refused(listed):
    keys = Keys(GgufFile(Path("m.gguf"), {"x.feed_forward_length": listed, "x.sizes": (0, 66, 22)}, ()), "x")
    assert keys.largest("sizes") == 66 and keys.largest("missing", 3) == 3
    with pytest.raises(CheckpointError, match="feed_forward_length is .* must be a number above 0"):
        keys.largest("feed_forward_length")


def with_tokens(kinds, **ids):
    def extra(writer, config):
        writer.add_token_list([*(f"t{token}" for token in range(config.vocab_size - 2)), "<|eot_id|>", "<|im_end|>"])
        writer.add_token_types([1] * (config.vocab_size - 2) + kinds)
        for name, token in ids.items():
            getattr(writer, f"add_{name}_token_id")(token)

    return extra


def test_tokens_that_end_replies_are_read_from_the_file(tmp_path):
    one = write(tmp_path / "one", {}, config=False, extra=with_tokens([1, 1], eot=7, eom=9))
    assert read_checkpoint(one).eos_token_ids == (2, 7, 9)
    # control tokens by their texts, where a converter wrote no key; the second is an ordinary token here
    other = write(tmp_path / "other", {}, config=False, extra=with_tokens([3, 1]))
    assert read_checkpoint(other).eos_token_ids == (2, 126)


def test_a_file_is_a_checkpoint_wherever_it_lies(tmp_path):
    file = write(tmp_path / "m", {"": Type.Q8_0}, config=False) / "model.gguf"
    shutil.copy(file, tmp_path / "m" / "other.gguf")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"of another model")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": 5}')
    read = read_checkpoint(file)
    assert (read.path, read.generation, read.eos_token_ids) == (file, {}, (2,))
    assert {info.file for info in read.tensors.values()} == {file}


def test_a_file_with_a_configuration_beside_it_means_its_folder(tmp_path):
    folder = write(tmp_path / "m", {"": Type.Q8_0})
    assert read_checkpoint(folder / "model.gguf").path == read_checkpoint(folder).path == folder


def complete(folder):
    """A GGUF file with all that a service needs, and its tokenizer."""
    backend = KINDS["smollm"]()
    size = backend.get_vocab_size()

    def tokenizer(writer, config):
        texts = {token: text for text, token in backend.get_vocab().items()}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([texts[token] for token in range(size)])
        writer.add_token_types([3 if token < 3 else 1 for token in range(size)])
        writer.add_token_merges([" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]])

        writer.add_chat_template("{{ messages[0]['content'] }}")

    return write(folder, {}, config=False, extra=tokenizer, vocab_size=size) / "model.gguf", backend


def test_a_file_generates_texts_by_its_own_tokenizer(tmp_path):
    file, backend = complete(tmp_path / "m")
    with LLM(file) as llm:
        made = llm.generate(["a fox"], Params(max_tokens=5, temperature=0.0, ignore_eos=True))[0]
        assert len(made.ids) == 5
        # a character that is cut off at the end may be one sign or several
        assert made.text.rstrip("\ufffd") == backend.decode(list(made.ids)).rstrip("\ufffd") != ""
