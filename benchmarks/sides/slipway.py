"""This engine, in process: scheduling, sampling and detokenization of all rows included."""

from pathlib import Path
from typing import Any

from benchmarks.sides import STEPS, Job, Measure, prompts


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: stored, int8 or int4; variant: of the compiled kernels, or torch."""
    from engine.llm import LLM, Params

    rows, context, _ = most
    kernels: dict[str, Any] = {"kernels": variant} if variant else {}
    llm = LLM(
        checkpoint,
        weights=bits,
        threads=threads,
        max_running=max(1, rows),
        max_context=context + STEPS + lead(rows, context) + 16,
        **kernels,
    )
    rounds = 0

    def measure(asked: Job) -> float:
        nonlocal rounds
        rounds += 1
        if asked.batch == 0:
            wish = Params(temperature=0.0, max_tokens=1)
            (only,) = llm.generate(prompts(1, asked.context, llm.vocab, start=rounds), wish)
            assert only.timing is not None
            if only.timing.cached_tokens:
                raise SystemExit(f"{only.timing.cached_tokens} tokens of a new prompt came from the prefix cache")
            return asked.context / (only.timing.first_token - only.timing.scheduled)
        ahead = lead(asked.batch, asked.context)
        wishes = [
            Params(temperature=0.0, ignore_eos=True, max_tokens=STEPS + (0 if row == asked.batch - 1 else ahead))
            for row in range(asked.batch)
        ]
        last = llm.generate(prompts(asked.batch, asked.context, llm.vocab), wishes)[-1]
        assert last.timing is not None
        return asked.batch * (STEPS - 1) / (last.timing.last_token - last.timing.first_token)

    return measure


def lead(rows: int, context: int) -> int:
    """Tokens by which the first row is ahead when the last one's prompt has been read, so that all run to the end."""
    return rows * context // 512 + 8
