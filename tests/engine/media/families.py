"""Small checkpoints of each family of image processors, and the reference results of transformers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

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


def llava(**attributes: Any) -> dict[str, Any]:
    return {"image_token": "<image>", **attributes}


VISION = {"model_type": "clip_vision_model", "patch_size": 7}
LLAVA = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
FULL = {"patch_size": 7, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
SMALL = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA_IMAGE = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
QWEN = {"size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}, "patch_size": 4, "image_mean": [0.5] * 3}

FAMILIES = {
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
    "qwen3_vl": Family(
        {"model_type": "qwen3_vl"},
        Qwen2VLImageProcessorPil,
        Qwen2VLProcessor,
        "<|image_pad|>",
        ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        {**QWEN, "merge_size": 1, "temporal_patch_size": 3, "resample": 2},
        attributes={"image_token": "<|image_pad|>", "image_processor": SimpleNamespace(merge_size=1)},
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
    text = family.processor.replace_image_token(SimpleNamespace(**family.attributes), outputs, 0)
    return {key: value for key, value in outputs.items() if key not in family.unused}, text


def reference_ids(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def own_tokenizer(folder: Path) -> OwnTokenizer:
    return OwnTokenizer(folder)
