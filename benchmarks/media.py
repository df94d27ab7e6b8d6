"""Measure media on a CPU: processors, towers, repeated images, and speech.

    python -m benchmarks.media [--rounds 7] [--edge 1024] [--depth 4] [--width 256] [--seconds 10] [--threads N]
                               [--llama PYTHON]

Both sides of a comparison run in alternating rounds; the first round warms up. Prints medians and ranges of

- preprocessing of an image per megapixel: transformers' processor for Pillow (Qwen2-VL), and the gateway's
- encoding of an image with a tower of random weights: torch, and the compiled kernels
- the time to first token of a prompt with an image: a new image, and a repeated one
- with --llama, the encoder alone: a CLIP tower of --depth blocks and --width columns (a multiple of 64) for images of
  336 pixels, with compiled kernels and with llama.cpp (mtmd), which PYTHON runs; first one side, then the other
- the real-time factor of speech (Whisper with random weights): seconds of audio in a second, torch and compiled kernels
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.backends.llama_cpp_media import HEAD, PATCH
from engine.api.media import MediaItem
from engine.distributed.world import SINGLE
from engine.layers.linear import Target
from engine.layers.towers import Towers
from engine.llm import LLM, AudioPrompt, MediaPrompt, Params
from engine.media.families import read_processors
from engine.media.processor import process
from engine.media.spectrogram import log_mel
from engine.models.checkpoint import read_checkpoint
from engine.weights.files import Weights
from kernels.cpu.library import best
from kernels.cpu.program import Team

IMAGE, VOCAB = 95, 96
EDGE = 336  # of images of the CLIP tower
TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}

Times = dict[str, list[float]]


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Return the seconds of each round of each side."""
    took: Times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            if number:
                took[name].append(time.perf_counter() - began)
    return took


def report(title: str, took: Times, scale: float, unit: str) -> dict[str, Any]:
    """Print the median and the range of each side, in seconds times `scale`, or the inverse for RTFx. Return these,
    mean, percentiles (nearest rank) and all values."""
    found: dict[str, Any] = {}
    print(title)
    for name, times in took.items():
        values = [scale / one if unit == "x" else scale * one for one in times]
        ordered = sorted(values)
        ranks = {f"p{share}": ordered[max(0, -(-share * len(ordered) // 100) - 1)] for share in (50, 90, 99)}
        middle = {"median": statistics.median(values), "mean": statistics.fmean(values), **ranks}
        found[name] = {**middle, "least": min(values), "most": max(values), "values": values}
        print(f"  {name:24} {found[name]['median']:10.3f} {unit}  ({min(values):.3f} … {max(values):.3f})")
    return found


def picture(edge: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (edge // 8, edge // 8, 3), np.uint8)
    return Image.fromarray(pixels).resize((edge, edge))


def qwen(folder: Path, depth: int, width: int) -> None:
    """Write a Qwen2-VL with random weights and its processor."""
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        vision_config={"depth": depth, "embed_dim": width, "num_heads": width // 32, "hidden_size": 64},
        image_token_id=IMAGE,
    )
    torch.manual_seed(0)
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    transformers.Qwen2VLImageProcessorPil().save_pretrained(folder)


def prompt(folder: Path, image: Image.Image) -> MediaPrompt:
    processor = read_processors(folder).image
    assert processor is not None, "the folder has a processor"
    found = process(processor, image)
    (count,) = found.runs
    return MediaPrompt((5, *(IMAGE,) * count, 7), (MediaItem("image", found.digest, ((1, count),), found.tensors),))


def preprocessing(folder: Path, image: Image.Image, rounds: int) -> dict[str, Any]:
    theirs = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    own = read_processors(folder).image
    assert own is not None, "the folder has a processor"
    sides: dict[str, Callable[[], object]] = {
        "transformers": lambda: theirs(images=[image], return_tensors="np"),
        "gateway": lambda: process(own, image),
    }
    megapixels = image.width * image.height / 1e6
    return report("preprocessing, ms per megapixel", alternate(sides, rounds), 1e3 / megapixels, "ms")


def opened(folder: Path, kernels: str, threads: int, **more: Any) -> LLM:
    settings = {"max_context": 4096, "kv_bytes": 1 << 24, "max_step_tokens": 4096, "max_running": 2, **more}
    return LLM(folder, kernels=kernels, threads=threads, **settings)


def encoding(folder: Path, edge: int, rounds: int, threads: int) -> dict[str, Any]:
    """Each round has a new image, so that no embeddings are kept."""
    images = (prompt(folder, picture(edge, seed)) for seed in range(1000))
    greedy = Params(temperature=0.0, max_tokens=1)
    with opened(folder, "torch", threads) as torch_, opened(folder, best(), threads) as compiled:
        sides = {
            "torch": lambda: torch_.generate(next(images), greedy),
            best(): lambda: compiled.generate(next(images), greedy),
        }
        return report("encoding an image, ms", alternate(sides, rounds), 1e3, "ms")


def first_token(folder: Path, edge: int, rounds: int, threads: int) -> dict[str, Any]:
    images = (prompt(folder, picture(edge, seed)) for seed in range(1, 1000))
    repeated = prompt(folder, picture(edge, 0))
    greedy = Params(temperature=0.0, max_tokens=1)
    with opened(folder, best(), threads) as llm:
        sides = {
            "new image": lambda: llm.generate(next(images), greedy),
            "repeated image": lambda: llm.generate(repeated, greedy),
        }
        return report("time to first token, ms", alternate(sides, rounds), 1e3, "ms")


def speech(folder: Path, depth: int, width: int, seconds: float, rounds: int, threads: int) -> dict[str, Any]:
    """The reply has a token for each quarter of a second, as speech in English has about."""
    frames = 2 * int(50 * seconds)
    config = transformers.WhisperConfig(
        **{"d_model": width, "encoder_layers": depth, "decoder_layers": depth, "vocab_size": VOCAB},
        **{"encoder_attention_heads": width // 32, "decoder_attention_heads": width // 32},
        **{"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width, "max_source_positions": frames // 2},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    samples = np.random.default_rng(0).normal(0, 0.1, int(16_000 * seconds)).astype(np.float32)
    params = Params(temperature=0.0, max_tokens=max(1, int(4 * seconds)), ignore_eos=True)

    def heard(llm: LLM) -> object:
        return llm.generate(AudioPrompt(log_mel(samples, mels=80, frames=frames), (1,)), params)

    more = {"max_context": frames // 2 + 448, "max_step_tokens": frames // 2 + 8}
    with opened(folder, "torch", threads, **more) as torch_, opened(folder, best(), threads, **more) as compiled:
        sides = {"torch": lambda: heard(torch_), best(): lambda: heard(compiled)}
        return report("speech, seconds of audio in a second (RTFx)", alternate(sides, rounds), seconds, "x")


def tower(folder: Path, depth: int, width: int, rounds: int, threads: int, llama: str) -> dict[str, Any]:
    """transformers' feature layer is the one before the last, which is not computed."""
    heads = width // HEAD
    eyes = transformers.CLIPVisionConfig(
        **{"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth + 1},
        **{"num_attention_heads": heads, "image_size": EDGE, "patch_size": PATCH, "projection_dim": width},
    )
    config = transformers.LlavaConfig(
        vision_config=eyes, text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    found = read_checkpoint(folder)
    assert found.model.media is not None, "LLaVA reads images"
    own = Towers(found.model.media, SINGLE, Target(torch.float32, torch.device("cpu"), Team(best(), threads)))
    own.load(Weights(found.tensors, lambda fraction: None).read)
    item = {"pixel_values": torch.randn(1, 3, EDGE, EDGE)}
    took = alternate({best(): lambda: own.encode([item])}, rounds)
    shape = {"edge": EDGE, "depth": depth, "width": width, "threads": threads, "rounds": rounds}
    options = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    made = subprocess.run(
        [llama, "-m", "benchmarks.backends.llama_cpp_media", *options], check=True, capture_output=True, text=True
    )
    took["llama.cpp"] = json.loads(made.stdout.splitlines()[-1])
    return report("encoder of an image, ms", took, 1e3, "ms")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 7, "edge": 1024, "depth": 4, "width": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama", help="Python with llama-cpp-python and gguf")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "eyes").mkdir()
        qwen(folder / "eyes", given.depth, given.width)
        found = {
            "preprocessing": preprocessing(folder / "eyes", picture(given.edge), given.rounds),
            "encoding": encoding(folder / "eyes", given.edge, given.rounds, given.threads),
            "first_token": first_token(folder / "eyes", given.edge, given.rounds, given.threads),
            "speech": speech(folder / "ears", given.depth, given.width, given.seconds, given.rounds, given.threads),
        }
        if given.llama:
            sizes = given.depth, given.width, given.rounds, given.threads
            found["tower"] = tower(folder / "clip", *sizes, given.llama)
    if given.json:
        given.json.write_text(json.dumps({"options": {k: str(v) for k, v in vars(given).items()}, **found}, indent=1))
    return found


if __name__ == "__main__":
    main()
