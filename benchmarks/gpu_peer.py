"""vLLM on the same requests as benchmarks.gpu_engine, offline, on random weights of the same shape.

python -m benchmarks.gpu_peer llama-3.1-8b --jobs chat:1000 --out FILE
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, declare
from benchmarks.workload import MIXES, Request, same

MAX_ROWS, LONGEST = 512, 16392
SHORT, STEPS, PREFILLS = 4, 128, 5


def load(folder: Path) -> Any:
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.9,
        seed=0,
    )


def serve(llm: Any, requests: Sequence[Request]) -> float:
    """Seconds for all of them."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    wishes = [
        SamplingParams(temperature=one.temperature, max_tokens=one.tokens, ignore_eos=True, detokenize=False)
        for one in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, wishes, use_tqdm=False)
    seconds = time.perf_counter() - start
    if [len(one.outputs[0].token_ids) for one in outputs] != [request.tokens for request in requests]:
        raise RuntimeError("a reply does not have the requested length")
    return seconds


def mix(llm: Any, vocab: int, kind: str, count: int) -> dict[str, float]:
    requests = MIXES[kind](count, vocab)
    seconds, out = serve(llm, requests), sum(request.tokens for request in requests)
    return {"seconds": seconds, "new_tokens": out, "new_tokens_per_s": out / seconds}


def decode(llm: Any, vocab: int, kind: str, rows: int, context: int) -> dict[str, float]:
    """A step is the difference between long and short replies to the same prompts."""
    short, long = (serve(llm, same(rows, context, tokens, vocab)) for tokens in (SHORT, SHORT + STEPS))
    step = (long - short) / STEPS
    return {"rows": rows, "step_us": step * 1e6, "tokens_per_s": rows / step}


def prefill(llm: Any, vocab: int, kind: str, tokens: int) -> dict[str, float]:
    middle = statistics.median(serve(llm, same(1, tokens, 1, vocab)) for _ in range(PREFILLS))
    return {"tokens": tokens, "ms": middle * 1e3, "tokens_per_s": tokens / middle}


JOBS: dict[str, Callable[..., dict[str, float]]] = {
    **dict.fromkeys(MIXES, mix),
    "decode": decode,
    "prefill": prefill,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_peer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--jobs", nargs="+", required=True, help="as of benchmarks.gpu_engine")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args(arguments)
    import vllm

    vocab = SHAPES[options.shape]["vocab_size"]
    result: dict[str, Any] = {"shape": options.shape, "vllm": vllm.__version__, "jobs": {}}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        llm = load(declare(options.shape, Path(folder)))
        result["start_s"] = {"engine": time.perf_counter() - start}
        serve(llm, MIXES["chat"](16, vocab))  # excludes first-call costs
        for name in options.jobs:
            kind, *numbers = name.split(":")
            found = JOBS[kind](llm, vocab, kind, *map(int, numbers))
            result["jobs"][name] = found
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"vllm {options.shape} {name}: {json.dumps(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
