"""`python -m benchmarks.load [--shape qwen3-0.6b]`: time to load a checkpoint that is not in the page cache.

Each case is a checkpoint and the format of its weights in memory. A round removes the files from the page cache and
reads their bytes, then removes them again and starts an engine in this process, without the imports. It prints medians:
both times and their ratio, the CPU time of the start, and the memory that it touched for the first time (page faults).
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import facts
from benchmarks.shapes import SHAPES, make
from engine.convert import Job, convert
from engine.llm import LLM

PART = 4 << 20
# Case → format of the files, and format to which they are quantized while they are loaded.
CASES = {
    "stored": ("stored", "stored"),
    "int8": ("stored", "int8"),
    "int4": ("stored", "int4"),
    "converted-int8": ("int8", "stored"),
    "converted-int4": ("int4", "stored"),
}


@dataclass(frozen=True)
class Load:
    """Times of one case in seconds, by round."""

    case: str
    bytes: int
    read_s: list[float]
    ready_s: list[float]
    cpu_s: list[float]  # user and system time of all threads
    touched_bytes: list[int]  # page faults without reads from the disk

    @property
    def ratio(self) -> float:
        return statistics.median(self.ready_s) / statistics.median(self.read_s)


def evict(files: list[Path]) -> None:
    """Remove the pages of files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> float:
    """Return the time to read all bytes, in order."""
    buffer, began_s = bytearray(PART), time.monotonic()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.monotonic() - began_s


def start(folder: Path, weights: str) -> float:
    """Return the time until an engine is ready."""
    began_s = time.monotonic()
    with LLM(folder, weights=weights, max_context=256, max_running=1):
        return time.monotonic() - began_s


def measure(case: str, folder: Path, weights: str, rounds: int) -> Load:
    files = sorted(folder.glob("*.safetensors"))
    found = Load(case, sum(file.stat().st_size for file in files), [], [], [], [])
    for _ in range(rounds):
        evict(files)
        found.read_s.append(read(files))
        evict(files)
        before = resource.getrusage(resource.RUSAGE_SELF)
        found.ready_s.append(start(folder, weights))
        after = resource.getrusage(resource.RUSAGE_SELF)
        found.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        found.touched_bytes.append((after.ru_minflt - before.ru_minflt) * resource.getpagesize())
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="model (qwen3-0.6b)")
    parser.add_argument("--case", choices=CASES, action="append", help="case to measure (all)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each case (3)")
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints, on the disk to measure (temporary)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    loads = []
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folders = {"stored": make(given.shape, Path(made) / "stored")}
        for case in given.case or CASES:
            form, weights = CASES[case]
            if form not in folders:
                folders[form] = Path(made) / form
                convert(Job(source=str(folders["stored"]), target=str(folders[form]), weights=form))
            loads.append(measure(case, folders[form], weights, given.rounds))
            one = loads[-1]
            print(
                f"{one.case:16}{one.bytes / 1e6:8,.0f} MB  read {statistics.median(one.read_s):6.2f} s  ready "
                f"{statistics.median(one.ready_s):6.2f} s  ratio {one.ratio:5.2f}  CPU "
                f"{statistics.median(one.cpu_s):6.2f} s  touched {statistics.median(one.touched_bytes) / 1e6:8,.0f} MB"
            )
    if given.out:
        report = {"machine": asdict(facts()), "shape": given.shape, "loads": [asdict(one) for one in loads]}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
