"""Tiny random checkpoints of multimodal families, items, and their embeddings as transformers computes them."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

Item = dict[str, Tensor]
TEXT: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 12, "vocab_size": 96, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EYES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4},
    "image_size": 12,
}


@dataclass(frozen=True)
class Case:
    """A family: its model, items of several sizes, and the embeddings of each of several items."""

    make: Callable[[], Any]
    items: Callable[[], list[Item]]
    features: Callable[[Any, list[Item]], list[Tensor]]
    rewrite: Callable[[Path], None] = lambda path: None  # a family without code in transformers: its own names


def save(case: Case, path: Path) -> Any:
    """Write a checkpoint with random weights, norms among them; return its model."""
    torch.manual_seed(7)
    model = case.make().eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    model.save_pretrained(path)
    case.rewrite(path)
    return model


def images(*sizes: tuple[int, ...]) -> list[Item]:
    """Return an item for each shape of pixels."""
    torch.manual_seed(3)
    return [{"pixel_values": torch.randn(size)} for size in sizes]


def one_by_one(model: Any, items: list[Item]) -> list[Tensor]:
    """Return the embeddings of each item, computed alone."""
    found = [model.get_image_features(**item) for item in items]
    pooled = [getattr(one, "pooler_output", one) for one in found]
    return [
        one.flatten(0, -2) if isinstance(one, Tensor) else torch.cat([x.flatten(0, -2) for x in one]) for one in pooled
    ]


def several(*grids: tuple[int, int, int], pixels: int) -> list[Item]:
    """Return an item for each grid, with a row of pixels for each patch."""
    torch.manual_seed(3)
    return [
        {
            "pixel_values": torch.randn(frames * high * wide, pixels),
            "image_grid_thw": torch.tensor([[frames, high, wide]]),
        }
        for frames, high, wide in grids
    ]


def llava(eyes: Any = None, text: Any = None, **more: Any) -> Case:
    def make() -> Any:
        config = transformers.LlavaConfig(
            vision_config=eyes or transformers.CLIPVisionConfig(**EYES),
            text_config=text or transformers.LlamaConfig(**TEXT),
            **more,
        )
        return transformers.LlavaForConditionalGeneration(config)

    return Case(make, lambda: images(*[(1, 3, 12, 12)] * 3), one_by_one)


QWEN: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4, "out_hidden_size": 24}
QWEN_EYES = {**QWEN, "hidden_size": 16, "intermediate_size": 20}
GRIDS = ((1, 4, 6), (2, 2, 8), (1, 10, 4))


def qwen(name: str, eyes: dict[str, Any], **text: Any) -> Case:
    def make() -> Any:
        # transformers adds defaults to the dicts that it gets.
        inner = {key: value for key, value in TEXT.items() if key != "head_dim"} | copy.deepcopy(text)
        config = getattr(transformers, f"{name}Config")(text_config=inner, vision_config=eyes)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return Case(make, lambda: several(*GRIDS, pixels=3 * 2 * 4 * 4), one_by_one)


def with_deepstack(model: Any, items: list[Item]) -> list[Tensor]:
    """Return the embeddings with those for the first hidden states of the text model to their right."""
    found = [model.get_image_features(**item) for item in items]
    return [torch.cat([torch.cat(part) for part in (one.pooler_output, *one.deepstack_features)], 1) for one in found]


SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10_000.0}}
QWEN_3 = {**QWEN_EYES, "num_position_embeddings": 25}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["full_attention"], "head_dim": 16},
}


def gemma3(tokens: int = 4) -> Case:
    def make() -> Any:
        text = transformers.Gemma3TextConfig(**TEXT, sliding_window=8, query_pre_attn_scalar=12)
        eyes = transformers.SiglipVisionConfig(**EYES | {"image_size": 20}, vision_use_head=False)
        config = transformers.Gemma3Config(text_config=text, vision_config=eyes, mm_tokens_per_image=tokens)
        return transformers.Gemma3ForConditionalGeneration(config)

    return Case(make, lambda: images(*[(1, 3, 20, 20)] * 3), one_by_one)


def pixtral() -> Case:
    """The architecture of LLaVA with the tower of Mistral 3."""
    made = llava(
        transformers.PixtralVisionConfig(**EYES | {"image_size": 40}),
        transformers.MistralConfig(**TEXT, sliding_window=None),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return replace(made, items=lambda: sized((16, 24), (40, 8), (20, 20), padded=40))


def paligemma() -> Case:
    def make() -> Any:
        text = transformers.GemmaConfig(**TEXT)
        eyes = transformers.SiglipVisionConfig(**EYES, vision_use_head=False, projection_dim=24)
        config = transformers.PaliGemmaConfig(text_config=text, vision_config=eyes, projection_dim=24, hidden_size=24)
        return transformers.PaliGemmaForConditionalGeneration(config)

    return Case(make, lambda: images(*[(1, 3, 12, 12)] * 3), one_by_one)


def sized(*sizes: tuple[int, int], padded: int) -> list[Item]:
    """Return an image of each size, padded to a square of zeros, as Pixtral's processor pads a batch."""
    made = images(*[(1, 3, *size) for size in sizes])
    for item, (high, wide) in zip(made, sizes, strict=True):
        pixels = torch.zeros(1, 3, padded, padded)
        pixels[..., :high, :wide] = item["pixel_values"]
        item |= {"pixel_values": pixels, "image_sizes": torch.tensor([[high, wide]])}
    return made


def mistral3() -> Case:
    def make() -> Any:
        eyes = transformers.PixtralVisionConfig(**EYES | {"image_size": 40})
        text = transformers.MistralConfig(**TEXT, sliding_window=None)
        config = transformers.Mistral3Config(vision_config=eyes, text_config=text)
        return transformers.Mistral3ForConditionalGeneration(config)

    return Case(make, lambda: sized((16, 24), (40, 8), (20, 20), padded=40), one_by_one)


def lighton_ocr() -> Case:
    def make() -> Any:
        eyes = transformers.PixtralVisionConfig(**EYES | {"image_size": 40})
        config = transformers.LightOnOcrConfig(vision_config=eyes, text_config=transformers.Qwen3Config(**TEXT))
        return transformers.LightOnOcrForConditionalGeneration(config)

    return Case(make, lambda: sized((16, 24), (40, 8), (20, 20), padded=40), one_by_one)


def internvl(layer: int, **more: Any) -> Case:
    def make() -> Any:
        eyes = transformers.InternVLVisionConfig(**EYES | {"image_size": [16, 16], "patch_size": [4, 4]}, **more)
        text = transformers.Qwen2Config(**{key: value for key, value in TEXT.items() if key != "head_dim"})
        config = transformers.InternVLConfig(vision_config=eyes, text_config=text, vision_feature_layer=layer)
        return transformers.InternVLForConditionalGeneration(config)

    return Case(make, lambda: images((1, 3, 16, 16), (3, 3, 16, 16), (1, 3, 24, 24)), one_by_one)


def idefics3(name: str, scale: int) -> Case:
    def make() -> Any:
        eyes = {**EYES, "image_size": 24}
        config = getattr(transformers, f"{name}Config")(
            vision_config=eyes, text_config=transformers.LlamaConfig(**TEXT), scale_factor=scale
        )
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    sizes = [(1, 1, 3, 24, 24), (1, 2, 3, 24, 24), (1, 3, 3, 48, 48)]
    return Case(make, lambda: images(*sizes), one_by_one)


def idefics2() -> Case:
    """A whole image, one with a partial patch, and pieces of several sizes."""

    def make() -> Any:
        eyes = {**EYES, "image_size": 24}
        perceiver = {"resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 6}
        config = transformers.Idefics2Config(
            vision_config=eyes,
            text_config={"model_type": "mistral", **TEXT},
            perceiver_config={**perceiver, "num_key_value_heads": 2, "hidden_size": 24, "rms_norm_eps": 1e-4},
        )
        return transformers.Idefics2ForConditionalGeneration(config)

    def items() -> list[Item]:
        made = images((1, 1, 3, 24, 24), (1, 1, 3, 18, 29), (1, 3, 3, 20, 24))
        for item, sizes in zip(made, (((24, 24),), ((18, 29),), ((20, 12), (9, 24), (20, 24))), strict=True):
            item["image_sizes"] = torch.tensor(sizes)
        return made

    def features(model: Any, items: list[Item]) -> list[Tensor]:
        found = []
        for item in items:
            pixels = item["pixel_values"]
            mask = torch.zeros(1, *pixels.shape[1:2], *pixels.shape[3:], dtype=torch.int64)
            for own, (high, wide) in zip(mask[0], item["image_sizes"].tolist(), strict=True):
                own[:high, :wide] = 1
            found += model.model.get_image_features(pixels, mask).pooler_output
        return found

    return Case(make, items, features)


def minicpm_v(name: str, **more: Any) -> Case:
    """Images of several sizes, and one with slices. The second merge is after the last block."""

    def make() -> Any:
        eyes = {**EYES, "image_size": 24, "num_hidden_layers": 3}
        text = {key: value for key, value in TEXT.items() if key != "head_dim"} | DELTA
        config = getattr(transformers, f"{name}Config")(
            vision_config=eyes, text_config={"model_type": "qwen3_5_text", **text}, insert_layer_id=1, **more
        )
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    def items() -> list[Item]:
        torch.manual_seed(3)
        made = []
        for sizes in (((8, 8),), ((4, 12),), ((8, 4), (4, 8), (4, 8))):
            count = sum(high * wide for high, wide in sizes)
            made.append({"pixel_values": torch.randn(1, 3, 4, 4 * count), "target_sizes": torch.tensor(sizes)})
        return made

    def features(model: Any, items: list[Item]) -> list[Tensor]:
        return [torch.cat(model.model.get_image_features(**item).pooler_output) for item in items]

    return Case(make, items, features)


PINPOINTS = [[12, 24], [24, 12], [24, 24], [12, 36], [36, 36]]


def tiled(*sizes: tuple[int, int, int]) -> list[Item]:
    """Return items of (tiles, height, width)."""
    made = images(*[(1, tiles, 3, 12, 12) for tiles, _, _ in sizes])
    for item, (_, high, wide) in zip(made, sizes, strict=True):
        item["image_sizes"] = torch.tensor([[high, wide]])
    return made


def llava_next(**more: Any) -> Case:
    def make() -> Any:
        config = transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(**EYES),
            text_config=transformers.LlamaConfig(**TEXT),
            image_grid_pinpoints=PINPOINTS,
            **more,
        )
        return transformers.LlavaNextForConditionalGeneration(config)

    return Case(make, lambda: tiled((4, 11, 30), (5, 20, 17), (10, 50, 9)), one_by_one)


def granite_vision() -> Case:
    def make() -> Any:
        config = transformers.LlavaNextConfig(
            vision_config=transformers.SiglipVisionConfig(**EYES, vision_use_head=False),
            text_config=transformers.GraniteConfig(**{key: value for key, value in TEXT.items() if key != "head_dim"}),
            image_grid_pinpoints=PINPOINTS,
            vision_feature_layer=[-3, 2, -1],
            vision_feature_select_strategy="full",
        )
        return transformers.LlavaNextForConditionalGeneration(config)

    return Case(make, lambda: tiled((4, 11, 30), (5, 20, 17)), one_by_one)


def one_vision() -> Case:
    """The third image has more tiles than the limit, so its embeddings are interpolated."""

    def make() -> Any:
        text = {key: value for key, value in TEXT.items() if key != "head_dim"}
        config = transformers.LlavaOnevisionConfig(
            vision_config=transformers.SiglipVisionConfig(**EYES, vision_use_head=False),
            text_config=transformers.Qwen2Config(**text),
            image_grid_pinpoints=PINPOINTS,
            vision_aspect_ratio="anyres_max_4",
        )
        return transformers.LlavaOnevisionForConditionalGeneration(config)

    return Case(make, lambda: tiled((4, 11, 30), (5, 20, 17), (10, 70, 60)), one_by_one)


def clips() -> list[Item]:
    """Return videos of one and of several frames."""
    torch.manual_seed(3)
    return [{"pixel_values_videos": torch.randn(1, frames, 3, 12, 12)} for frames in (1, 3)]


def of_videos(model: Any, items: list[Item]) -> list[Tensor]:
    config = model.config
    layer, strategy = config.vision_feature_layer, config.vision_feature_select_strategy
    return [
        model.get_video_features(
            **one, vision_feature_layer=layer, vision_feature_select_strategy=strategy
        ).pooler_output[0]
        for one in items
    ]


def projected(model: Any, items: list[Item]) -> list[Tensor]:
    """Return the embeddings of Llama 4, which projects the features elsewhere."""
    found = [model.get_image_features(**item).last_hidden_state for item in items]
    return [model.multi_modal_projector(one.flatten(0, -2)) for one in found]


def llama4() -> Case:
    def make() -> Any:
        text = transformers.Llama4TextConfig(**TEXT, intermediate_size_mlp=40, num_local_experts=3, moe_layers=[])
        eyes = transformers.Llama4VisionConfig(
            **EYES | {"image_size": 16, "intermediate_size": 64},
            vision_output_dim=18,
            projector_input_dim=18,
            projector_output_dim=18,
        )
        config = transformers.Llama4Config(text_config=text, vision_config=eyes)
        return transformers.Llama4ForConditionalGeneration(config)

    return Case(make, lambda: images((1, 3, 16, 16), (3, 3, 16, 16)), projected)


def glm4v() -> Case:
    def make() -> Any:
        eyes = {**QWEN_EYES, "image_size": 20, "attention_bias": True}
        text = {key: value for key, value in TEXT.items() if key != "head_dim"}
        rope = {
            "rope_type": "default",
            "mrope_section": [1, 1, 1],
            "partial_rotary_factor": 0.5,
            "rope_theta": 10_000.0,
        }
        config = transformers.Glm4vConfig(text_config=text | {"rope_parameters": rope}, vision_config=eyes)
        return transformers.Glm4vForConditionalGeneration(config)

    return Case(make, lambda: several((1, 4, 6), (1, 10, 4), (1, 10, 10), pixels=3 * 2 * 4 * 4), one_by_one)


def glm_ocr() -> Case:
    def make() -> Any:
        text = {key: value for key, value in TEXT.items() if key != "head_dim"}
        rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5, "rope_theta": 1e4}
        config = transformers.GlmOcrConfig(
            text_config=text | {"rope_parameters": rope, "head_dim": 12}, vision_config=QWEN_EYES
        )
        return transformers.GlmOcrForConditionalGeneration(config)

    return Case(make, lambda: several((1, 4, 6), (1, 10, 4), pixels=3 * 2 * 4 * 4), one_by_one)


KIMI_TEXT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"num_key_value_heads": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 8},
}


def kimi_vl() -> Case:
    def make() -> Any:
        eyes = {**EYES, "pos_emb_height": 5, "pos_emb_width": 5, "merge_kernel_size": [2, 2]}
        text = {key: value for key, value in TEXT.items() if key != "head_dim"} | KIMI_TEXT
        config = transformers.Kimi_K25Config(
            text_config=transformers.DeepseekV3Config(**text), vision_config=eyes, projection_hidden_size=16
        )
        return transformers.Kimi_K25ForConditionalGeneration(config)

    def items() -> list[Item]:
        made = several(*((1, high, wide) for high, wide in ((4, 6), (2, 8), (5 * 2, 4))), pixels=3 * 4 * 4)
        return [item | {"pixel_values": item["pixel_values"].view(-1, 3, 4, 4)} for item in made]

    return Case(make, items, one_by_one, as_kimi_vl)


def as_kimi_vl(path: Path, token: int = 90) -> None:
    """Rename the tensors and settings of Kimi-K2.5, whose tower has those of Kimi-VL when it is saved."""
    names = {"mm_projector.proj.0": "multi_modal_projector.linear_1", "language_model.model.blocks": "model.layers"}
    names |= {
        "mm_projector.proj.2": "multi_modal_projector.linear_2",
        "vision_tower.encoder.patch": "vision_tower.patch",
    }
    names |= {"model.mm_projector": "multi_modal_projector", "language_model.model.": "model."}
    made: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        old = next((old for old in names if name.startswith(old)), "")
        made[names.get(old, "") + name.removeprefix(old)] = tensor.contiguous()
    save_file(made, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    vision = config["vision_config"]
    vision |= {f"init_{key}": vision.pop(key) for key in ("pos_emb_height", "pos_emb_width")}
    config |= {"architectures": ["KimiVLForConditionalGeneration"], "media_placeholder_token_id": token}
    (path / "config.json").write_text(json.dumps(config))


def blip2() -> Case:
    """Cross-attention is in the first and the third block."""

    def make() -> Any:
        former = {"hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 3, "num_attention_heads": 3}
        text = {"hidden_size": 24, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96}
        config = transformers.Blip2Config(
            vision_config=EYES,
            qformer_config={**former, "encoder_hidden_size": 16},
            text_config={"model_type": "opt", **text, "word_embed_proj_dim": 24, "max_position_embeddings": 64},
            num_query_tokens=5,
            image_token_index=95,
        )
        return transformers.Blip2ForConditionalGeneration(config)

    return Case(make, lambda: images((1, 3, 12, 12), (1, 3, 12, 12)), one_by_one)


def aria() -> Case:
    """Squares of two sizes, and one that is partly padding."""

    def make() -> Any:
        text = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"moe_num_experts": 3}
        config = transformers.AriaConfig(
            vision_config={"model_type": "idefics3_vision", **EYES, "image_size": 24},
            text_config=text,
            projector_patch_to_query_dict={9: 3, 36: 5},
        )
        return transformers.AriaForConditionalGeneration(config)

    def items() -> list[Item]:
        made = images((1, 3, 24, 24), (2, 3, 24, 24), (1, 3, 12, 12))
        for item, sizes in zip(made, (((16, 24),), ((24, 8), (24, 24)), ((12, 12),)), strict=True):
            item["image_sizes"] = torch.tensor(sizes)
        return made

    return Case(make, items, masked)


def masked(model: Any, items: list[Item]) -> list[Tensor]:
    """Return the embeddings of Aria, with masks of pixels in place of sizes."""
    found = []
    for item in items:
        pixels = item["pixel_values"]
        mask = torch.zeros(len(pixels), *pixels.shape[2:], dtype=torch.bool)
        for own, (high, wide) in zip(mask, item["image_sizes"].tolist(), strict=True):
            own[:high, :wide] = True
        features = model.get_image_features(pixel_values=pixels, pixel_mask=mask, vision_feature_layer=-1)
        found.append(features.pooler_output.flatten(0, 1))
    return found


def gemma4(**more: Any) -> Case:
    """Items are padded to one number of patches. Buffers of the tower, which are not parameters, have values too."""

    def make() -> Any:
        text = transformers.Gemma4TextConfig(**TEXT, global_head_dim=16, hidden_size_per_layer_input=0)
        eyes = {key: value for key, value in EYES.items() if key != "image_size"}
        eyes |= {"num_key_value_heads": 1, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 12}
        config = transformers.Gemma4Config(text_config=text, vision_config={**eyes, **more}, audio_config=None)
        model = transformers.Gemma4ForConditionalGeneration(config)
        for name, buffer in model.named_buffers():
            if "_min" in name or "_max" in name:
                buffer.fill_((0.3 if "_max" in name else -0.2) * (2 if "output" in name else 1))
            elif "std_" in name:
                buffer.normal_(0.5, 0.2)
        return model

    def items() -> list[Item]:
        made = []
        for high, wide in ((4, 6), (2, 12), (6, 2)):
            rows, columns = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
            places, pixels = torch.full((1, 24, 2), -1), torch.zeros(1, 24, 48)
            places[0, : high * wide] = torch.stack((columns, rows), -1).view(-1, 2)
            pixels[0, : high * wide] = torch.rand(high * wide, 48)
            made.append({"pixel_values": pixels, "image_position_ids": places})
        return made

    return Case(make, items, one_by_one)


PHI4_EARS = {
    **{"hidden_size": 12, "intermediate_size": 14, "num_blocks": 2, "num_attention_heads": 2, "input_size": 10},
    **{"ext_pw_out_channel": 12, "depthwise_separable_out_channel": 12, "depthwise_multiplier": 2},
    **{"bias_max_distance": 4, "nemo_conv_channels": 6, "nemo_activation": "gelu"},
}


def phi4(image: int = 90, audio: int = 91, **text: Any) -> Any:
    """Return a model with tiles of 4 · 4 patches, whose convolutions are all different.

    Its attention is `eager`: with torch's, transformers computes the tower with a causal mask if no patch is masked."""
    eyes = {**EYES, "image_size": 16, "crop_size": 16, "image_token_id": image}
    inner = {key: value for key, value in TEXT.items() if key != "head_dim"} | text
    ears = {**PHI4_EARS, "audio_token_id": audio}
    config = transformers.Phi4MultimodalConfig(**inner, vision_config=eyes, audio_config=ears)
    model = transformers.Phi4MultimodalForCausalLM(config)
    model.set_attn_implementation("eager")
    encoder = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    encoder.global_mean.normal_(0, 0.5)
    encoder.global_invstd.uniform_(0.5, 1.5)
    return model


def phi4_image(rows: int, columns: int, below: int, right: int, seed: int = 3) -> tuple[Item, int]:
    """Return an image of this many tiles, whose last ones have this many patches in a column and a row, and the number
    of its tokens."""
    mask = torch.ones(1, rows * columns + 1, 4, 4)
    for tile in range(rows * columns):
        mask[0, tile + 1, below if tile // columns == rows - 1 else 4 :] = 0
        mask[0, tile + 1, :, right if tile % columns == columns - 1 else 4 :] = 0
    pixels = torch.randn(1, rows * columns + 1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    item = {"image_pixel_values": pixels, "image_attention_mask": mask}
    high, wide = 2 * (rows - 1) + (below + 1) // 2, 2 * (columns - 1) + (right + 1) // 2
    sizes = torch.tensor([[16 * rows, 16 * columns]])
    return {**item, "image_sizes": sizes}, 2 * 3 + 1 + high * (wide + 1)


def phi4_case() -> Case:
    """Tiles that are whole, and such whose last rows and columns are masked, an odd number of them too."""
    images = [phi4_image(*one) for one in ((1, 1, 4, 4), (2, 3, 3, 1), (1, 2, 2, 4), (3, 1, 4, 3))]

    def features(model: Any, items: list[Item]) -> list[Tensor]:
        tower, token = model.model.embed_tokens_extend.image_embed, model.config.vision_config.image_token_id
        found = []
        for item, (_, count) in zip(items, images, strict=True):
            ids = torch.full((1, count), token)
            found.append(tower(ids, torch.zeros(1, count, 24), **item)[0])
        return found

    return Case(phi4, lambda: [item for item, _ in images], features)


CASES = {
    "phi4": phi4_case(),
    "llava": llava(),
    "llava-layers": llava(vision_feature_layer=[-3, 2, -1], vision_feature_select_strategy="full"),
    "pixtral": pixtral(),
    "qwen2-vl": qwen("Qwen2VL", {**QWEN, "embed_dim": 16, "hidden_size": 24}, **SECTIONS),
    "gemma3": gemma3(),
    "qwen2.5-vl": qwen("Qwen2_5_VL", {**QWEN_EYES, "window_size": 16, "fullatt_block_indexes": [1]}, **SECTIONS),
    "qwen3-vl": replace(
        qwen("Qwen3VL", {**QWEN_3, "deepstack_visual_indexes": [0, 2]}, **SECTIONS), features=with_deepstack
    ),
    "mistral3": mistral3(),
    "lighton-ocr": lighton_ocr(),
    "internvl": internvl(-1),
    "internvl-odd": internvl(-2, use_qk_norm=True, attention_bias=True, norm_type="rms_norm"),
    "idefics2": idefics2(),
    "minicpm-v": minicpm_v("MiniCPMV4_6"),
    "minicpm-ocr": minicpm_v("MiniCPMOcr", merger_times=2, tie_word_embeddings=False),
    "idefics3": idefics3("Idefics3", 2),
    "smolvlm": idefics3("SmolVLM", 3),
    "llava-next": llava_next(),
    "one-vision": one_vision(),
    "one-vision-video": replace(one_vision(), items=clips, features=of_videos),
    "paligemma": paligemma(),
    "qwen3.5": qwen("Qwen3_5", QWEN_3, **SECTIONS, **DELTA),
    "llama4": llama4(),
    "kimi-vl": kimi_vl(),
    "glm4v": glm4v(),
    "glm-ocr": glm_ocr(),
    "granite-vision": granite_vision(),
    "aria": aria(),
    "blip-2": blip2(),
    "gemma4": gemma4(),
    "gemma4-clipped": gemma4(use_clipped_linears=True, standardize=True),
}
