"""Write golden/videos.npz: results of transformers' video processors for small videos.

They need torchvision, which no other test needs: `pip install --target FOLDER --no-deps torchvision`, then
`PYTHONPATH=FOLDER:. python -m tests.engine.media.video_golden`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "videos.npz"
QWEN = {"patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
SIZE = {"shortest_edge": 8 * 8, "longest_edge": 12 * 12}
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
}
"""Settings of a processor, and a video: its frames, their rate (None: a list of frames), and height and width."""


def pixels(case: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the frames of a case, uint8 [frames, 3, height, width]."""
    size = case.get("size", (11, 17))
    return np.random.default_rng(case["frames"]).integers(0, 256, (case["frames"], 3, *size), np.uint8)


def _reference(case: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    import torch
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    classes = {"internvl": InternVLVideoProcessor, "qwen3_vl": Qwen3VLVideoProcessor}
    processor = classes.get(case["type"], Qwen2VLVideoProcessor)(**case["settings"])
    frames, fps = case["frames"], case["fps"]
    meta = VideoMetadata(total_num_frames=frames, fps=fps, frames_indices=list(range(frames)))
    sampled = {} if fps is not None else {"do_sample_frames": False}
    found = processor(
        videos=[torch.from_numpy(pixels(case))],
        video_metadata=[meta],
        return_metadata=True,
        return_tensors="np",
        **sampled,
    )
    meta = found.pop("video_metadata")[0]
    arrays = {key: np.asarray(value) for key, value in found.items()}
    arrays["chosen"] = np.asarray(meta.frames_indices)
    arrays["rate"] = np.asarray(meta.sampled_fps)
    if case["type"] == "qwen3_vl":
        times = Qwen3VLProcessor._calculate_timestamps(None, list(meta.frames_indices), fps or 24, 2)
        arrays["times"] = np.asarray(times)
    return arrays


def main() -> None:
    arrays = {f"{name}/{key}": value for name, case in CASES.items() for key, value in _reference(case).items()}
    np.savez_compressed(GOLDEN, **arrays)
    print(json.dumps({name: list(value.shape) for name, value in arrays.items()}, indent=1), GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
