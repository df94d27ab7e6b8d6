"""Tiny multimodal checkpoints of transformers, prompts with images for them, and the replies of transformers."""

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.api.media import MediaItem, MediaTensor
from engine.api.messages import Control, Stats
from engine.llm import LLM, MediaPrompt, Params
from tests.engine.layers.towers import KIMI_TEXT, as_kimi_vl, phi4, phi4_image

VOCAB, IMAGE, EOS = 96, 95, 2
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS},
}
TOLERANCE = 1e-4
REPLY = 6


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as the processor returns it, and the number of its tokens."""

    tensors: dict[str, torch.Tensor]
    tokens: int

    @property
    def item_tensors(self) -> dict[str, MediaTensor]:
        types = {torch.float32: "float32", torch.int64: "int64"}
        return {
            name: MediaTensor(types[one.dtype], tuple(one.shape), one.numpy().tobytes())
            for name, one in self.tensors.items()
        }


@dataclass
class Family:
    """A tiny model of transformers, its folder, and prompts for it."""

    model: Any
    folder: Path
    token: int = IMAGE
    types: str = ""
    """Argument of the model that tells tokens of images from text, or "prefix": the prompt from the reply."""

    def prompt(self, *parts: Picture | int) -> MediaPrompt:
        """Return a prompt of images, and of this many tokens of text."""
        ids: list[int] = []
        items = []
        for number, part in enumerate(parts):
            if isinstance(part, Picture):
                tensors = part.item_tensors
                digest = hashlib.sha256(repr(sorted(tensors.items())).encode()).digest()
                items.append(MediaItem("image", digest, ((len(ids), part.tokens),), tensors))
                ids += [self.token] * part.tokens
            else:
                ids += [3 + (11 * number + 7 * i) % 80 for i in range(part)]
        return MediaPrompt(tuple(ids), tuple(items))

    @torch.no_grad()
    def reply(self, *parts: Picture | int, count: int = REPLY) -> tuple[list[int], list[float]]:
        """Return the greedy reply of transformers and its log probabilities. Every token is computed from the complete
        sequence, without a cache."""
        prompt = self.prompt(*parts)
        pictures = [part for part in parts if isinstance(part, Picture)]
        given: dict[str, Any] = {}
        for name in pictures[0].tensors if pictures else ():
            is_strip = name == "pixel_values" and "target_sizes" in pictures[0].tensors
            given[name] = torch.cat([one.tensors[name] for one in pictures], -1 if is_strip else 0)
        ids, logprobs = list(prompt.ids), []
        for _ in range(count):
            row = self.forward(torch.tensor([ids]), len(prompt.ids), given)
            logprobs.append(float(row.max()))
            ids.append(int(row.argmax()))
        return ids[len(prompt.ids) :], logprobs

    def forward(self, ids: torch.Tensor, prompt: int, given: dict[str, Any]) -> torch.Tensor:
        """Return the log probabilities of the next token."""
        more = {}
        if self.types == "prefix":
            more["token_type_ids"] = (torch.arange(ids.shape[1]) >= prompt).long()[None]
        elif self.types:
            more[self.types] = (ids == self.token).long()
        model = self.model
        if isinstance(model, transformers.Blip2ForConditionalGeneration) and not given:
            model = model.language_model
        return model(input_ids=ids, **given, **more).logits[0, -1].log_softmax(-1)


def picture(shape: tuple[int, ...], tokens: int, seed: int, **more: torch.Tensor) -> Picture:
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Picture({"pixel_values": pixels, **more}, tokens)


def saved(model: Any, folder: Path) -> Any:
    """Save a model with larger random weights, so that different inputs have different replies."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3 if "vision" not in name and "visual" not in name else 0.2)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            else:
                weight.normal_(0, 0.1)
        model.get_output_embeddings().weight[IMAGE] = 0  # transformers takes it for another image if it is in a reply
    model.float().eval().save_pretrained(folder)
    return model


def llava(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**eyes, patch_size=4, image_size=12),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        vision_feature_layer=-2,
    )
    return Family(saved(transformers.LlavaForConditionalGeneration(config), folder), folder)


def llava_picture(seed: int) -> Picture:
    return picture((1, 3, 12, 12), 9, seed)


def opened(family: Family, kernels: str, **more: Any) -> LLM:
    """Open the checkpoint with small blocks."""
    settings = {"block_tokens": 4, "kv_dtype": "float32", "kv_bytes": 1 << 20, "max_context": 96, "threads": 1}
    return LLM(family.folder, kernels=kernels, **{**settings, **more})


def greedy(count: int = REPLY, **more: Any) -> Params:
    return Params(temperature=0.0, max_tokens=count, logprobs=0, ignore_eos=True, **more)


def check(generation: Any, expected: tuple[list[int], list[float]]) -> None:
    ids, logprobs = expected
    assert generation.ids == ids
    np.testing.assert_allclose([one.logprob for one in generation.logprobs], logprobs, rtol=0, atol=TOLERANCE)


def counts(llm: LLM) -> tuple[int, int]:
    """Return the number of items that the tower computed, and of those whose embeddings were kept."""
    llm._loop.post([Control("stats")])
    while True:
        for message in llm._messages.get():
            if isinstance(message, Stats) and not message.running:
                return message.media_encoded, message.media_cached


QWEN_EYES = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
QWEN_EYES |= {"out_hidden_size": 32}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def qwen(folder: Path, name: str, eyes: dict[str, Any], **text: Any) -> Family:
    # transformers adds defaults to the dicts that it gets.
    own = copy.deepcopy({"rope_parameters": SECTIONS} | text)
    inner = {key: value for key, value in TEXT.items() if key != "head_dim"} | own
    config = getattr(transformers, f"{name}Config")(text_config=inner, vision_config=eyes, image_token_id=IMAGE)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return Family(saved(model, folder), folder, types="mm_token_type_ids")


def qwen_picture(seed: int) -> Picture:
    grid = {1: (1, 4, 6), 2: (1, 6, 2), 3: (1, 8, 4)}[seed]
    patches = grid[1] * grid[2]
    return picture((patches, 3 * 2 * 4 * 4), patches // 4, seed, image_grid_thw=torch.tensor([grid]))


def gemma3(folder: Path) -> Family:
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=10, query_pre_attn_scalar=8)
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**eyes, patch_size=4, image_size=24, vision_use_head=False),
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
    )
    return Family(saved(transformers.Gemma3ForConditionalGeneration(config), folder), folder, types="token_type_ids")


def paligemma(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**TEXT),
        vision_config=transformers.SiglipVisionConfig(
            **eyes, patch_size=4, image_size=12, vision_use_head=False, projection_dim=32
        ),
        projection_dim=32,
        hidden_size=32,
        image_token_index=IMAGE,
    )
    model = transformers.PaliGemmaForConditionalGeneration(config)
    return Family(saved(model, folder), folder, types="prefix")


def glm(folder: Path, name: str, **text: Any) -> Family:
    inner = {key: value for key, value in TEXT.items() if key != "head_dim"} | text
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5, "rope_theta": 10_000.0}
    eyes = {**QWEN_EYES, "image_size": 16}
    config = getattr(transformers, f"{name}Config")(
        text_config=inner | {"rope_parameters": rope}, vision_config=eyes, image_token_id=IMAGE
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return Family(saved(model, folder), folder, types="mm_token_type_ids")


def kimi_vl(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {key: value for key, value in TEXT.items() if key != "head_dim"} | KIMI_TEXT | {"num_key_value_heads": 4}
    config = transformers.Kimi_K25Config(
        text_config=transformers.DeepseekV3Config(**text),
        vision_config={**eyes, "patch_size": 4, "pos_emb_height": 5, "pos_emb_width": 5, "merge_kernel_size": [2, 2]},
        projection_hidden_size=16,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    model = saved(transformers.Kimi_K25ForConditionalGeneration(config), folder)
    as_kimi_vl(folder, IMAGE)
    return Family(model, folder)


def kimi_picture(seed: int) -> Picture:
    grid = {1: (1, 4, 6), 2: (1, 6, 2), 3: (1, 8, 4)}[seed]
    patches = grid[1] * grid[2]
    return picture((patches, 3, 4, 4), patches // 4, seed, image_grid_thw=torch.tensor([grid]))


def lighton_ocr(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LightOnOcrConfig(
        vision_config=transformers.PixtralVisionConfig(**eyes, patch_size=4, image_size=40),
        text_config=transformers.Qwen3Config(**TEXT),
        image_token_id=IMAGE,
    )
    return Family(saved(transformers.LightOnOcrForConditionalGeneration(config), folder), folder)


def lighton_picture(seed: int) -> Picture:
    """An odd number of rows of patches: the last one has no token. All have one size, as transformers pads others."""
    return picture((1, 3, 20, 24), 6, seed, image_sizes=torch.tensor([(20, 24)]))


def llama4(folder: Path) -> Family:
    text = transformers.Llama4TextConfig(
        **{key: value for key, value in TEXT.items() if key != "intermediate_size"},
        **{
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 2,
        },
    )
    eyes = transformers.Llama4VisionConfig(
        **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"patch_size": 4, "image_size": 16, "vision_output_dim": 18},
        **{"projector_input_dim": 18, "projector_output_dim": 18},
    )
    config = transformers.Llama4Config(text_config=text, vision_config=eyes, image_token_index=IMAGE)
    return Family(saved(transformers.Llama4ForConditionalGeneration(config), folder), folder)


def blip2(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    former = {"hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 3, "num_attention_heads": 3}
    text = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
    config = transformers.Blip2Config(
        vision_config={**eyes, "patch_size": 4, "image_size": 12},
        qformer_config={**former, "encoder_hidden_size": 16},
        text_config={"model_type": "opt", **text, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
        num_query_tokens=5,
        image_token_index=IMAGE,
    )
    return Family(saved(transformers.Blip2ForConditionalGeneration(config), folder), folder)


def idefics2(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    perceiver = {"resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 6}
    config = transformers.Idefics2Config(
        vision_config={**eyes, "patch_size": 4, "image_size": 24},
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
        perceiver_config={**perceiver, "num_key_value_heads": 2, "hidden_size": 32},
        image_token_id=IMAGE,
    )
    return Family(saved(transformers.Idefics2ForConditionalGeneration(config), folder), folder)


def minicpm_v(folder: Path, **more_settings: Any) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {key: value for key, value in TEXT.items() if key != "num_hidden_layers"}
    more = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    config = transformers.MiniCPMV4_6Config(
        vision_config={**eyes, "patch_size": 4, "image_size": 24},
        text_config={"model_type": "qwen3_5_text", **text, **DELTA, **more, "tie_word_embeddings": False},
        insert_layer_id=0,
        image_token_id=IMAGE,
        **more_settings,
    )
    return Family(saved(transformers.MiniCPMV4_6ForConditionalGeneration(config), folder), folder)


def minicpm_picture(seed: int) -> Picture:
    """An image and its two slices."""
    sizes = {1: ((8, 4), (4, 4), (4, 4)), 2: ((4, 8), (8, 4), (8, 4)), 3: ((4, 4), (4, 8), (4, 8))}[seed]
    count = sum(high * wide for high, wide in sizes)
    return picture((1, 3, 4, 4 * count), count // 16, seed, target_sizes=torch.tensor(sizes))


def phi4_family(folder: Path) -> Family:
    torch.manual_seed(1)
    model = phi4(IMAGE, **{key: value for key, value in TEXT.items() if key != "head_dim"})
    return Family(saved(model, folder), folder)


def phi4_picture(seed: int) -> Picture:
    """An image of two tiles, whose last one is partly masked."""
    tensors, count = phi4_image(1, 2, *{1: (3, 2), 2: (4, 3), 3: (1, 4)}[seed], seed)
    return Picture(tensors, count)


def aria(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AriaConfig(
        vision_config={"model_type": "idefics3_vision", **eyes, "patch_size": 4, "image_size": 24},
        text_config={**TEXT, "intermediate_size": 24, "moe_num_experts": 4, "rope_parameters": {"rope_theta": 1e4}},
        projector_patch_to_query_dict={9: 3, 36: 5},
        image_token_index=IMAGE,
    )
    return Family(saved(transformers.AriaForConditionalGeneration(config), folder), folder)


def gemma4(folder: Path, audio: dict[str, Any] | None = None, **text: Any) -> Family:
    inner = transformers.Gemma4TextConfig(
        **TEXT | {"num_hidden_layers": 4},
        **{"global_head_dim": 16, "vocab_size_per_layer_input": VOCAB, "sliding_window": 10},
        layer_types=["sliding_attention", "full_attention"] * 2,
        **text,
    )
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    eyes |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
    config = transformers.Gemma4Config(
        text_config=inner,
        vision_config={**eyes, "position_embedding_size": 12},
        audio_config=audio,
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        audio_token_id=IMAGE - 2,
    )
    model = saved(transformers.Gemma4ForConditionalGeneration(config), folder)
    return Family(model, folder, types="mm_token_type_ids")


def gemma4_picture(seed: int) -> Picture:
    high, wide = {1: (4, 6), 2: (6, 2), 3: (4, 4)}[seed]
    rows, columns = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    places = torch.full((1, 24, 2), -1)
    places[0, : high * wide] = torch.stack((columns, rows), -1).view(-1, 2)
    return picture((1, 24, 48), high * wide // 4, seed, image_position_ids=places)


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8}

FAMILIES = {
    "llava": (llava, llava_picture),
    "qwen2-vl": (
        lambda folder: qwen(folder, "Qwen2VL", {**QWEN_EYES, "embed_dim": 16, "hidden_size": 32}),
        qwen_picture,
    ),
    "qwen2.5-vl": (
        lambda folder: qwen(folder, "Qwen2_5_VL", {**QWEN_EYES, "window_size": 16, "fullatt_block_indexes": [1]}),
        qwen_picture,
    ),
    "qwen3-vl": (
        lambda folder: qwen(
            folder,
            "Qwen3VL",
            {**QWEN_EYES, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
            head_dim=8,
        ),
        qwen_picture,
    ),
    "qwen3.5": (
        lambda folder: qwen(
            folder,
            "Qwen3_5",
            {**QWEN_EYES, "num_position_embeddings": 25},
            **DELTA,
            layer_types=["linear_attention", "full_attention"],
            num_hidden_layers=2,
            head_dim=16,
            rope_parameters=SECTIONS | {"partial_rotary_factor": 0.5},
        ),
        qwen_picture,
    ),
    "kimi-vl": (kimi_vl, kimi_picture),
    "lighton-ocr": (lighton_ocr, lighton_picture),
    "llama4": (llama4, lambda seed: picture((seed, 3, 16, 16), 4 * seed, seed)),
    "glm-4.5v": (lambda folder: glm(folder, "Glm4vMoe", **EXPERTS), qwen_picture),
    "glm-ocr": (lambda folder: glm(folder, "GlmOcr", head_dim=8), qwen_picture),
    "gemma3": (gemma3, lambda seed: picture((1, 3, 24, 24), 9, seed)),
    "paligemma": (paligemma, llava_picture),
    "blip-2": (blip2, lambda seed: picture((1, 3, 12, 12), 5, seed)),
    "idefics2": (idefics2, lambda seed: picture((1, 1, 3, 16, 24), 5, seed)),
    "minicpm-v": (minicpm_v, minicpm_picture),
    "phi4": (phi4_family, phi4_picture),
    "aria": (aria, lambda seed: picture((1, 3, 24, 24), 5, seed)),
    "gemma4": (lambda folder: gemma4(folder, hidden_size_per_layer_input=6, num_kv_shared_layers=2), gemma4_picture),
    "gemma4-sight": (
        lambda folder: gemma4(folder, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
        gemma4_picture,
    ),
}
