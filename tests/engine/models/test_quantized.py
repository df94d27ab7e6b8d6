"""Which layers a quantization_config covers. The counts for compressed-tensors were taken from its own
match_named_modules (0.20.0) on a tree of torch.nn.Linear; for the others transformers itself is asked."""

import dataclasses

import pytest
from transformers.quantizers import quantizers_utils

from engine.api.errors import CheckpointError
from engine.models.llama import declare
from engine.models.quantized import quantized_paths, refuse_quantized
from engine.models.sources import linear_paths

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
}
MODEL = declare(CONFIG)
PATHS = linear_paths(MODEL)


def quantized(**settings):
    return quantized_paths(settings, PATHS, "lm_head", "config.json: quantization_config")


def compressed(targets, ignore):
    return quantized(quant_method="compressed-tensors", config_groups={"group_0": {"targets": targets}}, ignore=ignore)


def test_the_paths_are_those_of_a_llama():
    assert len(PATHS) == len(set(PATHS)) == 12 * 7 + 1
    assert PATHS[:2] == ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
    assert PATHS[-1] == "lm_head"
    tied = dataclasses.replace(MODEL, head=dataclasses.replace(MODEL.head, tied=True))
    assert linear_paths(tied) == PATHS[:-1]


@pytest.mark.parametrize(
    ("targets", "ignore", "count", "first_left_out"),
    [
        (["Linear"], [], 85, None),
        (["Linear"], None, 85, None),
        (["Linear"], ["lm_head"], 84, "lm_head"),
        (["Linear"], ["re:.*lm_head"], 84, "lm_head"),
        (["Linear"], ["model.layers.1.self_attn.q_proj"], 84, "model.layers.1.self_attn.q_proj"),
        (["Linear"], ["model.layers.1"], 85, None),
        (["Linear"], ["q_proj"], 85, None),
        (["Linear"], ["re:self_attn"], 85, None),
        (["Linear"], [r"re:model\.layers\.1\."], 78, "model.layers.1.self_attn.q_proj"),
        (["Linear"], [r"re:.*layers\.1.*q_proj$"], 82, "model.layers.1.self_attn.q_proj"),
        (["Linear"], ["Linear"], 0, "model.layers.0.self_attn.q_proj"),
        (["Linear"], ["Module"], 0, "model.layers.0.self_attn.q_proj"),
        (["Linear"], ["re:.*"], 0, "model.layers.0.self_attn.q_proj"),
        (["re:.*mlp.*"], [], 36, "model.layers.0.self_attn.q_proj"),
        (["model.layers.3.mlp.up_proj"], ["lm_head"], 1, "model.layers.0.self_attn.q_proj"),
        ([], [], 0, "model.layers.0.self_attn.q_proj"),
    ],
)
def test_compressed_tensors_covers_what_its_own_library_covers(targets, ignore, count, first_left_out):
    found = compressed(targets, ignore)
    assert len(found) == count
    assert next((path for path in PATHS if path not in found), None) == first_left_out


@pytest.mark.skipif(
    not hasattr(quantizers_utils, "should_convert_module"), reason="transformers 5 has the rule that is followed here"
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"])
@pytest.mark.parametrize(
    "skipped",
    [
        [],
        ["model.layers.1"],
        ["model.layers.1."],
        ["q_proj"],
        ["proj"],
        ["mlp"],
        [r"model\.layers\.\d+\.mlp"],
        [r"model\.layers\.(1|2)"],
        ["model", "lm_head"],
        ["model.layers.1.mlp.up_proj", "lm_head"],
    ],
)
def test_other_methods_leave_out_what_transformers_leaves_out(key, skipped):
    want = [path for path in PATHS if quantizers_utils.should_convert_module(path, [*skipped, "lm_head"])]
    assert list(quantized(quant_method="fp8", **{key: skipped})) == want


def test_the_head_is_left_out_where_nothing_is_said():
    assert quantized(quant_method="gptq", bits=4) == PATHS[:-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("gptq", "quantization_config is 'gptq'; it must be an object"),
        ({"modules_to_not_convert": "mlp"}, "quantization_config.modules_to_not_convert is 'mlp'; it must be a list"),
        ({"modules_to_not_convert": ["("]}, "is no regular expression"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups must be an object"),
        (
            {"quant_method": "compressed-tensors", "ignore": [3]},
            "quantization_config.ignore is [3]; it must be",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": "Linear"}}},
            "quantization_config.config_groups.g.targets is 'Linear'",
        ),
    ],
)
def test_damaged_settings_are_named(settings, words):
    with pytest.raises(CheckpointError) as caught:
        refuse_quantized({"quantization_config": settings}, MODEL, "config.json")
    assert words in str(caught.value)


def test_the_refusal_names_method_count_and_both_kinds_of_layers():
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"targets": ["Linear"]}},
        "ignore": ["lm_head", r"re:model\.layers\.0\.mlp\..*"],
    }
    with pytest.raises(CheckpointError) as caught:
        refuse_quantized({"quantization_config": settings}, MODEL, "/m/config.json")
    assert str(caught.value) == (
        "/m/config.json: the checkpoint is quantized (compressed-tensors), which is not served: 81 of 85 projections "
        "are, such as model.layers.0.self_attn.q_proj, but not model.layers.0.mlp.gate_proj, "
        "model.layers.0.mlp.up_proj, model.layers.0.mlp.down_proj and 1 more; "
        "use the float32, bfloat16 or float16 checkpoint of the same model"
    )
