"""Decode with llama.cpp for `benchmarks.lora` and `benchmarks.speculation`, with an adapter or with prompt lookup.

    python -m benchmarks.backends.llama_cpp_requests --checkpoint FOLDER --bits Q8_0 --threads 2 [--adapter FOLDER]

prints `ready` when the model is loaded, then the rate for each line on standard input, a JSON object:

{"do": "rows", "rows": 16, "tokens": 64, "prompt": 64, "adapter": true}     tokens per second of all rows
{"do": "text", "prompt": […], "reply": […], "drafts": 4}                    of one request whose reply is known

A reply is known because the weights are random: each step decodes the last token and the draft of
`LlamaPromptLookupDecoding`, and the draft is accepted as far as it equals the reply. So the time is that of llama.cpp's
steps and of its lookup. Needs llama-cpp-python and gguf, and imports nothing else of the project.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.backends.gguf_file import gguf, write_adapter
from benchmarks.backends.llama_cpp import BATCH, quiet

Entries = Sequence[tuple[int, int, int, bool]]  # token, position, row, logits


class LlamaCpp:
    def __init__(self, checkpoint: Path, bits: str, threads: int, tokens: int, rows: int, adapter: Path | None) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self._lib, lib = llama_cpp, llama_cpp
        lib.llama_backend_init()
        lib.llama_log_set(quiet(lib), None)
        how = lib.llama_model_default_params()
        how.use_mmap = False
        self._model = lib.llama_model_load_from_file(str(gguf(checkpoint, bits)).encode(), how)
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = tokens, max(1, rows), True
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, settings)
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._adapter = None
        if adapter is not None:
            self._adapter = lib.llama_adapter_lora_init(self._model, str(write_adapter(checkpoint, adapter)).encode())
            assert self._adapter, f"llama.cpp cannot load {adapter}"

    def rows(self, rows: int, tokens: int, prompt: int, adapter: bool) -> float:
        """Return the tokens per second of all rows after their prompts."""
        self._use_adapter(active=adapter)
        self._lib.llama_memory_clear(self._memory, True)
        for row in range(rows):
            self._read([(row * 7 + at * 3) % self._vocab for at in range(prompt)], row)
        self._decode([(11, prompt, row, True) for row in range(rows)])
        start = time.perf_counter()
        for step in range(1, tokens):
            self._decode([(11 + step, prompt + step, row, True) for row in range(rows)])
        return rows * (tokens - 1) / (time.perf_counter() - start)

    def text(self, prompt: list[int], reply: list[int], drafts: int) -> float:
        """Return the tokens per second after the first token. drafts: of each step; 0: no lookup."""
        import numpy as np
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

        self._use_adapter(active=False)
        self._lib.llama_memory_clear(self._memory, True)
        self._read(prompt, 0)
        lookup = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=drafts) if drafts else None
        known = [*prompt, reply[0]]
        text, start = [*prompt, *reply], time.perf_counter()
        while len(known) < len(text):
            draft = [] if lookup is None else [int(token) for token in lookup(np.array(known, np.intc))]
            draft = draft[: min(drafts, len(text) - len(known) - 1)]
            first = len(known) - 1
            self._decode([(token, first + at, 0, True) for at, token in enumerate((known[-1], *draft))])
            accepted = 0
            while accepted < len(draft) and draft[accepted] == text[len(known) + accepted]:
                accepted += 1
            known = text[: len(known) + accepted + 1]
            self._lib.llama_memory_seq_rm(self._memory, 0, len(known) - 1, -1)
        return (len(reply) - 1) / (time.perf_counter() - start)

    def _read(self, ids: Sequence[int], row: int) -> None:
        for at in range(0, len(ids), BATCH):
            self._decode([(token, at + i, row, at + i == len(ids) - 1) for i, token in enumerate(ids[at : at + BATCH])])

    def _decode(self, entries: Entries) -> None:
        batch = self._batch
        for at, (token, position, row, wanted) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = row, wanted
        batch.n_tokens = len(entries)
        assert self._lib.llama_decode(self._context, batch) == 0, "llama.cpp could not decode a step"
        self._lib.llama_synchronize(self._context)

    def _use_adapter(self, *, active: bool) -> None:
        assert self._adapter is not None or not active, "no --adapter is given"
        if self._adapter is not None:
            lib = self._lib
            adapters, scales = (lib.llama_adapter_lora_p_ctypes * 1)(self._adapter), (ctypes.c_float * 1)(1.0)
            wrong = lib.llama_set_adapters_lora(self._context, adapters, int(active), scales)
            assert not wrong, "llama.cpp cannot use the adapter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--bits", required=True, help="type of llama.cpp, such as Q8_0 or F16")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of all rows")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--adapter", type=Path, help="folder of PEFT")
    options = parser.parse_args()
    engine = LlamaCpp(options.checkpoint, options.bits, options.threads, options.tokens, options.rows, options.adapter)
    measures: dict[str, Callable[..., float]] = {"rows": engine.rows, "text": engine.text}
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(measures[asked.pop("do")](**asked), flush=True)


if __name__ == "__main__":
    main()
