"""ONNX Runtime through onnxruntime-genai, with a model from its own builder.

The model has fused attention and MatMulNBits in blocks of 32 with 8-bit activations (accuracy level 4), also in the
head. Greedy sampling is included. The builder requires torch, transformers and onnx-ir.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.backends import STEPS, Job, Measure, prompts

BUILDER = "onnxruntime_genai.models.builder"
OPTIONS = ("accuracy_level=4", "block_size=32")


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: fp32, int8 or int4."""
    import numpy as np
    import onnxruntime_genai as genai  # type: ignore[import-not-found]

    folder = checkpoint / f"onnxruntime-{bits}"
    if not (folder / "genai_config.json").exists():
        command = [sys.executable, "-m", BUILDER, "-m", str(checkpoint), "-o", str(folder), "-p", bits, "-e", "cpu"]
        command += ["-c", str(folder / "cache")] + ([] if bits == "fp32" else ["--extra_options", *OPTIONS])
        subprocess.run(command, check=True, stdout=sys.stderr)
    settings = folder / "genai_config.json"
    config = json.loads(settings.read_text())
    config["model"]["decoder"]["session_options"] |= {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config["model"]["eos_token_id"] = config["model"]["pad_token_id"] = 0  # min_length keeps it from ending at one
    settings.write_text(json.dumps(config, indent=1))
    model = genai.Model(str(folder))
    vocab = config["model"]["vocab_size"]
    cached: tuple[Job, Any] | None = None  # whose prompts the cache holds
    rounds = 0

    def read(job: Job, start: int) -> Any:
        rows = max(1, job.batch)
        params = genai.GeneratorParams(model)
        params.set_search_options(
            batch_size=rows, do_sample=False, max_length=job.context + STEPS + 8, min_length=job.context + STEPS + 8
        )
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts(rows, job.context, vocab, start), np.int32).reshape(-1))
        return generator

    def measure(job: Job) -> float:
        nonlocal cached, rounds
        rounds += 1
        if job.batch == 0:
            start = time.perf_counter()
            read(job, rounds).generate_next_token()
            return job.context / (time.perf_counter() - start)
        if cached is not None and cached[0] == job and job.batch == 1:
            generator = cached[1]
            generator.rewind_to(job.context)  # works for a single row; others are computed again
            generator.append_tokens(np.array([11], np.int32))
        else:
            cached = None
            generator = read(job, 0)
            cached = job, generator
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(STEPS - 1):
            generator.generate_next_token()
        return job.batch * (STEPS - 1) / (time.perf_counter() - start)

    return measure
