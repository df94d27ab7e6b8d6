"""Which layers a quantization_config covers. The counts for compressed-tensors were taken from its own
match_named_modules (0.20.0) on a tree of torch.nn.Linear; for the others transformers itself is asked."""

import dataclasses

import pytest
from transformers.quantizers import quantizers_utils

from engine.api.errors import CheckpointError
from engine.formats.awq import Awq
from engine.formats.compressed_tensors import Int8, Packed
from engine.formats.fp8 import INVERSES, NAMES, Fp8
from engine.formats.gptq import Gptq
from engine.formats.native import E4M3, Groups
from engine.formats.registry import BUILT_IN
from engine.formats.unread import UNREAD
from engine.models.llama import declare
from engine.models.quantized import quantized_paths, read_quantization
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
    return tuple(quantized_paths(settings, PATHS, "lm_head", "config.json: quantization_config"))


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


def test_head_is_not_quantized_by_default():
    assert quantized(quant_method="gptq", bits=4) == PATHS[:-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("gptq", "quantization_config is 'gptq'; it must be an object"),
        ({"modules_to_not_convert": "mlp"}, "quantization_config.modules_to_not_convert is 'mlp'; it must be a list"),
        ({"modules_to_not_convert": ["("]}, "is not a regular expression"),
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
        read_quantization({"quantization_config": settings}, MODEL, "config.json")
    assert words in str(caught.value)


def test_the_refusal_names_method_count_and_both_kinds_of_layers():
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        "ignore": ["lm_head", r"re:model\.layers\.0\.mlp\..*"],
    }
    with pytest.raises(CheckpointError) as caught:
        read_quantization({"quantization_config": settings}, MODEL, "/m/config.json")
    assert str(caught.value) == (
        "/m/config.json: the checkpoint is quantized (compressed-tensors), which is not supported: "
        "a.weights.strategy is None; supported are tensor, channel, group, block; 81 of 85 projections "
        "are quantized, such as model.layers.0.self_attn.q_proj, but not model.layers.0.mlp.gate_proj, "
        "model.layers.0.mlp.up_proj, model.layers.0.mlp.down_proj and 1 more; "
        "use a checkpoint in gptq or awq of 4 bits, fp8, ModelOpt's FP8 or NVFP4, compressed-tensors (pack-quantized, "
        "int-quantized or float-quantized), bitsandbytes or GGUF, or the unquantized checkpoint (float32, bfloat16, "
        "float16)"
    )


def eight(scales, inputs, named=NAMES):
    return Fp8(E4M3(scales, inputs), named)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def packed(weights=None, inputs=None, **more):
    own = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128} | (weights or {})
    group = {"targets": ["Linear"], "weights": own, "input_activations": inputs}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    return settings | {"ignore": ["lm_head"]} | more


def read(settings):
    return read_quantization({"quantization_config": settings}, MODEL, "config.json")


@pytest.mark.parametrize(
    ("settings", "scheme", "words"),
    [
        (GPTQ, Gptq.of(Groups(4, 128), zero_offset=1), "4 bits (gptq, groups of 128)"),
        (
            {**GPTQ, "group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
            Gptq.of(Groups(4, None, zeros=True, ordered=True)),
            "4 bits (gptq, one scale per output)",
        ),
        ({**GPTQ, "bits": 8, "group_size": 32}, Gptq.of(Groups(8, 32), zero_offset=1), "8 bits (gptq, groups of 32)"),
        (AWQ, Awq.of(Groups(4, 64, zeros=True)), "4 bits (awq, groups of 64)"),
        ({**AWQ, "version": "GEMM"}, Awq.of(Groups(4, 64, zeros=True)), "4 bits (awq, groups of 64)"),
        (packed(), Packed.of(Groups(4, 128)), "4 bits (compressed-tensors, groups of 128)"),
        (packed({"symmetric": False, "actorder": "group"}), Packed.of(Groups(4, 128, zeros=True, ordered=True)), None),
        (packed({"actorder": "weight"}), Packed.of(Groups(4, 128)), None),
        (packed({"num_bits": 8, "strategy": "channel", "group_size": None}), Packed.of(Groups(8, None)), None),
        (
            packed(
                {"num_bits": 8, "strategy": "channel"},
                {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
                format="int-quantized",
            ),
            Int8.of(Groups(8, None, inputs="dynamic")),
            "8 bits (compressed-tensors, one scale per output)",
        ),
    ],
)
def test_scheme_of_each_projection(settings, scheme, words):
    found = read(settings)
    assert set(found.formats) == set(PATHS[:-1]) and set(found.formats.values()) == {scheme}
    assert words in (None, str(found))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def floats(weights=None, inputs=None, **more):
    own = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"} | (weights or {})
    return packed() | {"format": "float-quantized"} | more | {
        "config_groups": {"g": {"targets": ["Linear"], "weights": own, "input_activations": inputs}}
    }  # fmt: skip


TOKEN = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("settings", "scheme", "words"),
    [
        (FP8, eight("block", "dynamic", INVERSES), "fp8 (fp8, blocks of 128 x 128)"),
        ({**FP8, "fmt": "e4m3", "scale_fmt": "ue8m0"}, eight("block", "dynamic", INVERSES), None),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            eight("tensor", "static"),
            "fp8 (fp8, one scale per matrix)",
        ),
        ({**FP8, "weight_block_size": None}, eight("tensor", "dynamic"), None),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, eight("tensor", "static"), None),
        (floats(), eight("channel", None), "fp8 (compressed-tensors, one scale per output)"),
        (floats({}, TOKEN), eight("channel", "dynamic"), None),
        (floats({"strategy": "tensor"}, STATIC), eight("tensor", "static"), None),
        (
            floats({"strategy": "block", "block_structure": [128, 128]}, {**TOKEN, "strategy": "group"}),
            eight("block", "dynamic"),
            "fp8 (compressed-tensors, blocks of 128 x 128)",
        ),
    ],
)
def test_scheme_of_fp8_settings(settings, scheme, words):
    found = read(settings)
    assert set(found.formats) == set(PATHS[:-1]) and set(found.formats.values()) == {scheme}
    assert words in (None, str(found))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {**FP8, "weight_block_size": [64]},
            r"weight_block_size is \[64\]; it must be a list of two whole numbers above 0, .*; 84 of 85",
        ),
        ({**FP8, "fmt": "e4m3fnuz"}, "fmt is 'e4m3fnuz'; supported are e4m3, float8_e4m3fn, e5m2, float8_e5m2"),
        ({**FP8, "activation_scheme": "none"}, "activation_scheme is 'none'; supported are dynamic, static"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'; supported is fp8"),
        ({**FP8, "modules_to_convert": ["embed"]}, r"modules_to_convert is \['embed'\]; it must be left out"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "quant_algo is 'NVFP4_SVD'; supported are FP8, "),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "group_size is 32; supported with NVFP4 is 16",
        ),
        (floats({"num_bits": 4}), "float-quantized of 4 bits in floats; supported are float-quantized of 8, nvfp4"),
        (floats(format="mxfp6-pack-quantized"), "g is mxfp6-pack-quantized of 8 bits in floats"),
        (floats({"group_size": 16}, format="mxfp8-quantized"), "group_size is 16; mxfp8-quantized has groups of 32"),
        (floats({"strategy": "group", "group_size": 0}), "group_size is 0; it must be a whole number above 0"),
        (floats({"strategy": "token"}), "strategy is 'token'; supported are tensor, channel, group, block"),
        (floats({"strategy": "block", "block_structure": 64}), "block_structure is 64; it must be a list of two"),
        (floats({"symmetric": False}), "supported are symmetric ones"),
        (floats({}, {**STATIC, "strategy": "token"}), "supported are dynamic ones, and static ones of strategy tensor"),
        (floats({}, {**TOKEN, "dynamic": "local"}), "supported are dynamic ones, and static ones"),
        (floats({}, {**TOKEN, "type": "int"}), "with fp8 weights, supported are none, and symmetric float of 8 bits"),
    ],
)
def test_unsupported_fp8_settings_give_a_reason(settings, words):
    with pytest.raises(CheckpointError, match=words):
        read(settings)


def test_modelopt_leaves_out_what_patterns_of_a_shell_name():
    found = quantized(quant_method="modelopt", exclude_modules=["lm_head", "model.layers.1.*", "*.o_proj"])
    left = [path for path in PATHS if path not in found]
    assert left == [p for p in PATHS if p == "lm_head" or p.startswith("model.layers.1.") or p.endswith(".o_proj")]


def test_scales_of_whole_matrices_have_the_names_that_the_checkpoint_gives_them():
    made = read({**FP8, "weight_block_size": None})
    names = {f"{PATHS[0]}.weight_scale_inv", f"{PATHS[1]}.weight_scale"}
    found = made.named(names).formats
    assert [found[path].names[0] for path in PATHS[:3]] == ["weight_scale_inv", "weight_scale", "weight_scale"]
    assert read(FP8).named(names) == read(FP8)


def test_groups_of_several_kinds_and_a_quantized_head():
    settings = packed()
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    first = {"targets": [r"re:.*mlp.*"], "weights": eight, "format": "int-quantized"}
    settings["config_groups"] = {"a": first, **settings["config_groups"]}
    found = read(settings)
    assert found.formats["model.layers.3.mlp.up_proj"] == Int8.of(Groups(8, None))
    assert found.formats["model.layers.3.self_attn.q_proj"] == Packed.of(Groups(4, 128))
    assert str(found) == "compressed-tensors (4 bits, groups of 128; 8 bits, one scale per output)"
    assert "lm_head" in read({**GPTQ, "lm_head": True}).formats


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {**GPTQ, "bits": 9},
            r"\(gptq, 9 bits\), which is not supported: bits is 9; gptq is supported with 2 to 8 bits",
        ),
        ({**GPTQ, "group_size": 0}, "group_size is 0; supported are whole numbers above 0, and -1"),
        ({**GPTQ, "group_size": "128"}, "group_size is '128'; supported are whole numbers above 0, and -1"),
        ({**GPTQ, "checkpoint_format": "bitblas"}, "format is 'bitblas'; supported are gptq, gptq_v2 and marlin"),
        ({**GPTQ, "checkpoint_format": "marlin", "desc_act": True}, "is 'marlin'; it has 4 bits, sym, groups of 128"),
        ({**GPTQ, "is_marlin_format": True, "group_size": 64}, "is 'marlin'; it has 4 bits, sym, groups of 128 or -1"),
        ({**GPTQ, "pack_dtype": "int64"}, "pack_dtype is 'int64'; supported is int32"),
        ({**GPTQ, "dynamic": {".*down.*": {"bits": 1}}}, r"dynamic\.\.\*down\.\*\.bits is 1; gptq is supported"),
        ({"quant_method": "gptq"}, "bits is None"),
        ({**AWQ, "bits": 8}, r"\(awq, 8 bits\), which is not supported: bits is 8; awq is supported with 4 bits"),
        ({**AWQ, "version": "gemv_fast"}, "version is 'gemv_fast'; supported are gemm and gemv"),
        ({**AWQ, "zero_point": False}, "zero_point is False; it must be true"),
        (
            {"quant_method": "other"},
            r"\(other\), which is not supported: "
            r"supported are gptq, awq, fp8, modelopt, compressed-tensors, mxfp4, bitsandbytes, auto-round, ",
        ),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is None; it or load_in_8bit must be true"),
        ({}, r"\(unknown\), which is not supported"),
        (packed({"num_bits": 1}), "pack-quantized of 1 bits; supported are pack-quantized of 2 to 8 bits, and int-"),
        (packed({"strategy": "block"}), "strategy is 'block'; supported are group and channel"),
        (packed({"group_size": -2}), r"g\.weights\.group_size is -2; supported are whole numbers above 0"),
        (packed({"type": "float"}), "g is pack-quantized of 4 bits in floats; supported are float-quantized of 8"),
        (packed({"type": "other"}), "supported are whole numbers, and float of 8 bits"),
        (packed(format="marlin-24"), "marlin-24 of 4 bits"),
        (packed({}, {"num_bits": 8, "type": "float", "dynamic": True}), "supported are none, and int8"),
        (packed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is .*; it must be left out"),
    ],
)
def test_unsupported_settings_give_a_reason(settings, words):
    with pytest.raises(CheckpointError, match=words):
        read(settings)


HQQ = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
AO = {"quant_method": "torchao", "modules_to_not_convert": ["lm_head"]}
QUARK = {"quant_method": "quark", "exclude": ["lm_head"]}


def hqq(**params):
    return {**HQQ, "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1} | params}}


def ao(kind, **data):
    return {**AO, "quant_type": {"default": {"_type": kind, "_data": data}}}


def quark(**weight):
    return {**QUARK, "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"} | weight}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (hqq(nbits=6), "nbits is 6; supported are 1, 2, 3, 4, 8"),
        (hqq(axis=2), "axis is 2; supported are 0 and 1"),
        (hqq(group_size=None), "group_size is None; it must be a whole number above 0"),
        (ao("Int4WeightOnlyConfig"), "'Int4WeightOnlyConfig'; its tensors have the layout of a GPU kernel; supported"),
        (ao("Float8WeightOnlyConfig", granularity={"_type": "PerBlock"}), "granularity is 'PerBlock'; supported are"),
        (ao("IntxWeightOnlyConfig", weight_dtype={"_data": "int1"}), "weight_dtype is 'int1'; supported are int2"),
        ({**AO, "quant_type": "int4_weight_only"}, "quant_type is 'int4_weight_only'; supported are the settings of"),
        (quark(dtype="int4"), "weight.dtype is 'int4'; supported are fp8_e4m3, fp8_e5m2"),
        (quark(qscheme="per_group", group_size=16, scale_format="e8m0"), "weight.group_size is 16; supported is 32"),
        (quark(qscheme="per_group", group_size=32), "scale_format is None; supported is e8m0"),
        ({**quark(), "export": {"weight_format": "fake_quantized"}}, "weight_format is 'fake_quantized'"),
        ({**QUARK, "global_quant_config": {"weight": [{}, {}]}}, "it must be an object with one dtype"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type is 'mx_fp'; supported is int"),
        ({"quant_method": "auto-round", "bits": 3, "packing_format": "auto_round:auto_awq"}, "bits is 3; supported"),
        ({"quant_method": "inc", "bits": 4, "packing_format": "auto_round:fp8"}, "packing_format is 'auto_round:fp8'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "supported are nf4"),
        ({"quant_method": "exl3"}, r"\(exl3\), .*: ExLlamaV3 has trellis codes, .*; use a checkpoint of the model in"),
        ({"quant_method": "AQLM"}, r"\(AQLM\), .* indices of trained codebooks, .*; use a checkpoint of the model in"),
        ({"quant_method": "quip"}, "indices of trained codebooks"),
        ({"quant_method": "bitnet"}, "ternary weights .* use the model's GGUF file"),
    ],
)
def test_formats_that_are_not_read_are_refused_with_a_reason(settings, words):
    with pytest.raises(CheckpointError, match=words):
        read(settings)


def test_no_format_is_both_read_and_refused():
    assert not {one.name for one in BUILT_IN} & set(UNREAD)
    assert all("use " in text or "save " in text for text in UNREAD.values())


def test_settings_by_layer_of_other_libraries():
    params = {"nbits": 4, "group_size": 64}
    found = read(
        {**HQQ, "quant_config": {"self_attn.q_proj": {**params, "nbits": 8}, "mlp.up_proj": params, "o": None}}
    )
    assert {path.rpartition(".")[2]: one.bits for path, one in found.formats.items()} == {"q_proj": 8, "up_proj": 4}
    by_name = {"model.layers.0.mlp.up_proj": {"_type": "Int8WeightOnlyConfig", "_data": {}}, "_default": None}
    found = read(ao("FqnToConfig", fqn_to_config=by_name))
    assert list(found.formats) == ["model.layers.0.mlp.up_proj"]
    layers = {"*.mlp.*": {"weight": {"dtype": "int8", "qscheme": "per_channel"}}}
    found = read({**quark(), "exclude": ["lm_head", "re:.*o_proj"], "layer_quant_config": layers})
    assert str(found) == "quark (fp8 (e4m3), one scale per matrix; 8 bits, one scale per output)"
    assert len(found.formats) == 12 * 6 and "model.layers.0.self_attn.o_proj" not in found.formats


def test_projections_of_gptq_within_a_block():
    names = [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]]
    assert len(read({**GPTQ, "modules_in_block_to_quantize": names}).formats) == 12 * 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**GPTQ, "dynamic": ["x"]}, "quantization_config.dynamic must be an object of patterns"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, "is not a regular expression"),
        ({"quant_method": "auto-round", "extra_config": 3}, "extra_config must be an object of settings by layer"),
        ({**HQQ, "quant_config": {"q_proj": 4}}, "quant_config must be an object of settings"),
        (ao("FqnToConfig", fqn_to_config=3), "quant_type.default is damaged"),
        ({**QUARK, "layer_quant_config": [1]}, "layer_quant_config must be an object"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers must be an object"),
    ],
)
def test_damaged_settings_of_layers_are_named(settings, words):
    with pytest.raises(CheckpointError, match=words):
        read(settings)
