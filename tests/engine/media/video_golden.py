"""Write golden/videos.npz: results of transformers' video processors for small videos.

They need two packages that no other test needs: `pip install --target FOLDER --no-deps torchvision num2words`, then
`PYTHONPATH=FOLDER:. python -m tests.engine.media.video_golden`.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "videos.npz"
QWEN = {"patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
SIZE = {"shortest_edge": 8 * 8, "longest_edge": 12 * 12}
GLM = {**QWEN, "size": {key: 6 * edge for key, edge in SIZE.items()}}
SMOL = {"size": {"longest_edge": 20}, "max_image_size": {"longest_edge": 8}}
ONEVISION_TOKENS = 25
SMOL_TOKENS = 4
CASES: dict[str, dict[str, Any]] = {
    "qwen2 all": {"type": "qwen2_vl", "settings": {**QWEN, "size": SIZE}, "frames": 5, "fps": 10.0},
    "qwen2 rate": {
        **{"type": "qwen2_vl", "frames": 23, "fps": 10.0},
        "settings": {**QWEN, "size": SIZE, "do_sample_frames": True, "fps": 2},
    },
    "qwen2 most": {
        **{"type": "qwen2_5_vl", "frames": 40, "fps": 8.0},
        "settings": {**QWEN, "size": SIZE, "do_sample_frames": True, "fps": 4, "max_frames": 7},
    },
    "qwen2 count": {
        **{"type": "qwen2_5_vl", "frames": 11, "fps": 29.97},
        "settings": {**QWEN, "size": SIZE, "do_sample_frames": True, "num_frames": 5, "resample": 2},
    },
    "qwen2 capped": {
        **{"type": "qwen2_vl", "frames": 6, "fps": 5.0, "size": (19, 31)},
        "settings": {**QWEN, "size": SIZE, "cap_pixels_per_frame": True, "max_video_tokens": 20},
    },
    "qwen2 frames": {"type": "qwen2_vl", "settings": {**QWEN, "size": SIZE}, "frames": 3, "fps": None},
    "qwen3 rate": {
        "type": "qwen3_vl",
        "settings": {**QWEN, "size": {k: 6 * v for k, v in SIZE.items()}},
        "frames": 31,
        "fps": 12.5,
    },
    "qwen3 few": {
        "type": "qwen3_vl",
        "settings": {**QWEN, "size": {k: 6 * v for k, v in SIZE.items()}},
        "frames": 3,
        "fps": 25.0,
    },
    "qwen3 small": {
        **{"type": "qwen3_vl", "frames": 9, "fps": 2.0, "size": (3, 7)},
        "settings": {**QWEN, "size": SIZE, "fps": 1.0, "min_frames": 2},
    },
    "qwen3 capped": {
        **{"type": "qwen3_vl", "frames": 8, "fps": 2.0, "size": (19, 31)},
        "settings": {
            **QWEN,
            "size": {"shortest_edge": 64, "longest_edge": 4096},
            "cap_pixels_per_frame": True,
            "max_video_tokens": 9,
        },
    },
    "qwen3 frames": {
        "type": "qwen3_vl",
        "settings": {**QWEN, "size": {k: 6 * v for k, v in SIZE.items()}},
        "frames": 5,
        "fps": None,
    },
    "internvl all": {"type": "internvl", "settings": {"size": {"height": 6, "width": 8}}, "frames": 3, "fps": 10.0},
    "internvl count": {
        **{"type": "internvl", "frames": 20, "fps": 10.0},
        "settings": {"size": {"height": 4, "width": 4}, "do_sample_frames": True, "num_frames": 6},
    },
    "internvl rate": {
        **{"type": "internvl", "frames": 25, "fps": 10.0},
        "settings": {"size": {"height": 4, "width": 4}, "do_sample_frames": True, "fps": 2, "initial_shift": 1},
    },
    "glm rate": {"type": "glm4v", "settings": GLM, "frames": 31, "fps": 12.5},
    "glm odd": {"type": "glm4v", "settings": {**GLM, "fps": 1}, "frames": 9, "fps": 3.0, "size": (3, 7)},
    "glm long": {"type": "glm4v", "settings": {**GLM, "max_duration": 3}, "frames": 40, "fps": 7.5},
    "glm few": {"type": "glm4v_moe", "settings": {**GLM, "max_duration": 3}, "frames": 5, "fps": 1.0},
    "glm all": {"type": "glm4v", "settings": {**GLM, "do_sample_frames": False}, "frames": 5, "fps": 10.0},
    "glm frames": {"type": "glm4v", "settings": GLM, "frames": 5, "fps": None},
    "glm46 short": {"type": "glm46v", "settings": GLM, "frames": 45, "fps": 12.5},
    "glm46 few": {"type": "glm46v", "settings": GLM, "frames": 9, "fps": 4.0},
    "glm46 minute": {"type": "glm46v", "settings": GLM, "frames": 160, "fps": 2.5, "size": (4, 4)},
    "glm46 dense": {"type": "glm46v", "settings": GLM, "frames": 200, "fps": 6.25, "size": (4, 4)},
    "smolvlm all": {"type": "smolvlm", "settings": SMOL, "frames": 3, "fps": 10.0, "size": (9, 31)},
    "smolvlm rate": {
        **{"type": "smolvlm", "frames": 150, "fps": 2.0, "size": (13, 6)},
        "settings": {**SMOL, "video_sampling": {"fps": 1, "max_frames": 21, "video_size": {"longest_edge": 14}}},
    },
    "smolvlm long": {
        **{"type": "smolvlm", "frames": 200, "fps": 2.5, "size": (5, 6)},
        "settings": {**SMOL, "video_sampling": {"fps": 2, "max_frames": 5, "video_size": {"longest_edge": 14}}},
    },
    "smolvlm frames": {"type": "smolvlm", "settings": {**SMOL, "resample": 2}, "frames": 3, "fps": None},
    "gemma4 count": {
        **{"type": "gemma4", "frames": 9, "fps": 0.4, "size": (9, 31)},
        "settings": {"patch_size": 2, "pooling_kernel_size": 2, "num_frames": 4},
    },
    "gemma4 all": {
        **{"type": "gemma4", "frames": 3, "fps": 10.0},
        "settings": {"patch_size": 2, "pooling_kernel_size": 2, "do_sample_frames": False},
    },
    "onevision all": {
        "type": "llava_onevision",
        "settings": {"size": {"height": 8, "width": 6}},
        "frames": 3,
        "fps": 10.0,
    },
    "onevision count": {
        **{"type": "llava_onevision", "frames": 11, "fps": 10.0},
        "settings": {"size": {"height": 6, "width": 6}, "do_sample_frames": True, "num_frames": 4},
    },
    "onevision rate": {
        **{"type": "llava_onevision", "frames": 25, "fps": 10.0},
        "settings": {"size": {"height": 6, "width": 6}, "do_sample_frames": True, "fps": 2},
    },
}
"""Settings of a processor, and a video: its frames, their rate (None: a list of frames), and height and width."""


def pixels(case: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the frames of a case, uint8 [frames, 3, height, width]."""
    size = case.get("size", (11, 17))
    return np.random.default_rng(case["frames"]).integers(0, 256, (case["frames"], 3, *size), np.uint8)


def _reference(case: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    import torch
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
    from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
    from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata

    classes = {
        "gemma4": Gemma4VideoProcessor,
        "glm46v": Glm46VVideoProcessor,
        "glm4v": Glm4vVideoProcessor,
        "glm4v_moe": Glm4vVideoProcessor,
        "internvl": InternVLVideoProcessor,
        "llava_onevision": LlavaOnevisionVideoProcessor,
        "qwen3_vl": Qwen3VLVideoProcessor,
        "smolvlm": SmolVLMVideoProcessor,
    }
    texts = {
        "gemma4": Gemma4Processor,
        "glm46v": Glm46VProcessor,
        "glm4v": Glm4vProcessor,
        "glm4v_moe": Glm4vProcessor,
        "llava_onevision": LlavaOnevisionProcessor,
        "smolvlm": SmolVLMProcessor,
    }
    kind, settings = case["type"], dict(case["settings"])
    if "video_sampling" in settings:  # as Slipway does for such settings
        settings["do_sample_frames"] = True
    processor = classes.get(kind, Qwen2VLVideoProcessor)(**settings)
    frames, fps = case["frames"], case["fps"]
    duration = None if fps is None else frames / fps
    meta = VideoMetadata(total_num_frames=frames, fps=fps, frames_indices=list(range(frames)), duration=duration)
    sampled = {} if fps is not None else {"do_sample_frames": False}
    found = processor(
        videos=[torch.from_numpy(pixels(case))],
        video_metadata=[meta],
        return_metadata=True,
        return_tensors="np",
        **sampled,
    )
    text = ""
    if kind in texts:
        text = texts[kind].replace_video_token(_self(texts[kind]), found, 0)
    meta = found.pop("video_metadata")[0]
    arrays = {key: np.asarray(value) for key, value in found.items()}
    arrays["chosen"] = np.asarray(meta.frames_indices)
    arrays["rate"] = np.asarray(meta.sampled_fps)
    if kind in texts:
        arrays["text"] = np.asarray(text)
    if kind == "qwen3_vl":
        times = Qwen3VLProcessor._calculate_timestamps(None, list(meta.frames_indices), fps or 24, 2)
        arrays["times"] = np.asarray(times)
    return arrays


def _self(kind: Any) -> SimpleNamespace:
    """Return a processor with the attributes that `replace_video_token` reads."""
    own = SimpleNamespace(
        boi_token="<|image>",
        eoi_token="<image|>",
        image_token="#",
        video_token="#",
        video_processor=SimpleNamespace(merge_size=2),
        image_seq_len=SMOL_TOKENS,
        fake_image_token="<fake>",
        global_image_token="<global>",
        num_image_tokens=ONEVISION_TOKENS,
    )
    if hasattr(kind, "replace_frame_token_id"):
        own.replace_frame_token_id = kind.replace_frame_token_id.__get__(own)
    return own


def main() -> None:
    arrays = {f"{name}/{key}": value for name, case in CASES.items() for key, value in _reference(case).items()}
    np.savez_compressed(GOLDEN, **arrays)
    print(json.dumps({name: list(value.shape) for name, value in arrays.items()}, indent=1), GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
