"""The parts of the GPU suite (benchmarks/gpu.py): each in processes of its own, with a limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_goals import GOALS
from kernels.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
OPS_TESTS = ROOT / "tests" / "kernels" / "test_ops.py"
TEST_PROCESSES = 6  # test processes at a time: each holds some memory of the device
# Bytes of a device that a shape's jobs want: weights 57 GiB, keys and values of 256 rows of 690 tokens 16, graphs 4, a
# step of 8,192 tokens and what libraries take.
MEMORY = {"qwen3-30b-a3b": 84 << 30}
TAIL = 1500  # characters of a log that are copied to the results
# Limits in seconds, so that a part that hangs leaves time for the following parts.
LIMITS = {"limits": 60, "compile": 100, "first launch": 30, "compile models": 60, "captured steps": 100, "tests": 400}
LIMITS |= {"bench": 400, "engine": 130, "again": 60, "vllm": 280}
# Limits of a part that runs several processes.
PROCESSES = {"compile": ("compile", "first launch", "compile models")}


def limit_s(part: str) -> int:
    """Return the limit of a part by its name, such as "engine llama-3.1-8b"."""
    kind = part if part in LIMITS else part.split()[0]
    return sum(LIMITS[name] for name in PROCESSES.get(kind, (kind,)))


# Parts of each command, the most valuable command first. The limits of a command's parts add up to at most 8 minutes.
COMMANDS = {
    "first": ("limits", "compile", "captured steps", "engine llama-3.1-8b"),
    "kernels": ("limits", "tests"),
    "bench": ("limits", "bench"),
    "engines": ("limits", "engine qwen3-0.6b", "engine llama-3.1-8b-fp8", "again"),
    "experts": ("limits", "engine qwen3-30b-a3b", "engine bert-large"),
    "peer": ("limits", "engine llama-3.1-8b", "vllm llama-3.1-8b"),
}
COMMAND_S = 480


@dataclass(frozen=True)
class Plan:
    """Parts for one kind of device. `bench`: arguments of benchmarks.kernels; `engines`: jobs by shape."""

    device: str
    bench: tuple[str, ...]
    tests: tuple[str, ...]  # operations whose tests are run, all if empty
    report: tuple[str, ...]
    engines: dict[str, tuple[str, ...]]
    again: str | None

    def mixes(self, shape: str) -> list[str]:
        """Offline mixes of a shape."""
        return [job for job in self.engines[shape] if job.startswith(("chat:", "uniform:"))]

    def compared(self, shape: str) -> list[str]:
        """Jobs that another engine can do too."""
        return [job for job in self.engines[shape] if job.startswith(("chat:", "uniform:", "decode:", "prefill:"))]


def cuda_plan(quick: bool) -> Plan:
    chat, uniform = ("chat:200", "uniform:64") if quick else ("chat:1000", "uniform:256")
    decodes = tuple(f"decode:{rows}:512" for rows in (1, 32, 256))
    prefills = ("prefill:2048", "prefill:16384")
    profiles = tuple(f"profile:{rows}:512" for rows in ((256,) if quick else (1, 32, 256)))
    jobs = (*decodes, *prefills, chat, uniform, *profiles)
    return Plan(
        device="cuda",
        bench=("--rounds", "10") if quick else (),
        tests=(),
        report=("--small", "--dtype", "bfloat16", "float16", "float32"),
        engines={
            "llama-3.1-8b": tuple(one for one in jobs if not one.startswith("uniform")),
            "qwen3-0.6b": jobs,
            "llama-3.1-8b-fp8": (*decodes, "prefill:2048"),
            "qwen3-30b-a3b": (*decodes, "prefill:2048"),
            "bert-large": ("embed:256:512", "texts:200" if quick else "texts:2000"),
        },
        again=None if quick else "llama-3.1-8b",
    )


CPU_PLAN = Plan(
    device="cpu",
    bench=("rms_norm", "--case", "odd", "--device", "cpu", "--dtype", "float32", "--rounds", "2"),
    tests=("rms_norm",),
    report=("--op", "rms_norm"),
    engines={
        "small": ("decode:1:16", "decode:4:16", "prefill:100", "chat:4"),
        "bert-small": ("embed:4:32", "texts:5"),
    },
    again="small",
)


@dataclass
class Suite:
    """Run parts in processes. `environment` extends the environment of this process for them."""

    out: Path
    plan: Plan
    end: float  # by time.monotonic
    environment: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=lambda: {"parts": {}})

    def save(self) -> None:
        self.results["table"] = [goal.line(self.results) for goal in GOALS]
        part = self.out / "results.json.part"
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        part.rename(self.out / "results.json")

    def merge(self) -> None:
        """Take over the results of earlier commands in the same folder."""
        earlier = self.read("results.json")
        if earlier:
            self.results = earlier | {"parts": dict(earlier.get("parts", {}))}

    def run(self, name: str, command: Sequence[str], limit_s: float, **environment: str) -> int | None:
        """Run a command and return its exit code, or None if the time limit was reached or it was stopped."""
        limit_s = min(limit_s, self.end - time.monotonic())
        if limit_s < 1:
            self.results["parts"][name] = {"code": None, "error": "the time limit was reached"}
            return None
        start = time.monotonic()
        log = self.out / "logs" / f"{name.replace('/', '-')}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | self.environment | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process)
        found: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - start, 1)}
        if code is None:
            found["error"] = f"stopped after {limit_s:.0f} s"
        if code != 0:
            found["tail"] = log.read_text(errors="replace")[-TAIL:]
        self.results["parts"][name] = found
        return code

    def read(self, file: str) -> dict[str, Any]:
        """Return the results that a part has written so far."""
        try:
            value = json.loads((self.out / file).read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def failed(self) -> list[str]:
        return [name for name, part in self.results["parts"].items() if part["code"] != 0]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def limits(self) -> None:
        """Measure bandwidth and arithmetic of the device. Later results are given as shares of these."""
        command = [
            "-m",
            "benchmarks.kernels",
            "--limits",
            "--device",
            self.plan.device,
            "--json",
            str(self.out / "limits.json"),
        ]
        self.run("limits", command, 60, **self._interpreter())
        self.results["limits"] = self.read("limits.json").get("facts", {})

    def compile(self) -> None:
        """Fills a cache of kernels on all processors, as a container's build does, and tries it with a first launch.
        Where it is of no use the parts compile for themselves."""
        cache = Path(tempfile.mkdtemp(prefix="slipway-kernels-"))
        target = self.results["limits"].get("architecture", "sm_90")
        common = ["--target", target, "--cache", str(cache)]
        if device := self.results["limits"].get("device"):
            common += ["--device", device]
        command = ["-m", "kernels.report", *common, "--json", str(self.out / "report.json")]
        self.run("compile", [*command, *self.plan.report], LIMITS["compile"])
        self.results["report"] = self.read("report.json")
        if self.plan.device == "cuda" and self.results["report"]:
            self.environment = {"TRITON_CACHE_DIR": str(cache), "TRITON_LIBCUDA_PATH": str(cache / "libcuda")}
            command = ["-m", "benchmarks.kernels", "rms_norm", "--rounds", "2"]
            if self.run("first launch", command, LIMITS["first launch"]) != 0:
                self.environment = {}
            self.run("compile models", self.models(cache / "shapes", common), LIMITS["compile models"])

    def models(self, folder: Path, common: Sequence[str]) -> list[str]:
        """The command that compiles what engines of these shapes launch."""
        from benchmarks.shapes import declare

        folders = [str(declare(shape, folder / shape)) for shape in self.plan.engines]
        return ["-m", "engine.worker.precompile", *folders, *common]

    def captured_steps(self) -> None:
        """Tests of captured steps and of the worker: whether a replay equals its launches and nothing waits."""
        files = [str(ROOT / "tests" / "engine" / "worker" / name) for name in ("test_graphs.py", "test_gpu.py")]
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu", *files]
        self.run("captured steps", command, LIMITS["captured steps"])

    def tests(self) -> None:
        """Tests marked gpu, each operation's in a process of its own, as an illegal access spoils all that come after
        it in a process."""
        groups, end = list(groups_of(self.plan)), time.monotonic() + LIMITS["tests"]
        with ThreadPoolExecutor(TEST_PROCESSES if self.plan.device == "cuda" else 1) as threads:
            list(threads.map(lambda group: self._tests(*group, end), groups))
        found = {name: read_tests(self.out / f"tests-{name}.xml") for name, _ in groups}
        total = {key: sum(one.get(key, 0) for one in found.values()) for key in ("passed", "failed", "skipped")}
        self.results["tests"] = {"total": total, "groups": found}

    def _tests(self, name: str, arguments: Sequence[str], end: float) -> None:
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--timeout", "120", *arguments]
        command.append(f"--junitxml={self.out / f'tests-{name}.xml'}")
        code = self.run(f"tests {name}", command, end - time.monotonic(), **self._interpreter())
        if code == 5:  # nothing is marked there on this device
            self.results["parts"][f"tests {name}"] = {"code": 0}

    def bench(self) -> None:
        command = ["-m", "benchmarks.kernels", *self.plan.bench, "--json", str(self.out / "bench.json")]
        self.run("bench", command, LIMITS["bench"], **self._interpreter())
        self.results["bench"] = self.read("bench.json")

    def engine(self, shape: str) -> None:
        missing = missing_requirement(shape, self.results.get("limits", {}).get("memory_bytes"))
        if missing:
            print(f"engine {shape}: skipped: {missing}", flush=True)
            self.results["parts"][f"engine {shape}"] = {"code": 0, "left_out": missing}
            return
        self.results.setdefault("engines", {})[shape] = self._engine(shape, shape, LIMITS["engine"])

    def again(self) -> None:
        """A start with every kernel in the cache, to its first token."""
        if self.plan.again is not None:
            name = f"{self.plan.again} again"
            self.results["again"] = self._engine(name, self.plan.again, LIMITS["again"], "--start-only")

    def _engine(self, name: str, shape: str, limit_s: float, *more: str) -> dict[str, Any]:
        file = f"engine-{name.replace(' ', '-')}.json"
        limits = self.results.get("limits", {})
        command = ["-m", "benchmarks.gpu_engine", shape, "--device", self.plan.device, "--out", str(self.out / file)]
        command += [f"--{key}={limits[key]}" for key in ("copy", "matmul") if limits.get(key)]
        command += ["--jobs", *self.plan.engines[shape], *more]
        self.run(f"engine {name}", [*command, "--began", str(time.time())], limit_s)
        return self.read(file)

    def peer(self, shape: str) -> None:
        """After our own run, with the whole memory of the device."""
        jobs = self.plan.compared(shape)
        file = f"vllm-{shape}.json"
        command = ["-m", "benchmarks.gpu_peer", shape, "--out", str(self.out / file), "--jobs", *jobs]
        self.run(f"vllm {shape}", command, LIMITS["vllm"])
        self.results.setdefault("vllm", {})[shape] = self.read(file)

    def _interpreter(self) -> dict[str, str]:
        return {} if self.plan.device == "cuda" else {"TRITON_INTERPRET": "1"}


def missing_requirement(shape: str, memory_bytes: int | None) -> str:
    """Why the device has no room for the shape's jobs; empty where it has."""
    wanted = MEMORY.get(shape, 0)
    if memory_bytes is None or wanted <= memory_bytes:
        return ""
    return f"its jobs need {wanted >> 30} GiB of memory, but the device has {memory_bytes >> 30}"


def _kill(process: subprocess.Popen[Any]) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def groups_of(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Name and pytest's arguments: one for each operation, then one for each other file with tests for a GPU. Files are
    named one by one, so that none is collected whose imports are not here."""
    marked = ["-m", "gpu"] if plan.device == "cuda" else []
    for op in OPS:
        if not plan.tests or op.name in plan.tests:
            yield op.name, [str(OPS_TESTS), *marked, "-k", f"[{op.name}-"]
    if plan.device == "cuda":
        for path in sorted((ROOT / "tests").rglob("test_*.py")):
            if path != OPS_TESTS and "mark.gpu" in path.read_text():
                yield path.stem, [str(path), *marked]


def read_tests(file: Path) -> dict[str, Any]:
    """Counts and the failures' first lines."""
    if not file.exists():
        return {"error": "exited without a report"}
    (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failures = [
        {"test": case.get("name"), "message": (bad.get("message") or "").split("\n")[0][:300]}
        for case in suite.iter("testcase")
        for bad in (*case.iter("failure"), *case.iter("error"))
    ]
    return {
        "passed": total - skipped - len(failures),
        "failed": len(failures),
        "skipped": skipped,
        "seconds": float(suite.get("time", 0)),
        "failures": failures,
    }
