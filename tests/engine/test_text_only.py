"""Text decoders of models that read images, served alone: the same numbers as the whole model of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.api.config import TaskConfig
from engine.api.errors import TaskError, UnknownArchitecture
from engine.llm import LLM, Params
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.multimodal import ARCHITECTURES as MULTIMODAL
from engine.models.text_only import DECODERS

VOCAB, TOLERANCE = 96, 2e-4
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
GEMMA_4 = ["full_attention", "sliding_attention", "full_attention"]
TASK = TaskConfig(text_only=True)


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=8, query_pre_attn_scalar=8)
    eyes = transformers.SiglipVisionConfig(**EYES, image_size=16)
    config = transformers.Gemma3Config(text_config=text, vision_config=eyes, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4() -> Any:
    layers = {"global_head_dim": 16, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB}
    text = transformers.Gemma4TextConfig(
        **TEXT, **layers, sliding_window=8, layer_types=GEMMA_4, num_kv_shared_layers=1
    )
    return transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(text_config=text))


def llava() -> Any:
    eyes = transformers.CLIPVisionConfig(**EYES, image_size=16)
    config = transformers.LlavaConfig(vision_config=eyes, text_config=transformers.LlamaConfig(**TEXT))
    return transformers.LlavaForConditionalGeneration(config)


def llama4() -> Any:
    text = transformers.Llama4TextConfig(**TEXT, intermediate_size_mlp=40, num_local_experts=3, moe_layers=[1])
    eyes = transformers.Llama4VisionConfig(
        **EYES | {"intermediate_size": 64},
        **{"image_size": 16, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    )
    config = transformers.Llama4Config(text_config=text, vision_config=eyes)
    return transformers.Llama4ForConditionalGeneration(config)


def mistral3() -> Any:
    eyes = transformers.PixtralVisionConfig(**EYES, image_size=16, head_dim=8)
    text = transformers.MistralConfig(**TEXT, sliding_window=None)
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(vision_config=eyes, text_config=text)
    )


def qwen25() -> Any:
    text = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"rope_parameters": SECTIONS}
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=eyes)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3() -> Any:
    text = TEXT | {"rope_parameters": SECTIONS}
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    eyes |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=eyes)
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen35() -> Any:
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    text = TEXT | delta | {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"num_hidden_layers": 2, "head_dim": 16, "rope_parameters": SECTIONS | {"partial_rotary_factor": 0.5}}
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=eyes | {"num_position_embeddings": 16})
    return transformers.Qwen3_5ForConditionalGeneration(config)


MODELS = {
    "gemma3": gemma3,
    "llava": llava,
    "llama4": llama4,
    "mistral3": mistral3,
    "qwen2.5": qwen25,
    "qwen3": qwen3,
}
MODELS |= {"qwen3.5": qwen35, "gemma4": gemma4}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with random weights, norms among them, and its model."""
    torch.manual_seed(7)
    model = MODELS[request.param]().eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    path = tmp_path_factory.mktemp("seeing") / request.param
    model.save_pretrained(path)
    return path, model


def logprobs(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return found


def check(path: Path, model: Any) -> None:
    """Compare greedy replies and their log probabilities with the whole model."""
    prompts = [(5, 9, 3), tuple(range(20, 41)), (7,)]
    params = Params(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    with LLM(path, block_tokens=4, max_context=48, kv_bytes=1 << 20, threads=1, task=TASK) as llm:
        replies = llm.generate([list(prompt) for prompt in prompts], params)
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = reply.ids
        want = logprobs(model, (*prompt, *ids))[len(prompt) - 1 : -1]
        for step, token in enumerate(ids):
            assert want[step, token] >= want[step].max() - TOLERANCE
            assert abs(reply.logprobs[step].logprob - want[step, token].item()) < TOLERANCE


def test_the_text_decoder_computes_what_the_whole_model_computes_for_text(saved: tuple[Path, Any]) -> None:
    check(*saved)


def test_weights_under_older_prefixes_are_read(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = saved
    for file in path.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    (own,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    root = own.removesuffix("embed_tokens.weight")
    for other in ("model.language_model.", "language_model.model.", "model."):
        outside = "" if other == "model." else "language_model."
        renamed = {
            (other + name.removeprefix(root) if name.startswith(root) else f"{outside}lm_head.weight")
            if name.startswith(root) or name.endswith("lm_head.weight")
            else f"eyes.{name}": tensor.clone()
            for name, tensor in tensors.items()
        }
        save_file(renamed, tmp_path / "model.safetensors")
        found = read_checkpoint(tmp_path, task=TASK)
        check_tensors(found.model, found.tensors, found.quantization)
    check(tmp_path, model)


def test_a_flat_configuration_with_rope_in_sections_is_read(tmp_path: Path) -> None:
    """As Qwen/Qwen2.5-VL-7B-Instruct writes it."""
    torch.manual_seed(7)
    model = qwen25().eval().float()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    flat = {**config, **config.pop("text_config"), "architectures": config["architectures"]}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 10_000.0}
    del flat["text_config"], flat["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    check(tmp_path, model)


def test_without_the_key_the_tower_is_read_too_or_the_message_names_the_key(saved: tuple[Path, Any]) -> None:
    path, model = saved
    without_tower = json.loads((path / "config.json").read_text()).get("vision_config", {}) is None  # Gemma 4
    if type(model).__name__ not in MULTIMODAL or without_tower:
        with pytest.raises(
            UnknownArchitecture, match=r"only its text decoder is supported: set model\.text_only: true"
        ):
            read_checkpoint(path)
        return
    found = read_checkpoint(path)
    check_tensors(found.model, found.tensors, found.quantization)
    assert found.model.media is not None and found.architecture == type(model).__name__
    assert found.model.embed == read_checkpoint(path, task=TASK).model.embed


def test_without_the_key_the_message_for_an_unsupported_tower_names_it(tmp_path: Path) -> None:
    config = {"architectures": ["NewVLForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownArchitecture, match=r"config\.json: .*only its text decoder.*set model\.text_only: true"):
        read_checkpoint(tmp_path, weights=False)


def test_a_model_that_reads_text_only_refuses_the_key(tmp_path: Path) -> None:
    transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=r"model\.text_only: true: .*'LlamaForCausalLM', and it is a text model"):
        read_checkpoint(tmp_path, weights=False, task=TASK)


def test_a_decoder_that_is_not_known_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["NewForConditionalGeneration"], "text_config": {"model_type": "new_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TaskError, match="its text decoder is not known"):
        read_checkpoint(tmp_path, weights=False, task=TASK)


def test_gemma3n_is_read_under_the_prefix_of_the_whole_model(tmp_path: Path) -> None:
    """transformers makes the whole model only with a vision encoder of another library."""
    layers = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 1}
    layers |= {"sliding_window": 8, "layer_types": GEMMA_4, "laurel_rank": 5}
    torch.manual_seed(7)
    model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**TEXT, **layers)).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    own = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {name.replace("model.", "model.language_model.", 1): tensor.clone() for name, tensor in own.items()}
    save_file({**tensors, "model.embed_vision.embedding.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": model.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "dtype": "float32", **config}))
    check(tmp_path, model)


def test_the_page_of_models_lists_every_decoder() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    for kind, (architecture, _) in DECODERS.items():
        assert any(f"`{kind}`" in line and f"| `{architecture}` |" in line for line in page.splitlines())


def test_settings_that_exports_leave_out_are_those_of_transformers(tmp_path: Path) -> None:
    """Use the settings of google/gemma-3-4b-it and llava-hf/llava-1.5-7b-hf."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text"}
        | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_checkpoint(tmp_path, weights=False, task=TASK).model
    want = transformers.Gemma3TextConfig()
    assert (model.embed.vocab, model.max_context) == (want.vocab_size, want.max_position_embeddings)
    short = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(short))
    model = read_checkpoint(tmp_path, weights=False, task=TASK).model
    llama = transformers.LlamaConfig()
    assert (len(model.blocks), model.embed.hidden) == (llama.num_hidden_layers, llama.hidden_size)
