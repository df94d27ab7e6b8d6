"""Small checkpoints of each family of image processors, and the reference results of transformers."""

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil
from transformers.models.aria.processing_aria import AriaProcessor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from engine.text import Tokenizer as OwnTokenizer


@dataclass(frozen=True)
class Family:
    """A checkpoint: its settings, and how transformers processes an image with them."""

    config: Mapping[str, Any]
    image: Callable[..., Any]
    """Class of the image processor."""
    processor: Any
    """Class with `replace_image_token`."""
    placeholder: str
    tokens: tuple[str, ...]
    """Special tokens of the tokenizer."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor."""
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    """Content of processor_config.json."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the processor calls its image processor."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the processor that `replace_image_token` reads."""
    unused: tuple[str, ...] = ()
    """Outputs of the image processor that are not input of the model."""


def pixtral_processor() -> SimpleNamespace:
    """Return `replace_image_token` of PixtralProcessor, from its source: importing its module requires torchvision."""
    path = Path(transformers.__file__).parent / "models" / "pixtral" / "processing_pixtral.py"
    nodes = ast.walk(ast.parse(path.read_text()))
    found = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "replace_image_token")
    names: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    return SimpleNamespace(replace_image_token=names["replace_image_token"])


class BlipText:
    """The tokens of an image, which BLIP-2's processor puts before all others."""

    @staticmethod
    def replace_image_token(own: Any, outputs: dict[str, np.ndarray[Any, Any]], number: int) -> str:
        return "<image>" * 5


class AriaReference:
    """Aria's image processor, with the sizes of images in place of masks, in whole patches."""

    def __init__(self, **settings: Any) -> None:
        self.processor = AriaImageProcessorPil(**settings)

    def to_json_string(self) -> str:
        return str(self.processor.to_json_string())

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        found = dict(self.processor(images=images, return_tensors=return_tensors))
        mask = found.pop("pixel_mask")
        sizes = np.stack((mask.any(2).sum(1), mask.any(1).sum(1)), 1)
        return {**found, "image_sizes": (sizes + 13) // 14 * 14}


class Idefics2Reference:
    """The image processor of Idefics2, with the sizes of images in place of masks."""

    def __init__(self, **settings: Any) -> None:
        self.processor = Idefics2ImageProcessorPil(**settings)

    def to_json_string(self) -> str:
        return str(self.processor.to_json_string())

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        found = dict(self.processor(images=images, return_tensors=return_tensors))
        (mask,) = found.pop("pixel_attention_mask")
        return {**found, "image_sizes": np.stack((mask.any(2).sum(1), mask.any(1).sum(1)), 1)}

    @staticmethod
    def replace_image_token(own: Any, outputs: dict[str, np.ndarray[Any, Any]], number: int) -> str:
        return "<around>" + ("<image>" * 5 + "<around>") * outputs["pixel_values"].shape[1]


class MiniCPMVReference:
    """The image processor of MiniCPM-V, with sizes of int64 and the prompt text of its processor."""

    def __init__(self, **settings: Any) -> None:
        self.processor = MiniCPMV4_6ImageProcessorPil(**settings)

    def to_json_string(self) -> str:
        return str(self.processor.to_json_string())

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        found = dict(self.processor(images=images, return_tensors=return_tensors))
        return {**found, "target_sizes": found["target_sizes"].astype(np.int64)}

    @staticmethod
    def replace_image_token(own: Any, outputs: dict[str, np.ndarray[Any, Any]], number: int) -> str:
        return str(MiniCPMV4_6Processor.replace_image_token(own, outputs, number, image_token_divisor=16))


class KimiVLReference:
    """The image processor in Kimi-VL's repository, which transformers lacks: its steps in torch."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def to_json_string(self) -> str:
        return json.dumps({"image_processor_type": "KimiVLImageProcessor", **self.settings})

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, np.ndarray[Any, Any]]:
        (image,), side, most = images, self.settings["patch_size"], self.settings["in_token_limit"]
        wide, high = image.size
        if (count := (wide // side) * (high // side)) > most:
            scale = (most / count) ** 0.5
            image = image.resize((int(wide * scale), int(high * scale)), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        unit, (high, wide) = 2 * side, pixels.shape[1:]
        pixels = torch.nn.functional.pad(pixels, (0, -wide % unit, 0, -high % unit))
        mean, std = (torch.tensor(self.settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        pixels = (pixels - mean) / std
        patches = torch.nn.functional.unfold(pixels[None], side, stride=side)[0].T.reshape(-1, 3, side, side)
        grid = np.array([[pixels.shape[1] // side, pixels.shape[2] // side]])
        return {"pixel_values": patches.numpy(), "image_grid_hws": grid}

    @staticmethod
    def replace_image_token(own: Any, outputs: dict[str, np.ndarray[Any, Any]], number: int) -> str:
        text: str = own.image_token * (int(outputs["image_grid_hws"][number].prod()) // 4)
        return text


def llava(**attributes: Any) -> dict[str, Any]:
    return {"image_token": "<image>", **attributes}


VISION = {"model_type": "clip_vision_model", "patch_size": 7}
LLAVA = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
FULL = {"patch_size": 7, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
SMALL = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
ONEVISION = {
    **{"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
}
GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA_IMAGE = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
QWEN = {"size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}, "patch_size": 4, "image_mean": [0.5] * 3}

FAMILIES = {
    "blip-2": Family(
        {"model_type": "blip-2"},
        BlipImageProcessorPil,
        BlipText,
        "<image>",
        ("<image>",),
        {"size": {"height": 21, "width": 28}},
        {"num_query_tokens": 5},
    ),
    "aria": Family(
        {"model_type": "aria", "vision_config": {"patch_size": 14}},
        AriaReference,
        AriaProcessor,
        "<|img|>",
        ("<|img|>",),
        {"max_image_size": 490, "min_image_size": 60},
        {"size_conversion": {"490": 5, "980": 7}},
        attributes={"image_token": "<|img|>", "size_conversion": {490: 5, 980: 7}},
        unused=("num_crops",),
    ),
    "aria-split": Family(
        {"model_type": "aria", "vision_config": {"patch_size": 14}},
        AriaReference,
        AriaProcessor,
        "<|img|>",
        ("<|img|>",),
        {"max_image_size": 490, "split_image": True, "split_resolutions": [[490, 980], [980, 490]]},
        {"size_conversion": {"490": 5, "980": 7}},
        attributes={"image_token": "<|img|>", "size_conversion": {490: 5, 980: 7}},
        unused=("num_crops",),
    ),
    "llava": Family(
        {"model_type": "llava", "vision_config": VISION},
        CLIPImageProcessorPil,
        LlavaProcessor,
        "<image>",
        ("<image>",),
        SMALL,
        LLAVA,
        attributes=llava(**LLAVA),
    ),
    "llava-siglip": Family(
        {"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}},
        SiglipImageProcessorPil,
        LlavaProcessor,
        "<image>",
        ("<image>",),
        {"size": {"height": 21, "width": 30}, "resample": 2, "do_rescale": False},
        FULL,
        attributes=llava(**FULL),
    ),
    "llava-pad": Family(
        {"model_type": "llava", "vision_config": VISION},
        LlavaImageProcessorPil,
        LlavaProcessor,
        "<image>",
        ("<image>",),
        {**SMALL, "do_pad": True},
        LLAVA,
        attributes=llava(**LLAVA),
    ),
    "gemma3": Family(
        {"model_type": "gemma3", "mm_tokens_per_image": 4},
        Gemma3ImageProcessorPil,
        Gemma3Processor,
        "<start_of_image>",
        GEMMA,
        {"size": {"height": 28, "width": 28}},
        {"image_seq_length": 4},
        attributes={"full_image_sequence": GEMMA_IMAGE},
        unused=("num_crops",),
    ),
    "gemma4": Family(
        {"model_type": "gemma4"},
        Gemma4ImageProcessorPil,
        Gemma4Processor,
        "<|image|>",
        ("<|image>", "<|image|>", "<image|>"),
        {"patch_size": 3, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        attributes={"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
        unused=("num_soft_tokens_per_image",),
    ),
    "gemma3-scan": Family(
        {"model_type": "gemma3", "mm_tokens_per_image": 4},
        Gemma3ImageProcessorPil,
        Gemma3Processor,
        "<start_of_image>",
        GEMMA,
        {
            **{"size": {"height": 28, "width": 28}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8},
            **{"pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2},
        },
        {"image_seq_length": 4},
        attributes={"full_image_sequence": GEMMA_IMAGE},
        unused=("num_crops",),
    ),
    "qwen2_vl": Family(
        {"model_type": "qwen2_vl"},
        Qwen2VLImageProcessorPil,
        Qwen2VLProcessor,
        "<|image_pad|>",
        ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        QWEN,
        attributes={"image_token": "<|image_pad|>", "image_processor": SimpleNamespace(merge_size=2)},
    ),
    "glm4v": Family(
        {"model_type": "glm4v"},
        Glm4vImageProcessorPil,
        Glm4vProcessor,
        "<|image|>",
        ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
        QWEN,
        attributes={"image_token": "<|image|>", "image_processor": SimpleNamespace(merge_size=2)},
    ),
    "kimi_vl": Family(
        {"model_type": "kimi_vl"},
        KimiVLReference,
        KimiVLReference,
        "<|media_pad|>",
        ("<|media_start|>", "<|media_pad|>", "<|media_end|>"),
        {
            **{"patch_size": 4, "in_token_limit": 60, "pad_input": True, "merge_kernel_size": [2, 2]},
            **{"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.3]},
        },
        attributes={"image_token": "<|media_pad|>"},
    ),
    "qwen3_vl": Family(
        {"model_type": "qwen3_vl"},
        Qwen2VLImageProcessorPil,
        Qwen2VLProcessor,
        "<|image_pad|>",
        ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        {**QWEN, "merge_size": 1, "temporal_patch_size": 3, "resample": 2},
        attributes={"image_token": "<|image_pad|>", "image_processor": SimpleNamespace(merge_size=1)},
    ),
    "mistral3": Family(
        {"model_type": "mistral3"},
        PixtralImageProcessorPil,
        pixtral_processor(),
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"size": {"longest_edge": 60}, "patch_size": 4},
        {"patch_size": 4, "spatial_merge_size": 2},
        call={"patch_size": 8},
        attributes={
            **{"patch_size": 4, "spatial_merge_size": 2, "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"},
            "image_end_token": "[IMG_END]",
        },
    ),
    "pixtral": Family(
        {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 8}},
        PixtralImageProcessorPil,
        pixtral_processor(),
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"size": {"longest_edge": 100}},
        call={"patch_size": 8},
        attributes={
            **{"patch_size": 8, "spatial_merge_size": 1, "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"},
            "image_end_token": "[IMG_END]",
        },
    ),
    "lighton_ocr": Family(
        {"model_type": "lighton_ocr"},
        PixtralImageProcessorPil,
        LightOnOcrProcessor,
        "<|image_pad|>",
        ("<|image_pad|>", "<|vision_end|>"),
        {"size": {"longest_edge": 60}, "patch_size": 8},
        {"patch_size": 4, "spatial_merge_size": 2},
        attributes={"image_token": "<|image_pad|>", "effective_patch_size": 8},
    ),
    "internvl": Family(
        {"model_type": "internvl"},
        GotOcr2ImageProcessorPil,
        InternVLProcessor,
        "<IMG_CONTEXT>",
        ("<img>", "</img>", "<IMG_CONTEXT>"),
        {"size": {"height": 16, "width": 16}, "max_patches": 6, "crop_to_patches": True},
        {"image_seq_length": 4},
        attributes={
            **{"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"},
            "image_seq_length": 4,
        },
        unused=("num_patches",),
    ),
    "idefics2": Family(
        {"model_type": "idefics2", "perceiver_config": {"resampler_n_latents": 5}},
        Idefics2Reference,
        Idefics2Reference,
        "<image>",
        ("<image>", "<around>"),
        {"size": {"shortest_edge": 20, "longest_edge": 64}},
        {"image_boundary_token": "<around>"},
    ),
    "minicpmv4_6": Family(
        {"model_type": "minicpmv4_6"},
        MiniCPMVReference,
        MiniCPMVReference,
        "<|image_pad|>",
        ("<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>"),
        {"scale_resolution": 24, "patch_size": 4, "max_slice_nums": 5, "use_image_id": False},
        attributes={
            **{"image_token": "<|image_pad|>", "image_start_token": "<image>", "image_end_token": "</image>"},
            **{"slice_start_token": "<slice>", "slice_end_token": "</slice>", "slice_mode": True},
        },
        unused=("grids", "num_patches_per_image"),
    ),
    "idefics3": Family(
        {"model_type": "idefics3"},
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        "<image>",
        ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"),
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}},
        {"image_seq_len": 4},
        call={"return_row_col_info": True},
        attributes={
            **{"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "image_seq_len": 4},
            "global_image_tag": "<global-img>",
        },
        unused=("rows", "cols"),
    ),
    "smolvlm": Family(
        {"model_type": "smolvlm"},
        SmolVLMImageProcessorPil,
        Idefics3Processor,
        "<image>",
        ("<image>", "<fake_token_around_image>", "<global-img>"),
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": False},
        {"image_seq_len": 4},
        call={"return_row_col_info": True},
        attributes={
            **{"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "image_seq_len": 4},
            "global_image_tag": "<global-img>",
        },
        unused=("rows", "cols"),
    ),
    "llava_next": Family(
        {"model_type": "llava_next", "vision_config": VISION},
        LlavaNextImageProcessorPil,
        LlavaNextProcessor,
        "<image>",
        ("<image>",),
        {**SMALL, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]},
        LLAVA,
        attributes=llava(**LLAVA),
    ),
    "llava_onevision": Family(
        {"model_type": "llava_onevision"},
        LlavaOnevisionImageProcessorPil,
        LlavaOnevisionProcessor,
        "<image>",
        ("<image>",),
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[a, b] for a in (28, 56) for b in (28, 84)]},
        ONEVISION,
        attributes=llava(**ONEVISION),
        unused=("batch_num_images",),
    ),
    "paligemma": Family(
        {"model_type": "paligemma"},
        SiglipImageProcessorPil,
        PaliGemmaProcessor,
        "<image>",
        ("<image>",),
        {"size": {"height": 20, "width": 20}},
        {"image_seq_length": 5},
        attributes={"image_token": "<image>", "image_seq_length": 5},
    ),
}


def write(name: str, folder: Path, *, nested: bool = False) -> Path:
    """Write the checkpoint of a family. nested: with the image processor's settings in processor_config.json, as
    transformers 5 writes them."""
    family = FAMILIES[name]
    image = json.loads(family.image(**family.settings).to_json_string())
    files = {
        "config.json": family.config,
        "processor_config.json": {**family.processor_settings, **({"image_processor": image} if nested else {})},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    if not nested:
        files["preprocessor_config.json"] = image
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    write_tokenizer(folder, family.tokens)
    return folder


def write_tokenizer(folder: Path, specials: tuple[str, ...]) -> None:
    """Write a tokenizer in which several line feeds are one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator(["user\n\n\nWhat is this?\n\n\n", "\n\n\n\n"] * 8, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    backend.save(str(folder / "tokenizer.json"))


def reference(name: str, image: Image.Image) -> tuple[dict[str, np.ndarray[Any, Any]], str]:
    """Return the tensors of transformers, and the text that replaces the placeholder."""
    family = FAMILIES[name]
    outputs = family.image(**family.settings)(images=[image], return_tensors="np", **family.call)
    text = family.processor.replace_image_token(_self(family), outputs, 0)
    return {key: value for key, value in outputs.items() if key not in family.unused}, text


def _self(family: Family) -> SimpleNamespace:
    """Return a processor with the attributes and methods that `replace_image_token` uses. Some classes require
    torchvision or tokenizers of their own."""
    own = SimpleNamespace(**{"image_processor": SimpleNamespace(**family.settings), **family.attributes})
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        if (method := getattr(family.processor, name, None)) is not None:
            setattr(own, name, method.__get__(own))
    return own


def reference_ids(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def own_tokenizer(folder: Path) -> OwnTokenizer:
    return OwnTokenizer(folder)
