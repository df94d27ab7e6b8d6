"""Run GPU tests and measurements: tests, kernels, ceilings, complete engines. In commands of at most 8 minutes each,
the most valuable first:

    python -m benchmarks.gpu --out DIR --command first      limits, kernels of the models, captured steps, Llama
    python -m benchmarks.gpu --out DIR --command kernels    tests of all operations
    python -m benchmarks.gpu --out DIR --command bench      times of all operations
    python -m benchmarks.gpu --out DIR --command engines    Qwen3 0.6B, Llama in fp8, a second start
    python -m benchmarks.gpu --out DIR --command experts    Qwen3 30B-A3B, BERT-large
    python -m benchmarks.gpu --out DIR --command peer --peer vllm    Llama in turns with vLLM, if it is installed

Results of several commands in one DIR are merged. Without --command, all parts run until --minutes are over. --quick
has fewer requests and no second start.

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

from benchmarks.gpu_parts import COMMAND_S, COMMANDS, CPU_PLAN, OPS_TESTS, ROOT, Suite, cuda_plan
from benchmarks.machine import facts
from kernels.report import table

ALL_S = 2400
# Packages of each part, by the first word of its name. A part that lacks one is skipped.
TESTING = ("pytest", "pytest_timeout")
ENGINE = ("msgspec", "safetensors", "triton", "tokenizers")
NEEDS = {
    "limits": (),
    "compile": ("triton",),
    "captured": (*TESTING, *ENGINE, "transformers"),
    "tests": (*TESTING, "triton", "hypothesis"),
    "bench": ("triton",),
    "engine": ENGINE,
    "again": ENGINE,
    "vllm": ("vllm", "tokenizers"),
}
OPTIONAL = ("llguidance", "pydantic", "fastapi", "orjson", "openai", "jsonschema")


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
    suite = Suite(out, plan, time.monotonic() + (options.minutes * 60 or (COMMAND_S if options.command else ALL_S)))
    absent = missing(sorted({name for names in NEEDS.values() for name in names}))
    print(f"missing: {listed(absent)}; other tests need: {listed(missing(OPTIONAL))}")
    suite.merge()
    suite.results |= {"machine": asdict(facts()), "missing": absent, "quick": options.quick, "argv": sys.argv[1:]}
    for name, part in parts(suite, absent, options.peer):
        if options.only and not any(word in name for word in options.only):
            continue
        if options.command and name not in COMMANDS[options.command]:
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
    engines = list(suite.plan.engines)
    found: list[tuple[str, Callable[[], None]]] = [
        ("limits", suite.limits),
        ("compile", suite.compile),
        ("captured steps", suite.captured_steps),
        ("tests", suite.tests),
    ]
    found += [(f"engine {shape}", partial(suite.engine, shape)) for shape in engines[:1]]
    found.append(("bench", suite.bench))
    found += [(f"engine {shape}", partial(suite.engine, shape)) for shape in engines[1:]]
    found.append(("again", suite.again))
    if peer == "vllm":
        found += [(f"vllm {shape}", partial(suite.peer, shape)) for shape in filter(suite.plan.mixes, engines)]
    for name, part in found:
        lacking = [one for one in NEEDS[name.split()[0]] if one in absent]
        if lacking:
            print(f"{name}: skipped: install {listed(lacking)}", flush=True)
        elif name != "captured steps" or suite.plan.device == "cuda":
            yield name, part


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
    parser.add_argument("--minutes", type=float, default=0.0, help="time limit in minutes (8 with --command, else 40)")
    parser.add_argument("--command", choices=COMMANDS, help="parts that take at most 8 minutes together")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts whose names contain this")
    parser.add_argument("--peer", choices=("vllm",), help="also run the mixes with this engine")
    parser.add_argument("--device", choices=("cuda", "cpu"), help=argparse.SUPPRESS)  # cpu: a small model, for tests
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
