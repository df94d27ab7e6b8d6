"""This engine, in process: scheduling, sampling and detokenization of all rows included."""

from pathlib import Path
from typing import Any

from benchmarks.backends import STEPS, Job, Measure, prompts
from benchmarks.backends.gguf_file import gguf

OWN = ("stored", "int8", "int4")


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: stored, int8, int4, bfloat16 (stored weights, products in bfloat16), or a type of llama.cpp (a GGUF file);
    variant: of the compiled kernels, or torch."""
    from engine.llm import LLM, Params

    rows, context, _ = most
    kernels: dict[str, Any] = {"kernels": variant} if variant else {}
    numbers = {"weights": bits} if bits in OWN else {"matmul_precision": "bfloat16"} if bits == "bfloat16" else {}
    llm = LLM(
        checkpoint if bits in OWN or bits == "bfloat16" else gguf(checkpoint, bits),
        threads=threads,
        max_running=max(1, rows),
        max_context=context + STEPS + overlap_tokens(rows, context) + 16,
        **numbers,
        **kernels,
    )
    rounds = 0

    def measure(job: Job) -> float:
        nonlocal rounds
        rounds += 1
        if job.batch == 0:
            params = Params(temperature=0.0, max_tokens=1)
            (only,) = llm.generate(prompts(1, job.context, llm.vocab, start=rounds), params)
            assert only.timing is not None
            if only.timing.cached_tokens:
                raise SystemExit(f"{only.timing.cached_tokens} tokens of a new prompt were in the prefix cache")
            return job.context / (only.timing.first_token - only.timing.scheduled)
        ahead = overlap_tokens(job.batch, job.context)
        all_params = [
            Params(temperature=0.0, ignore_eos=True, max_tokens=STEPS + (0 if row == job.batch - 1 else ahead))
            for row in range(job.batch)
        ]
        last = llm.generate(prompts(job.batch, job.context, llm.vocab), all_params)[-1]
        assert last.timing is not None
        return job.batch * (STEPS - 1) / (last.timing.last_token - last.timing.first_token)

    return measure


def overlap_tokens(rows: int, context: int) -> int:
    """Tokens by which the first row is ahead when the last one's prompt has been read, so that all run to the end."""
    return rows * context // 512 + 8
