"""Run all GPU tests and measurements within minutes: tests, kernels, ceilings, complete engines.

    python -m benchmarks.gpu --out DIR                  about 8 minutes on an H200
    python -m benchmarks.gpu --out DIR --quick          fewer requests, no second start
    python -m benchmarks.gpu --out DIR --peer vllm      the same mixes by vLLM, if it is installed

Nothing is downloaded: weights are random and generated on the device. Each part runs in separate processes with a time
limit, so that a failure or a hang does not affect other parts. DIR receives results.json, which is complete after each
part, the files of the parts and their logs. The last output is a table of goals (benchmarks/gpu_goals.py) and measured
values. The exit code is 1 if a part failed. Without a GPU, Triton's interpreter runs the kernel tests.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_parts import CPU_PLAN, OPS_TESTS, ROOT, Suite, cuda_plan
from benchmarks.machine import facts
from kernels.report import table

REQUIRED = ("msgspec", "numpy", "safetensors", "triton", "pytest", "pytest_timeout")
# Optional packages: some tests and the gateway require one of them; the suite does not.
OPTIONAL = ("llguidance", "pydantic", "fastapi", "orjson", "openai", "jsonschema", "tokenizers", "transformers", "vllm")


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "none")
    if device == "none":
        print("benchmarks.gpu: no GPU found; running the kernel tests in the interpreter", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", str(OPS_TESTS)]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    out = options.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    plan = cuda_plan(options.quick) if device == "cuda" else CPU_PLAN
    suite = Suite(out, plan, time.monotonic() + options.minutes * 60)
    absent = missing(REQUIRED)
    print(f"missing, required: {', '.join(absent) or 'none'}; optional: {', '.join(missing(OPTIONAL)) or 'none'}")
    suite.results |= {"machine": asdict(facts()), "missing": absent, "quick": options.quick, "argv": sys.argv[1:]}
    for name, part in parts(suite, absent, options.peer):
        if options.only and not any(word in name for word in options.only):
            continue
        start = time.monotonic()
        part()
        suite.save()
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    suite.save()
    show(suite)
    return int(bool(suite.failed))


def parts(suite: Suite, absent: Sequence[str], peer: str | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Return names and functions of the parts whose packages are installed.

    The first engine runs before the kernel timings, because it is the most important result if time runs out.
    """
    engines = list(suite.plan.engines) if not {"msgspec", "safetensors"} & set(absent) else []
    yield "limits", suite.limits
    if "triton" not in absent:
        yield "compile", suite.compile
    if not {"triton", "pytest", "pytest_timeout"} & set(absent):
        yield "tests", suite.tests
    for shape in engines[:1]:
        yield f"engine {shape}", partial(suite.engine, shape)
    if "triton" not in absent:
        yield "bench", suite.bench
    for shape in engines[1:]:
        yield f"engine {shape}", partial(suite.engine, shape)
    if engines:
        yield "again", suite.again
    if peer == "vllm":
        for shape in filter(suite.plan.mixes, suite.plan.engines):
            yield f"vllm {shape}", partial(suite.peer, shape)


def show(suite: Suite) -> None:
    results = suite.results
    tests = results.get("tests", {}).get("total")
    if tests:
        print(f"\ntests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped")
    for name, group in results.get("tests", {}).get("groups", {}).items():
        for failure in group.get("failures", ())[:3]:
            print(f"  {name}: {failure['test']}: {failure['message'][:120]}")
    for shape, found in results.get("vllm", {}).items():
        for job, theirs in found.get("jobs", {}).items():
            ours = results.get("engines", {}).get(shape, {}).get("jobs", {}).get(job, {}).get("new_tokens_per_s")
            if ours:
                rate = theirs["new_tokens_per_s"]
                print(f"{shape} {job}: {ours:,.0f} new tokens/s, vLLM {rate:,.0f}: {ours / rate:.2f} times")
    print()
    print(table([("goal", "target", "measured", "share"), *results["table"]], left=1))
    for name in suite.failed:
        part = results["parts"][name]
        print(f"failed: {name}: {part.get('error') or 'code ' + str(part['code'])}, see logs")
    print(f"written to {suite.out / 'results.json'}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--quick", action="store_true", help="fewer requests and samples")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the suite in minutes (8)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts whose names contain this")
    parser.add_argument("--peer", choices=("vllm",), help="also run the mixes with this engine")
    parser.add_argument("--device", choices=("cuda", "cpu"), help=argparse.SUPPRESS)  # cpu: a small model, for tests
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
