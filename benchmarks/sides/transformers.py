"""transformers: calls of the model alone, without any sampling."""

import time
from pathlib import Path
from typing import Any

from benchmarks.sides import STEPS, Job, Measure, prompts


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: a type of torch, such as float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, bits)).eval()
    vocab = model.config.vocab_size
    kept: tuple[Job, Any] | None = None  # whose prompts the cache holds
    rounds = 0

    @torch.inference_mode()
    def measure(asked: Job) -> float:
        nonlocal kept, rounds
        rounds += 1
        if asked.batch == 0:
            ids = torch.tensor(prompts(1, asked.context, vocab, start=rounds))
            start = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            return asked.context / (time.perf_counter() - start)
        ids = torch.tensor(prompts(asked.batch, asked.context, vocab))
        if kept is None or kept[0] != asked:
            kept = asked, model(ids, use_cache=True, logits_to_keep=1).past_key_values
        cache, one = kept[1], ids[:, :1]
        if extra := cache.get_seq_length() - asked.context:
            cache.crop(-extra)
        model(one, past_key_values=cache)
        start = time.perf_counter()
        for _ in range(STEPS - 1):
            model(one, past_key_values=cache)
        return asked.batch * (STEPS - 1) / (time.perf_counter() - start)

    return measure
