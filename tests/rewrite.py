"""Rewrite the assertions of all test files once, on every CPU, before several processes collect the same files.

pytest keeps rewritten files in `__pycache__`. In a fresh checkout each worker process would rewrite all files itself,
because all of them collect at the same time: 35 s of CPU time each.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, get_cache_dir, try_makedirs

TESTS = Path(__file__).parent
CONFIG: Any = SimpleNamespace(getini=lambda name: False)  # no option of pytest.ini changes the rewritten code


def ignore(message: str) -> None:
    """Trace nothing."""


def rewrite(path: Path) -> None:
    """Write the rewritten file to the cache, unless the cache has it."""
    folder = get_cache_dir(path)
    cached = folder / (path.name.removesuffix(".py") + PYC_TAIL)
    if try_makedirs(folder) and _read_pyc(path, cached, ignore) is None:
        source_hash, code = _rewrite_test(path, CONFIG)
        _write_pyc(SimpleNamespace(trace=ignore), code, source_hash, cached)  # type: ignore[arg-type]


def main(arguments: list[str]) -> int:
    """Rewrite the named files, or without a name all test files in one process per CPU."""
    if arguments:
        for name in arguments:
            rewrite(Path(name))
        return 0
    files = sorted(map(str, TESTS.rglob("test_*.py")), key=os.path.getsize)
    count = len(os.sched_getaffinity(0))
    running = [
        subprocess.Popen([sys.executable, __file__, *files[at::count]]) for at in range(count) if files[at::count]
    ]
    return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
