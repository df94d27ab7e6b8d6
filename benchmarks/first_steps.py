"""`python -m benchmarks.first_steps [--paths convert crash] [--manifest M]`: time of the first steps of an operator.

    clone    `git clone`, then `make serve MANIFEST=M` until the first token. Each phase that make prints is a row, so
             that the time of pip is separate
    convert  `slipway init --from` with a command line of vLLM for the model of M, `slipway check`, and `slipway serve`
             until the first token
    crash    the engine of a service is killed: until the log has the cause, until `slipway explain` has printed its
             cure, and until the open stream continues

Every row has the number of commands that the operator types for it. The JSON file has the machine, too.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx

from appliance.supervisor.programs import programs
from benchmarks.machine import facts
from benchmarks.service import DEMO, ROOT

TIMEOUT_S = 3600.0
SLIPWAY = [sys.executable, "-m", "appliance"]
PHASES = {
    "setting up ": "make: create the environment",
    "installing ": "pip: download and install the pinned packages",
    "building ": "make: compile the CPU kernels",
}
"""Rows by the first words of the line with which make begins a phase."""
LAUNCH = "slipway serve, until ready"


@dataclass(frozen=True)
class Step:
    """One row. `commands`: how many the operator types."""

    path: str
    name: str
    commands: int
    seconds: float


class Output:
    """Lines of a process with the times at which they came."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, list[tuple[float, str]]()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, fits: Callable[[str], bool]) -> tuple[float, str]:
        """Return the first line that fits, with its time. Raise RuntimeError if the process ends before it."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            ended = self.process.poll() is not None
            if found := [each for each in list(self.lines) if fits(each[1])]:
                return found[0]
            if ended:
                break
            time.sleep(0.02)
        raise RuntimeError("the line did not come:\n" + "\n".join(line for _, line in self.lines[-20:]))


@contextlib.contextmanager
def started(command: list[str], cwd: Path) -> Iterator[Output]:
    """Run a program, and send it SIGTERM at the end. A copy of the repository must not import from this one."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if cwd == ROOT:
        environ["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output = Output(process)
        try:
            yield output
        finally:
            process.terminate()
            output.reader.join(TIMEOUT_S)


def is_ready(line: str) -> bool:
    return line.startswith("ready ") and "http" in line


def address(line: str) -> str:
    return next(word for word in line.split() if word.startswith("http"))


def first_token(url: str) -> float:
    """Return the time at which the first token of a stream arrived."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as reply:
        next(line for line in reply.iter_lines() if line.startswith("data: {"))
        return time.monotonic()


def clone(manifest: Path, folder: Path) -> list[Step]:
    """Clone the repository into a folder, set it up, and serve."""
    began_s = time.monotonic()
    copy = folder / "slipway"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    cloned_s = time.monotonic()
    steps = [Step("clone", "git clone", 1, cloned_s - began_s)]
    command = ["make", "serve", f"MANIFEST={manifest.relative_to(ROOT)}", "PORT=0"]
    with started(command, copy) as output:
        ready_s, line = output.wait(is_ready)
        first, *others = phases(output.lines, cloned_s)
        steps += [replace(first, commands=1), *others]
        steps.append(Step("clone", "first token", 1, first_token(address(line)) - ready_s))
    return [*steps, together("clone", steps)]


def phases(lines: list[tuple[float, str]], began_s: float) -> list[Step]:
    """Return a row for each phase of make, and one from the first line of `slipway serve` until it is ready."""
    marks: list[tuple[float, str]] = []
    for at, line in lines:
        if name := next((name for words, name in PHASES.items() if line.startswith(words)), ""):
            marks.append((at, name))
        elif not marks or (marks[-1][1] != LAUNCH and not line.startswith("WARNING")):
            marks.append((at, LAUNCH))
    ready_s = next(at for at, line in lines if is_ready(line))
    times = [began_s, *(at for at, _ in marks[1:]), ready_s]
    return [Step("clone", name, 0, after - at) for (_, name), at, after in zip(marks, times, times[1:], strict=False)]


def together(path: str, steps: list[Step]) -> Step:
    return Step(path, "together", sum(one.commands for one in steps), sum(one.seconds for one in steps))


def convert(manifest: Path, folder: Path) -> list[Step]:
    """Convert a command line of vLLM for a local model, and serve the manifest."""
    model = local_model(manifest)
    line = f"vllm serve {shlex.quote(str(model))} --max-model-len 1024 --served-model-name assistant --max-num-seqs 8"
    path, times = folder / "converted.yaml", [time.monotonic()]
    for words in (["init", "--from", line, "-o", str(path)], ["check", str(path)]):
        subprocess.run([*SLIPWAY, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        times.append(time.monotonic())
    with started([*SLIPWAY, "serve", str(path), "--port", "0"], ROOT) as output:
        ready_s, printed = output.wait(is_ready)
        times += [ready_s, first_token(address(printed))]
    names = {"slipway init --from": 1, "slipway check": 1, "slipway serve, until ready": 1, "first token": 1}
    steps = [
        Step("convert", name, count, after - before)
        for (name, count), before, after in zip(names.items(), times, times[1:], strict=False)
    ]
    return [*steps, together("convert", steps)]


def local_model(manifest: Path) -> Path:
    """Return the path of the checkpoint of a manifest, which a download may have made."""
    done = subprocess.run(
        [*SLIPWAY, "plan", str(manifest), "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return Path(json.loads(done.stdout)["engines"][0]["model"]["path"])


def crash(manifest: Path, folder: Path) -> list[Step]:
    """Kill the engine of a service with an open stream, and read why it ended."""
    with started([*SLIPWAY, "serve", str(manifest), "--port", "0"], ROOT) as output:
        _, line = output.wait(is_ready)
        tokens: list[float] = []
        reader = threading.Thread(target=read_stream, args=(address(line), tokens), daemon=True)
        reader.start()
        while len(tokens) < 3:
            if not reader.is_alive():
                raise RuntimeError("the stream ended before its third token")
            time.sleep(0.01)
        killed_s = time.monotonic()
        os.kill(programs(output.process.pid)["engine-0"][0], signal.SIGKILL)
        logged_s, cause = output.wait(lambda line: "slipway explain" in line)
        words = cause.rpartition("slipway ")[2].split()
        subprocess.run([*SLIPWAY, *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        explained_s = time.monotonic()
        reader.join(TIMEOUT_S)
    resumed_s = next(at for at in tokens if at > logged_s)
    return [
        Step("crash", "the log has the cause and the crash bundle", 0, logged_s - killed_s),
        Step("crash", f"slipway {' '.join(words)} has printed the cure", 1, explained_s - logged_s),
        Step("crash", "the open stream continues (since the crash)", 0, resumed_s - killed_s),
    ]


def read_stream(url: str, tokens: list[float]) -> None:
    """Read a stream to its end. Append the time of each token."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "Hello", "max_tokens": 600, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                tokens.append(time.monotonic())


PATHS: dict[str, Callable[[Path, Path], list[Step]]] = {"clone": clone, "convert": convert, "crash": crash}


def main(arguments: list[str] | None = None) -> int:
    title = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps", description=title)
    parser.add_argument(
        "--paths", nargs="+", choices=PATHS, default=["convert", "crash"], help="default: convert crash"
    )
    parser.add_argument("--manifest", type=Path, default=DEMO, help="manifest of the repository (the demo)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    steps: list[Step] = []
    for path in given.paths:
        with tempfile.TemporaryDirectory(prefix="slipway-first-") as folder:
            steps += PATHS[path](given.manifest.resolve(), Path(folder))
    print(f"{'path':<9}{'commands':>8}{'seconds':>10}  step")
    for one in steps:
        print(f"{one.path:<9}{one.commands:>8}{one.seconds:>10.2f}  {one.name}")
    if given.out:
        report = {"machine": asdict(facts()), "manifest": str(given.manifest), "steps": [asdict(one) for one in steps]}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
