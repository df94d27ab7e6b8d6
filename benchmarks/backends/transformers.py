"""transformers: calls of the model alone, without any sampling."""

import time
from pathlib import Path
from typing import Any

from benchmarks.backends import STEPS, Job, Measure, prompts


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: a type of torch, such as float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, bits)).eval()
    vocab = model.config.vocab_size
    cached: tuple[Job, Any] | None = None  # whose prompts the cache holds
    rounds = 0

    @torch.inference_mode()
    def measure(job: Job) -> float:
        nonlocal cached, rounds
        rounds += 1
        if job.batch == 0:
            ids = torch.tensor(prompts(1, job.context, vocab, start=rounds))
            start = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            return job.context / (time.perf_counter() - start)
        ids = torch.tensor(prompts(job.batch, job.context, vocab))
        if cached is None or cached[0] != job:
            cached = job, model(ids, use_cache=True, logits_to_keep=1).past_key_values
        cache, one = cached[1], ids[:, :1]
        if extra := cache.get_seq_length() - job.context:
            cache.crop(-extra)
        model(one, past_key_values=cache)
        start = time.perf_counter()
        for _ in range(STEPS - 1):
            model(one, past_key_values=cache)
        return job.batch * (STEPS - 1) / (time.perf_counter() - start)

    return measure
