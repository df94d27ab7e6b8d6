"""llama.cpp through llama-cpp-python: its calls of the model alone, without any sampling. Needs gguf beside it."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.backends import STEPS, Job, Measure, prompts
from benchmarks.backends.gguf_file import gguf

BATCH = 512


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: a type of llama.cpp, such as F16, Q8_0, Q4_0."""
    import llama_cpp  # type: ignore[import-not-found]

    rows, _, tokens = most
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(quiet(llama_cpp), None)
    file = gguf(checkpoint, bits)
    how = llama_cpp.llama_model_default_params()
    how.use_mmap = False  # pages of a file may be taken back while other sides run
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), how)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = tokens + max(1, rows) * (STEPS + 8)
    settings.kv_unified = True
    settings.n_batch = settings.n_ubatch = BATCH
    settings.n_seq_max = max(1, rows)
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    memory = llama_cpp.llama_get_memory(context)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    cached: Job | None = None  # whose prompts the cache holds
    rounds = 0

    def decode(entries: Sequence[tuple[int, int, int, bool]]) -> None:
        for at, (token, position, row, wanted) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = row, wanted
        batch.n_tokens = len(entries)
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_synchronize(context)

    def read(job: Job, start: int = 0) -> None:
        llama_cpp.llama_memory_clear(memory, True)
        for row, ids in enumerate(prompts(max(1, job.batch), job.context, vocab, start)):
            for at in range(0, len(ids), BATCH):
                part = ids[at : at + BATCH]
                decode([(token, at + i, row, at + i == len(ids) - 1) for i, token in enumerate(part)])

    def measure(job: Job) -> float:
        nonlocal cached, rounds
        rounds += 1
        if job.batch == 0:
            cached, start = None, time.perf_counter()
            read(job, rounds)
            return job.context / (time.perf_counter() - start)
        if cached != job:
            read(job)
            cached = job
        if not all(llama_cpp.llama_memory_seq_rm(memory, row, job.context, -1) for row in range(job.batch)):
            read(job)  # a recurrent state cannot return to the end of the prompt
        decode([(11, job.context, row, True) for row in range(job.batch)])
        start = time.perf_counter()
        for step in range(1, STEPS):
            decode([(11 + step, job.context + step, row, True) for row in range(job.batch)])
        return job.batch * (STEPS - 1) / (time.perf_counter() - start)

    return measure


def quiet(llama_cpp: Any) -> Any:
    """Return a callback that prints only errors."""

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, data: Any) -> None:
        if level >= 4:
            sys.stderr.write(text.decode())

    quiet.keep = log  # type: ignore[attr-defined]  # C keeps only its address
    return log
