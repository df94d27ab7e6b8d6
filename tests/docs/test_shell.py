"""Each command in the shell blocks of the pages for beginners runs, against the demo model and a running service.

Models that are not there are replaced by the demo; loads are made small.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli.main import main
from tests.e2e.conftest import Appliance

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/start.md", "docs/choose.md", "docs/tune.md", "docs/bench.md", "docs/bundle.md")
DEMO = "manifests/demo"
REPLACED = {
    "manifests/smollm2.yaml": "manifests/demo.yaml",
    "/models/Qwen3-0.6B": DEMO,
    '"smollm2"': '"demo"',
    ".venv/bin/slipway": "slipway",
}
SMALL = {
    "bench": ["-n", "2", "--output-tokens", "4", "--limit-tokens", "8", "--min-attainment", "0", "--rounds", "1"],
    "tune": ["--runs", "0", "-n", "2", "--candidates", "3"],
    "init": ["--force"],
}
MAKE = ("serve", "test", "docs")
OTHERS = ("docker", "python", "cd", "sha256sum", "unshare")
"""Programs whose commands other tests run: images, benchmarks, bundles in a namespace."""


def blocks(page: str) -> Iterator[str]:
    """Commands of the shell blocks of a page, without comments."""
    for block in re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip():
                yield line


def yaml_block(page: str) -> str:
    """The longest manifest of a page, with the demo in place of its model."""
    found = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    text = max(found, key=len, default=f"apiVersion: slipway/v2\nmodel: {{source: {{path: {ROOT / DEMO}}}}}\n")
    text = re.sub(r"    pypi:\n(      .*\n)+", f"    path: {ROOT / DEMO}\n", text)
    return text.replace("max_context: 4096", "max_context: 1024")


def test_the_pages_have_commands() -> None:
    assert sum(len(list(blocks(page))) for page in PAGES) > 30


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page, demo, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    (tmp_path / "my.yaml").write_text(yaml_block(page))
    monkeypatch.chdir(tmp_path)
    for line in blocks(page):
        run(line, demo, capsys)


def run(line: str, service: Appliance, capsys: pytest.CaptureFixture[str]) -> None:
    for given, used in REPLACED.items():
        line = line.replace(given, used)
    line = re.sub(r"http://127\.0\.0\.1:[89]000", service.url, line)
    program, *words = shlex.split(line, comments=True)
    if program == "curl":
        done = subprocess.run([program, "-fsS", *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and done.stdout.strip(), f"{line}\n{done.stderr}"
    elif program == "slipway":
        command, *rest = words
        if "--bundle" in rest:
            return  # tests/e2e/test_bundle.py
        if command == "serve":  # starts in place of the service that runs
            command = "check"
        code = main([command, *rest, *SMALL.get(command, [])])
        # diff says with 1 that something differs.
        assert code == 0 or (command == "diff" and code == 1), f"{line}\n{capsys.readouterr().err}"
    elif program == "make":
        assert words[0] in MAKE, line
    else:
        assert program in OTHERS, f"{line}: no test runs it"
