"""Compare the kernels of encoder-decoder models on a CPU: torch and the compiled ones, in alternating rounds.

    python -m benchmarks.translation [--shapes bart-base flan-t5-base] [--rows 1 8] [--input 128] [--reply 32]

Weights are random. Prints encoded tokens per second until the first token of a batch, and generated tokens per second
after it, of all rows together: median, range, and the ratio of the medians.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.llm import LLM, Params
from kernels.cpu.library import best

SHAPES: dict[str, dict[str, Any]] = {
    "bart-base": {
        **{"model_type": "bart", "d_model": 768, "vocab_size": 50_265},
        **{"encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12},
        **{"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "max_position_embeddings": 1024},
        **{"decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1},
    },
    "flan-t5-base": {
        **{"model_type": "t5", "d_model": 768, "vocab_size": 32_128, "d_kv": 64},
        **{"num_layers": 12, "num_heads": 12, "d_ff": 2048, "feed_forward_proj": "gated-gelu"},
        **{"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False},
    },
    "small": {
        **{"model_type": "t5", "d_model": 32, "vocab_size": 96, "d_kv": 8},
        **{"num_layers": 1, "num_heads": 4, "d_ff": 64, "feed_forward_proj": "relu"},
        **{"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    },
}
Rates = dict[tuple[str, int], list[tuple[float, float]]]  # encoded and generated tokens/s by kernels and rows


def write(shape: str, folder: str) -> None:
    """Write a checkpoint with random weights."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(1)
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**SHAPES[shape])).save_pretrained(folder)


def measured(llm: LLM, prompts: list[list[int]], reply: int) -> tuple[float, float]:
    """Return encoded and generated tokens per second of a batch."""
    found = llm.generate(prompts, Params(temperature=0.0, max_tokens=reply, ignore_eos=True))
    times = [one.timing for one in found]
    arrived, ended = min(one.arrived for one in times), max(one.last_token for one in times)
    begun = max(one.first_token for one in times)
    return sum(map(len, prompts)) / (begun - arrived), len(prompts) * (reply - 1) / (ended - begun)


def compared(folder: Path, options: argparse.Namespace) -> Rates:
    """Measure both kernels, alternating. The first round warms up."""
    sides = {
        name: LLM(folder, kernels=name, threads=options.threads, max_running=max(options.rows))
        for name in dict.fromkeys(("torch", best()))
    }
    draw, rates = random.Random(7), Rates()
    try:
        for number in range(options.rounds + 1):
            for rows in options.rows:
                vocab = next(iter(sides.values())).vocab
                prompts = [[draw.randrange(3, vocab) for _ in range(options.input)] for _ in range(rows)]
                for name, llm in sides.items():
                    found = measured(llm, prompts, options.reply)
                    if number:
                        rates.setdefault((name, rows), []).append(found)
    finally:
        for llm in sides.values():
            llm.close()
    return rates


def shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):8.1f} ({min(values):.1f} … {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.translation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["bart-base", "flan-t5-base"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8], help="rows of a batch (1 8)")
    parser.add_argument("--input", type=int, default=128, help="tokens of an encoder input (128)")
    parser.add_argument("--reply", type=int, default=32, help="tokens of a reply (32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            write(shape, folder)
            rates = compared(Path(folder), options)
        print(f"{shape}, {options.threads} threads, {options.rounds} rounds, tokens/s")
        for (name, rows), found in rates.items():
            encoded, generated = zip(*found, strict=True)
            base = [statistics.median(side) for side in zip(*rates["torch", rows], strict=True)]
            ratios = [statistics.median(side) / one for side, one in zip((encoded, generated), base, strict=True)]
            print(
                f"{name:>8}, {rows} rows: encode {shown(encoded)} {ratios[0]:.2f}x   decode {shown(generated)} "
                f"{ratios[1]:.2f}x"
            )


if __name__ == "__main__":
    main()
