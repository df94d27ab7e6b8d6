"""Checkpoints of small models with image input, without weights, and image files for them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image
from tokenizers import AddedToken, Tokenizer

PARTS = (
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO{% elif part.type == 'audio' %}AUDIO"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
HEAD = "{% for message in messages %}<|im_start|>{{ message.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EITHER = "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}"
HALF = [0.5, 0.5, 0.5]

MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "tokens": ["<image>"],
        "template": PARTS.replace("IMAGE", "<image>\n"),
        "config": {"model_type": "llava", "vision_config": {"patch_size": 7}},
        "image": {
            **{"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}},
            "crop_size": {"height": 28, "width": 28},
        },
        "processor": {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
    "gemma3": {
        "tokens": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        "template": EITHER.replace("IMAGE", "<start_of_image>"),
        "config": {"model_type": "gemma3"},
        "image": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        "processor": {"image_seq_length": 4},
    },
    "qwen2_vl": {
        "tokens": ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"],
        "template": EITHER.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace(
            "VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"
        ),
        "config": {"model_type": "qwen2_vl"},
        "image": {
            **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "image_mean": HALF, "image_std": HALF},
            "size": {"shortest_edge": 256, "longest_edge": 2304},
        },
        "processor": {},
    },
}
AUDIO_MODEL: dict[str, Any] = {
    "tokens": ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"],
    "template": EITHER.replace("AUDIO", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    "config": {"model_type": "qwen2_audio"},
    "image": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 4},
    "processor": {},
}
"""A model that reads audio."""
EXPANDED = {
    "llava": "<image>" * 16 + "\n",
    "gemma3": "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n",
    "qwen2_vl": "<|vision_start|>" + "<|image_pad|>" * 20 + "<|vision_end|>",
}
"""Prompt text of an image of 40 x 30 pixels."""


def write(name: str, text_model: Path, folder: Path) -> Path:
    """Write a model with the tokenizer of `text_model` and the tokens of its images."""
    model = AUDIO_MODEL if name == "qwen2_audio" else MODELS[name]
    backend = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in model["tokens"]])
    backend.save(str(folder / "tokenizer.json"))
    template = HEAD + model["template"] + TAIL
    files = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": template},
        "config.json": model["config"],
        "preprocessor_config.json": model["image"],
        "processor_config.json": model["processor"],
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return folder


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def video(count: int = 12, width: int = 32, height: int = 24, seed: int = 0) -> bytes:
    """Return an MP4 file of 10 frames a second."""
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        track = container.add_stream("mpeg4", rate=10)
        track.width, track.height, track.pix_fmt = width, height, "yuv420p"
        for at in range(count):
            frame = av.VideoFrame.from_ndarray(np.asarray(picture(width, height, seed + at)), format="rgb24")
            container.mux(track.encode(frame))
        container.mux(track.encode())
    return stream.getvalue()


def wav(samples: int = 16_000, seed: int = 0) -> bytes:
    """Return a WAV file at 16 kHz."""
    stream = io.BytesIO()
    values = np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)
    soundfile.write(stream, values, 16_000, format="WAV", subtype="FLOAT")
    return stream.getvalue()
