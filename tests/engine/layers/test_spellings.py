"""Checkpoints whose config.json is written the way older exporters wrote it declare the same model."""

import json

import pytest
import torch

from engine.models.checkpoint import read_checkpoint


def in_old_spelling(config):
    """rope_theta and rope_scaling at the top, the kind under "type", torch_dtype."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    old["torch_dtype"] = config["dtype"]
    if "linear_attention" in config.get("layer_types", ()):
        old["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    if "rope_parameters" not in config:  # transformers before 5 writes the rest so itself
        return {"torch_dtype": config["dtype"], **{key: value for key, value in config.items() if key != "dtype"}}
    parameters = dict(config["rope_parameters"])
    if "full_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = dict(parameters["full_attention"])
        old["sliding_window_pattern"] = 3
    old["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    kind = parameters.pop("rope_type")
    if "original_max_position_embeddings" in config:
        parameters.pop("original_max_position_embeddings", None)
    name = "rope_type" if "rope_local_base_freq" in old else "type"  # Gemma 3 is younger than "type"
    old["rope_scaling"] = None if kind == "default" else {name: kind, **parameters}
    return old


def test_the_old_spelling_declares_the_same_model(case, checkpoint, own_checkpoint):
    new = read_checkpoint(checkpoint(case).path)
    saved = own_checkpoint(case)
    saved.rewrite(in_old_spelling(saved.config()))
    old = read_checkpoint(saved.path)
    assert old.model == new.model
    assert old.dtype == new.dtype == "float32"
    assert old.eos_token_ids == new.eos_token_ids == (2,)


def test_what_is_nested_in_a_text_config_is_found(case, checkpoint, own_checkpoint):
    new = read_checkpoint(checkpoint(case).path)
    saved = own_checkpoint(case)
    inner = saved.config()
    outer = {"architectures": inner.pop("architectures"), "model_type": "wrapper", "text_config": inner}
    saved.rewrite(outer)
    assert read_checkpoint(saved.path).model == new.model


@pytest.mark.parametrize("name", ["llama-llama3", "phi3-long", "gemma3-scaled", "glm4", "qwen2-windows"])
def test_logits_of_an_old_spelling_equal_transformers_reading_it(name, own_checkpoint, driver, ids):
    saved = own_checkpoint(name)
    saved.rewrite(in_old_spelling(saved.config()))
    prompt = ids(29)
    got = driver(saved.path).run(prompt, 8)
    torch.testing.assert_close(got, saved.logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("spelling", ["su", "yarn", "longrope"])
def test_phi3_calls_longrope_by_several_names(spelling, checkpoint, own_checkpoint):
    saved = own_checkpoint("phi3-long")
    config = in_old_spelling(saved.config())
    config["rope_scaling"]["type"] = spelling
    saved.rewrite(config)
    assert read_checkpoint(saved.path).model == read_checkpoint(checkpoint("phi3-long").path).model


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2", "granite", "starcoder2", "cohere"],
)
def test_keys_that_are_missing_have_the_defaults_of_transformers(name, own_checkpoint, driver, ids):
    """All keys but the sizes are left out of config.json; transformers reads the same file."""
    saved = own_checkpoint(name)
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"}
    kept = sizes | {"architectures", "model_type", "num_key_value_heads", "dtype", "pad_token_id", "eos_token_id"}
    if name == "cohere":
        kept |= {"rope_theta"}  # whose default is another one since transformers 5; checkpoints of before state it
    # Tied weights are saved once: whether they are tied must stay known.
    saved.rewrite({k: v for k, v in saved.config().items() if k in kept or k == "tie_word_embeddings"})
    prompt = ids(13)
    torch.testing.assert_close(driver(saved.path).run(prompt, 13), saved.logits(prompt), atol=1e-4, rtol=0)


def test_end_tokens_of_the_generation_config_follow_those_of_the_config(own_checkpoint):
    saved = own_checkpoint("llama")
    (saved.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 5], "temperature": 0.6}))
    read = read_checkpoint(saved.path)
    assert read.eos_token_ids == (2, 7, 5)
    assert read.generation["temperature"] == 0.6


def test_the_type_of_the_largest_tensor_counts_where_none_is_declared(own_checkpoint):
    saved = own_checkpoint("llama")
    saved.rewrite({key: value for key, value in saved.config().items() if key != "dtype"})
    assert read_checkpoint(saved.path).dtype == "float32"
