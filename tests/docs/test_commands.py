"""Every module of benchmarks/ and tools/ imports; each command of theirs, and each `python -m` on a page, has a help
text; the commands that take seconds run once at their smallest size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


SOURCES = [path for name in ("benchmarks", "tools") for path in sorted((ROOT / name).rglob("*.py"))]
RUNNABLE = {module_name(path) for path in SOURCES if 'if __name__ == "__main__":' in path.read_text()}
OTHERS = ("vllm", "sglang")  # servers whose command lines are converted
NAMED = {
    module
    for page in PAGES
    for module in re.findall(r"python -m\s+([a-z_]+(?:\.[a-z_]+)*)", page.read_text())
    if module not in sys.stdlib_module_names and module.split(".")[0] not in OTHERS
}


COMMANDS = sorted(RUNNABLE | NAMED)


def run(commands: list[list[str]], timeout: float = 400) -> tuple[str, list[tuple[int, str]]]:
    """Import all modules. Return the traceback of an error or warning, and exit code and output of each command."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_modules.py")],
        input=json.dumps({"imports": MODULES, "commands": commands}),
        env=without | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=True,
    )
    found = json.loads(done.stdout)
    return found["imports"], [(code, output) for code, output in found["commands"]]


MODULES = sorted(module_name(path) for path in SOURCES if path.stem not in ("__init__", "__main__"))


def test_every_module_of_benchmarks_and_tools_imports(results):
    assert len(MODULES) > 40, "the modules were not found"
    assert results["imports"] == (0, ""), results["imports"][1]


def test_every_command_on_the_pages_and_of_benchmarks_and_tools_has_a_help_text(results):
    assert len(RUNNABLE) > 25 and len(NAMED) > 15, "the commands were not found"
    for name in COMMANDS:
        code, output = results[f"{name} --help"]
        assert code == 0, f"{name} --help: exit code {code}\n{output}"
        assert output.startswith("usage: ") and "Traceback" not in output, f"{name} --help:\n{output}"


@pytest.mark.nightly(
    "tests/docs/test_commands.py::test_every_command_on_the_pages_and_of_benchmarks_and_tools_has_a_help_text"
)
def test_a_wrong_argument_of_a_command_is_one_readable_message():
    _, found = run([[name, "--no-such-option"] for name in COMMANDS])
    for name, (code, output) in zip(COMMANDS, found, strict=True):
        assert code == 2, f"{name} --no-such-option: exit code {code}\n{output}"
        assert "usage: " in output and "Traceback" not in output, f"{name} --no-such-option:\n{output}"


SMALLEST = {
    "bandwidth": "benchmarks.bandwidth --threads 1 --mebibytes 8",
    "steps": "benchmarks.steps --running 1 --steps 3 --out {out}/result.json",
    "masks": "benchmarks.masks --vocabularies 600 --rows 1 --walks 1",
    "golden": "benchmarks.golden 1",
    "quantization_error": "benchmarks.quantization_error --random --count 1 --bits int8 --out {out}/result.json",
    "shapes": "benchmarks.shapes small --config-only --out {out}",
    "streams": "benchmarks.streams --streams 1 --rate 20 --seconds 0.5 --rounds 1 --routes chat "
    "--out {out}/result.json",
    "versus": "benchmarks.versus --shape small --checkpoints {out} --concurrency 1 --requests 1 --rounds 1 --limit 8 "
    "--threads 1 --out {out}/result.json",
    "translation": "benchmarks.translation --shapes small --rows 1 --input 6 --reply 4 --rounds 1 --threads 1",
    "speculation": "benchmarks.speculation --shape small --checkpoints {out} --scenarios code --rows 1 --tokens 8 "
    "--rounds 1 --threads 1 --out {out}/result.json",
    "branches": "benchmarks.branches --texts 1 --tokens 8",
    "corpus": "tools.demo_corpus --count 1",
    **{
        name: f"tools.{name}_page --out {{out}}"
        for name in ("models", "formats", "compatibility", "metrics", "manifest", "fields", "structured", "alerts")
    },
}
"""Commands that no other test runs, by a short name.

journal, fault_injection, plan, soak and start take more than seconds because they start services repeatedly. encoders
needs a checkpoint, and lock needs a network.
"""


CLIENTS = {"client": "some", "version": "1.2", "features": {"chat": "works", "tools": ""}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder for the files of each command."""
    found = {name: tmp_path_factory.mktemp(name) for name in (*SMALLEST, "clients")}
    (found["clients"] / "table.json").write_text(json.dumps([CLIENTS]))
    return found


@pytest.fixture(scope="module")
def results(folders):
    """Exit code and output of each command, by its name or text. All run in forks of a process that has
    imported all modules."""
    commands = {name: text.format(out=folders[name]).split() for name, text in SMALLEST.items()}
    out = folders["clients"]
    commands["clients"] = ["tools.clients_page", str(out / "table.json"), "--out", str(out / "clients.md")]
    commands |= {f"{name} --help": [name, "--help"] for name in COMMANDS}
    error, found = run([*commands.values()])
    return {**dict(zip(commands, found, strict=True)), "imports": (int(bool(error)), error)}


@pytest.mark.parametrize("name", SMALLEST)
def test_a_command_runs_at_its_smallest_size(name, folders, results):
    folder, (code, output) = folders[name], results[name]
    assert code == 0, f"exit code {code}\n{output}"
    assert output.strip() and "Traceback" not in output
    if (result := folder / "result.json").exists() or "result.json" in SMALLEST[name]:
        assert json.loads(result.read_text())


def test_page_tools_write_the_pages_of_docs(folders, results):
    written = [path for name in SMALLEST for path in folders[name].iterdir() if (ROOT / "docs" / path.name).is_file()]
    assert len(written) == 9
    for path in written:
        assert path.read_text() == (ROOT / "docs" / path.name).read_text(), path.name


def test_the_page_of_clients_is_written_from_their_table(folders, results):
    code, output = results["clients"]
    assert code == 0, output
    assert "| client | chat | tools |" in (folders["clients"] / "clients.md").read_text()
