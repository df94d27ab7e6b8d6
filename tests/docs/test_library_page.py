"""Run the examples of docs/library.md, one after another in one process."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_examples_of_the_library_page_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL)
    assert len(blocks) == 7
    script = "\n".join(f"print('== {at}')\n{block}" for at, block in enumerate(blocks))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, hello, chat, pooled, beams, streams, measured, errors = re.split(r"== \d\n", done.stdout)
    assert hello.count(" length 8") + hello.count(" stop ") == 2
    assert "42" in chat
    assert pooled.split() == ["384", "True"]
    logprobs = [float(line.split()[0]) for line in beams.splitlines() if re.match(r"-\d", line)]
    assert len(logprobs) == 3 and logprobs == sorted(logprobs, reverse=True)
    assert len(streams.splitlines()) >= 8
    assert measured.split("\n")[0] == "['.json', '.json']" and float(measured.split("\n")[1]) == 4
    for name in ("max_running=0", "max_contxt", "top_p"):
        assert name in errors
