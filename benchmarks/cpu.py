"""Decoding and prefill on a CPU beside llama.cpp and transformers: same shape, bits and threads, alternating rounds.

    python -m benchmarks.cpu --sides slipway:stored slipway:int8 llama.cpp:F16 llama.cpp:Q8_0 transformers:float32

A side is `name:bits`. Each runs in a process of its own that has loaded its model and waits, so rounds can alternate
without loading anything again; llama.cpp may live in another environment (`--llama-python`), which needs the packages
llama-cpp-python and gguf. A job is `decode:BATCH:CONTEXT` or `prefill:TOKENS`.

What is timed: Slipway's decoding from its last request's first token to that request's last, with scheduling, sampling
and detokenization of all rows; llama.cpp's and transformers' calls of the model alone, without any sampling.
`--busy` keeps one core busy with another process meanwhile. Prints medians, ranges and ratios; writes JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
STEPS = 24  # decode steps of one measurement
Measure = Callable[["Job"], float]


@dataclass(frozen=True)
class Job:
    """`batch` 0: a prefill of `context` tokens."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode:{self.batch}:{self.context}" if self.batch else f"prefill:{self.context}"


def job(text: str) -> Job:
    kind, *sizes = text.split(":")
    numbers = [int(size) for size in sizes]
    if kind == "decode" and len(numbers) == 2:
        return Job(numbers[0], numbers[1])
    if kind == "prefill" and len(numbers) == 1:
        return Job(0, numbers[0])
    raise argparse.ArgumentTypeError(f"{text}: must be decode:BATCH:CONTEXT or prefill:TOKENS")


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    return [[(7919 * (row * length + at) + 13) % (vocab - 10) + 10 for at in range(length)] for row in range(count)]


# -- sides: each loads its model and returns what measures a job, in tokens a second -----------------------------------


def slipway(checkpoint: Path, bits: str, threads: int, most: Job) -> Measure:
    from engine.llm import LLM, Params

    kernels = {"kernels": bits.split("@")[1]} if "@" in bits else {}
    lead = most.batch * most.context // 512 + 4
    llm = LLM(
        checkpoint,
        weights=bits.split("@")[0],
        threads=threads,
        max_running=max(1, most.batch),
        max_context=most.context + STEPS + lead + 8,
        prefix_cache=False,
        **kernels,
    )

    def measure(asked: Job) -> float:
        if asked.batch == 0:
            (only,) = llm.generate(prompts(1, asked.context, llm.vocab), Params(temperature=0.0, max_tokens=1))
            assert only.timing is not None
            return asked.context / (only.timing.first_token - only.timing.scheduled)
        ahead = asked.batch * asked.context // 512 + 3
        wishes = [
            Params(temperature=0.0, ignore_eos=True, max_tokens=STEPS + (0 if row == asked.batch - 1 else ahead))
            for row in range(asked.batch)
        ]
        last = llm.generate(prompts(asked.batch, asked.context, llm.vocab), wishes)[-1]
        assert last.timing is not None
        return asked.batch * (STEPS - 1) / (last.timing.last_token - last.timing.first_token)

    return measure


def llama_cpp(checkpoint: Path, bits: str, threads: int, most: Job) -> Measure:
    import llama_cpp  # type: ignore[import-not-found]

    llama_cpp.llama_backend_init()
    file = gguf(checkpoint, bits)
    llama_cpp.llama_log_set(_silent(llama_cpp), None)
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = max(1, most.batch) * (most.context + STEPS + 8)
    settings.n_batch = settings.n_ubatch = 512
    settings.n_seq_max = max(1, most.batch)
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(entries: Sequence[tuple[int, int, int, bool]]) -> None:
        for at, (token, position, row, wanted) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = row, wanted
        batch.n_tokens = len(entries)
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_synchronize(context)

    def measure(asked: Job) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        rows = prompts(max(1, asked.batch), asked.context, vocab)
        start = time.perf_counter()
        for row, ids in enumerate(rows):
            for at in range(0, len(ids), 512):
                part = ids[at : at + 512]
                decode([(token, at + i, row, at + i == len(ids) - 1) for i, token in enumerate(part)])
        if asked.batch == 0:
            return asked.context / (time.perf_counter() - start)
        decode([(11, asked.context, row, True) for row in range(asked.batch)])
        start = time.perf_counter()
        for step in range(1, STEPS):
            decode([(11 + step, asked.context + step, row, True) for row in range(asked.batch)])
        return asked.batch * (STEPS - 1) / (time.perf_counter() - start)

    return measure


def _silent(llama_cpp: Any) -> Any:
    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, data: Any) -> None:
        if level >= 4:
            sys.stderr.write(text.decode())

    _silent.keep = log  # type: ignore[attr-defined]  # C keeps only its address
    return log


def gguf(checkpoint: Path, bits: str) -> Path:
    """The checkpoint as a GGUF file of this type, made once."""
    import llama_cpp

    file, half = checkpoint / f"{bits}.gguf", checkpoint / "F16.gguf"
    if not half.exists():
        _write_gguf(checkpoint, half)
    if not file.exists():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{bits}")
        assert llama_cpp.llama_model_quantize(str(half).encode(), str(file).encode(), settings) == 0
    return file


def _write_gguf(checkpoint: Path, file: Path) -> None:
    import gguf as format_  # type: ignore[import-not-found]
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    writer = format_.GGUFWriter(file, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(1)
    names = format_.get_tensor_name_map(format_.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    data = (checkpoint / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, info in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        bits = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32).reshape(info["shape"])
        kept = values if len(info["shape"]) == 1 else values.astype(np.float16)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers(checkpoint: Path, bits: str, threads: int, most: Job) -> Measure:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, bits)).eval()

    @torch.inference_mode()
    def measure(asked: Job) -> float:
        ids = torch.tensor(prompts(max(1, asked.batch), asked.context, model.config.vocab_size))
        start = time.perf_counter()
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        if asked.batch == 0:
            return asked.context / (time.perf_counter() - start)
        one = ids[:, :1]
        cache = model(one, past_key_values=cache).past_key_values
        start = time.perf_counter()
        for _ in range(STEPS - 1):
            cache = model(one, past_key_values=cache).past_key_values
        return asked.batch * (STEPS - 1) / (time.perf_counter() - start)

    return measure


SIDES = {"slipway": slipway, "llama.cpp": llama_cpp, "transformers": transformers}


# -- the process of a side, and its other end --------------------------------------------------------------------------


def serve(name: str, checkpoint: Path, threads: int, most: Job) -> None:
    """Says "ready", then answers each job on standard input with its rate."""
    kind, bits = name.split(":")
    measure = SIDES[kind](checkpoint, bits, threads, most)
    print("ready", flush=True)
    for line in sys.stdin:
        print(measure(job(line.strip())), flush=True)


class Side:
    def __init__(self, name: str, python: str, options: argparse.Namespace, most: Job) -> None:
        self.name = name
        command = [python, str(Path(__file__).resolve()), "--serve", name, "--checkpoint", str(options.checkpoint)]
        command += ["--threads", str(options.threads), "--jobs", most.name]
        root = str(Path(__file__).resolve().parent.parent)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=_environment(root)
        )
        self._expect("ready")

    def measure(self, asked: Job) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{asked.name}\n")
        self.process.stdin.flush()
        return float(self._expect())

    def _expect(self, wanted: str | None = None) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            text = line.strip()
            if text == wanted or (wanted is None and text):
                return text
        raise SystemExit(f"{self.name} ended with code {self.process.wait()}")

    def close(self) -> None:
        self.process.communicate(timeout=60)  # the end of its input is the end of the side


def _environment(root: str) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=["slipway:stored", "slipway:int8", "slipway:int4"])
    parser.add_argument("--jobs", nargs="+", type=job, default=[Job(1, 64), Job(8, 64), Job(8, 1024), Job(0, 512)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of the random checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="its folder; made if it is not there")
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--busy", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/cpu-….json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.checkpoint, options.threads, options.jobs[0])

    from benchmarks.machine import facts
    from benchmarks.shapes import make

    options.checkpoint = make(options.shape, options.checkpoint or Path("/tmp/slipway-shapes") / options.shape)
    most = Job(max(one.batch for one in options.jobs), max(one.context for one in options.jobs))
    sides = [
        Side(name, options.llama_python if name.startswith("llama.cpp") else sys.executable, options, most)
        for name in options.sides
    ]
    rates: dict[str, dict[str, list[float]]] = {one.name: {side.name: [] for side in sides} for one in options.jobs}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if options.busy else None
    try:
        for side in sides:
            side.measure(Job(min(1, most.batch), 16))  # first-call costs are nobody's speed
        for _ in range(options.rounds):
            for asked in options.jobs:
                for side in sides:
                    rates[asked.name][side.name].append(side.measure(asked))
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
        for side in sides:
            side.close()
    report(rates)
    suffix = "-busy" if options.busy else ""
    path = options.out or RESULTS / f"cpu-{options.shape}{suffix}.json"
    settings = {"shape": options.shape, "threads": options.threads, "rounds": options.rounds, "busy": options.busy}
    path.write_text(
        json.dumps({"settings": settings, "tokens_per_s": rates, "machine": asdict(facts())}, indent=1) + "\n"
    )
    print(f"written to {path}")


def report(rates: dict[str, dict[str, list[float]]]) -> None:
    for name, sides in rates.items():
        print(f"\n{name}, tokens a second")
        first = statistics.median(next(iter(sides.values())))
        for side, values in sides.items():
            middle = statistics.median(values)
            print(f"  {side:24s} {middle:8.1f}  [{min(values):.1f} – {max(values):.1f}]   {middle / first:.2f} x")


if __name__ == "__main__":
    main()
