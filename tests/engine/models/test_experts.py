"""Tests of experts in config.json: their layers, number and keys, and rejected values."""

import pytest

from engine import llm
from engine.api.errors import CheckpointError
from engine.models.families import ARCHITECTURES
from engine.models.parts import MLP, Experts, bodies, has_experts
from engine.models.sources import linear_paths, sources, unquantized

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
QWEN2, QWEN3 = "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"
OTHERS = ("MixtralForCausalLM", "OlmoeForCausalLM")


def declared(name, **more):
    return ARCHITECTURES[name]({**CONFIG, "architectures": [name], **more})


def mlps(model):
    return [next(body for body in bodies(block[1])) for block in model.blocks]


@pytest.mark.parametrize("name", [QWEN2, QWEN3])
@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"mlp_only_layers": None, "decoder_sparse_step": 3}, [0, 0, 1, 0]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [0, 0, 0, 1]),
    ],
)
def test_layers_with_experts_are_those_that_the_keys_name(name, keys, sparse):
    found = mlps(declared(name, **keys))
    assert [isinstance(body, Experts) for body in found] == [bool(one) for one in sparse]
    assert all(body.intermediate_size == (4 if isinstance(body, Experts) else 6) for body in found)


@pytest.mark.parametrize("name", [QWEN2, QWEN3, *OTHERS])
def test_both_names_of_the_number_of_experts_are_read(name):
    """Published files say num_experts (Mixtral: num_local_experts); newer exporters say num_local_experts for some."""
    without = {key: value for key, value in CONFIG.items() if key != "num_experts"}
    for key in ("num_experts", "num_local_experts"):
        model = ARCHITECTURES[name]({**without, "architectures": [name], key: 3})
        assert {body.num_experts for body in mlps(model)} == {3} and has_experts(model)


@pytest.mark.parametrize("name", [QWEN2, QWEN3, "OlmoeForCausalLM"])
def test_weights_of_the_chosen_sum_to_one_where_norm_topk_prob_is_set(name):
    found = [mlps(declared(name, **more))[0].scores for more in ({}, {"norm_topk_prob": True})]
    assert found == ["softmax", "softmax_chosen"]
    assert mlps(declared("MixtralForCausalLM"))[0].scores == "softmax_chosen"


def test_every_tensor_of_a_layer_with_a_shared_expert_is_named():
    model = declared(QWEN2, num_hidden_layers=1)
    found = {name: shape for name, shape in sources(model).items() if ".mlp." in name}
    wanted = {"gate": (5, 8), "shared_expert_gate": (1, 8)}
    for path, inner in (("shared_expert", 10), *((f"experts.{e}", 4) for e in range(5))):
        wanted |= {f"{path}.gate_proj": (inner, 8), f"{path}.up_proj": (inner, 8), f"{path}.down_proj": (8, inner)}
    assert found == {f"model.layers.0.mlp.{name}.weight": shape for name, shape in wanted.items()}
    assert unquantized(model) == {f"model.layers.0.mlp.{name}.weight" for name in ("gate", "shared_expert_gate")}
    assert {path for path in linear_paths(model) if ".mlp." in path} == {
        f"model.layers.0.mlp.{name}" for name in wanted
    }


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (QWEN3, {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, but num_experts is 5; a token cannot take more"),
        (OTHERS[0], {"num_local_experts": 1}, "num_experts_per_tok is 2, but num_local_experts is 1"),
        (QWEN3, {"num_experts": 0}, "num_experts is 0; it must be a whole number of at least 1"),
        (QWEN2, {"mlp_only_layers": "0"}, "mlp_only_layers is '0'; it must be a list of layers' numbers"),
        (QWEN2, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be"),
        (OTHERS[1], {"clip_qkv": 8.0}, "clip_qkv is set: clipping of queries, keys and values is not supported"),
    ],
)
def test_invalid_expert_settings_are_rejected_with_the_key(name, keys, message):
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        declared(name, **keys)


def test_every_other_layer_below_max_window_layers_has_a_window_in_qwen2_moe():
    keys = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3}
    model = declared(QWEN2, **keys)
    assert [block[0].body.window for block in model.blocks] == [3, None, 3, None]
    # newer exporters write 0 where there is none
    assert {block[0].body.window for block in declared(QWEN2, sliding_window=0).blocks} == {None}
    assert all(isinstance(body, MLP) for body in mlps(declared(QWEN2, mlp_only_layers=[0, 1, 2, 3])))


def test_without_a_plan_too_models_with_experts_have_fused_kernels_on_a_gpu(monkeypatch):
    for there, wanted in ((True, "triton"), (False, "torch")):
        monkeypatch.setattr(llm, "installed", lambda there=there: there)
        assert llm._kernels("cuda", "bfloat16", declared(QWEN3)) == wanted
