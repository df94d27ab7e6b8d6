"""Tests of the rewriting of test files before they are collected."""

import subprocess
import sys
from pathlib import Path

from _pytest.assertion.rewrite import PYC_TAIL

from tests import rewrite

TEXT = "def test_sum():\n    number = 2\n    assert number + 1 == 4\n"


def test_pytest_uses_the_rewritten_file(tmp_path: Path, monkeypatch) -> None:
    """The cached code belongs to the file, and has pytest's explanation of a failed assertion."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path = tmp_path / "test_some.py"
    path.write_text(TEXT)
    assert rewrite.main([str(path)]) == 0
    (cached,) = (tmp_path / "__pycache__").iterdir()
    assert cached.name == f"test_some{PYC_TAIL}"
    content = cached.read_bytes()
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "assert (2 + 1) == 4" in done.stdout, done.stdout + done.stderr
    assert cached.read_bytes() == content and cached.stat().st_size > 0

    # pytest runs the cached code: a file of the cache that contradicts its source would show.
    other = tmp_path / "test_other.py"
    other.write_text(TEXT.replace("== 4", "== 3"))
    source_hash, _ = rewrite._rewrite_test(path, rewrite.CONFIG)
    _, code = rewrite._rewrite_test(other, rewrite.CONFIG)
    rewrite._write_pyc(rewrite.SimpleNamespace(trace=rewrite.ignore), code, source_hash, cached)  # type: ignore[arg-type]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
