"""Run the script of README.md and the examples of docs/library.md, one after another in one process."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_of_the_readme_and_the_examples_of_the_library_page_run() -> None:
    first, *blocks = (block for page in ("README.md", "docs/library.md") for block in python_blocks(page))
    assert len(blocks) == 7
    script = f"{first}\n" + "\n".join(f"print('== {at}')\n{block}" for at, block in enumerate(blocks))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    readme, hello, chat, pooled, beams, streams, measured, errors = re.split(r"== \d\n", done.stdout)
    assert readme.strip()
    assert hello.count(" length 8") + hello.count(" stop ") == 2
    assert "42" in chat
    assert pooled.split() == ["384", "True"]
    logprobs = [float(line.split()[0]) for line in beams.splitlines() if re.match(r"-\d", line)]
    assert len(logprobs) == 3 and logprobs == sorted(logprobs, reverse=True)
    assert len(streams.splitlines()) >= 8
    assert measured.split("\n")[0] == "['.json', '.json']" and float(measured.split("\n")[1]) == 4
    for name in ("max_running=0", "max_contxt", "top_p"):
        assert name in errors


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
