"""Each command in the shell blocks of all pages runs, against the demo model and a running service.

Models that are not there are replaced by the demo; loads are made small. Commands for other models run in the tests of
these models (ELSEWHERE). Programs that a machine for tests does not have (OTHERS) are not run, but commands before
them must have written their files. The commands of make and pytest would run this test, so only their targets, options
and paths are checked.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.cli.main import COMMANDS, main, parser
from benchmarks.service import run_directory
from tests.documented import PAGES, ROOT, at, blocks, commands
from tests.e2e.conftest import Appliance

DEMO = "manifests/demo"
REPLACED = {
    "manifests/smollm2.yaml": "manifests/demo.yaml",
    "/models/Qwen3-0.6B": DEMO,
    "/models/Qwen3-8B": DEMO,
    '"smollm2"': '"demo"',
    ".venv/bin/slipway": "slipway",
    "--shots 5 --limit 200": "--shots 1 --limit 2 --max-tokens 4",
    "--minimum 0.45": "--minimum 0",
    "MODEL FOLDER --weights": f"{DEMO} converted --weights",
    "MODEL FOLDER --mix": f"{DEMO} mixed --mix",
    "MODEL": DEMO,
    "--budget 4GiB": "--budget 2MiB",
    "last-event-id: 12": "last-event-id: 1",
    "slipway check chat.yaml": f"slipway check chat.yaml --model.source.path {DEMO} --parallelism.tensor 1",
}
SMALL = {
    "bench": ["-n", "2", "--output-tokens", "4", "--limit-tokens", "8", "--min-attainment", "0", "--rounds", "1"],
    "tune": ["--runs", "0", "-n", "2", "--candidates", "3"],
    "init": ["--force"],
}
ELSEWHERE = {
    "docs/adapters.md": {
        "chat/completions": "tests/e2e/test_adapters.py",
        "load_lora_adapter": "tests/e2e/test_adapters.py",
    },
    "docs/bundle.md": {"--bundle": "tests/e2e/test_bundle.py"},
    "docs/images.md": {"image_url": "tests/e2e/test_images.py"},
    "docs/operations.md": {
        "start_profile": "tests/e2e/test_folder.py",
        "stop_profile": "tests/e2e/test_folder.py",
    },
    "docs/pooling.md": {
        "one text": "tests/e2e/test_pooling.py",
        "image_url": "tests/e2e/test_image_embeddings.py",
    },
    "docs/speech.md": {"transcriptions": "tests/e2e/test_speech.py"},
    "docs/eval.md": {"lm_eval": "tests/clients/test_lm_eval.py"},
}
"""Commands by words in them, with the test that runs them."""
OTHERS = {
    "docker": "images: docker/test_image.sh",
    "helm": "charts: tests/appliance/deployment/test_helm.py",
    "kubectl": "objects are validated by Kubernetes' schema: tests/appliance/deployment/test_render.py",
    "aws": "requests are validated by botocore's shapes: tests/appliance/deployment/test_platforms.py",
    "az": "files are validated by their schemas: tests/appliance/deployment/test_platforms.py",
    "systemctl": "needs a running systemd",
    "systemd-analyze": "runs in tests/docs/test_deployment_page.py where it is installed",
    "promtool": "runs in tests/docs/test_deployment_page.py where it is installed",
    "curl": "asks a service of Google or Grafana, if not Slipway",
}
"""Programs whose commands are not run, and why."""
TOOLS = {
    "kernels.report": ["--target", "sm_90", "--processes", "1"],
    "benchmarks.kernels": ["--case", "8x1024", "--rounds", "1", "--kernels", "base"],
    "tools": ["--out", "."],
}
"""Options that make Python programs of the project small, or write elsewhere, by the first words of their names."""
SERVERS = ("vllm", "llama-server", "sglang.launch_server", "text-generation-inference", "vllm-openai")
"""Command lines of other servers, which `slipway init --from` converts."""
PROGRAMS = {"slipway", "curl", "make", "pytest", "python", "vllm", "llama-server", "cd", "install", *OTHERS}


def yaml_block(page: str) -> str:
    """The longest manifest of a page for beginners, with the demo in place of its model."""
    found = [text for language, text in blocks(page) if language == "yaml" and "pypi:" in text]
    text = max(found, key=len, default=f"apiVersion: slipway/v2\nmodel: {{source: {{path: {ROOT / DEMO}}}}}\n")
    text = re.sub(r"    pypi:\n(      .*\n)+", f"    path: {ROOT / DEMO}\n", text)
    return text.replace("max_context: 4096", "max_context: 1024")


def test_the_pages_have_commands() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 70


def test_commands_are_in_shell_blocks() -> None:
    for page in PAGES:
        for language, text in blocks(page):
            if language in ("", "text") and not re.search("[└─]", text):  # drawings
                found = [line for line in text.splitlines() if line.split(" ")[0] in PROGRAMS]
                assert not found, f"{page}: {found[0]}: begin its block with ```sh, so that a test runs it"


def test_a_command_that_another_test_runs_is_named_there() -> None:
    for page, found in ELSEWHERE.items():
        for words, path in found.items():
            assert any(words in one for one in commands(page)), f"{page} has no command with {words}"
            assert f'("{page}", "{words}"' in (ROOT / path).read_text(), f"{path} does not run the command with {words}"


def test_programs_that_are_not_run_are_on_the_pages() -> None:
    programs = {shlex.split(one, comments=True)[0] for page in PAGES for one in commands(page)}
    assert OTHERS.keys() - programs == set()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))])
def test_every_command_of_a_page_runs(page, demo, tmp_path, monkeypatch, capsys, request) -> None:
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    for name in ("my.yaml", "m.yaml", "chat.yaml"):
        (tmp_path / name).write_text(yaml_block(page))
    write_inputs(page, tmp_path)
    if page == "docs/http.md":  # the reply that a command continues
        body = {"model": "demo", "prompt": "Once", "stream": True}
        headers = {"idempotency-key": "7b1c"}
        assert demo.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    monkeypatch.chdir(tmp_path)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    for line in commands(page):
        if not any(words in line for words in ELSEWHERE.get(page, ())):
            run(line, demo, capsys, request.config)


def write_inputs(page: str, folder: Path) -> None:
    """Write the files that the commands of a page read."""
    if page == "docs/eval.md":
        sums = [{"question": f"{one} + 1?", "answer": f"#### {one + 1}"} for one in range(3)]
        choices = [{"question": "1 + 1?", "choices": ["1", "2"], "answer": 1}] * 2
        for name, lines in (("gsm8k-test.jsonl", sums), ("mmlu.jsonl", choices)):
            (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if page == "docs/migration.md":
        names = {"dockerfile": "Modelfile", "properties": "start.properties", "text": "compose.yaml"}
        for language, text in blocks(page):
            if language in names:
                (folder / names[language]).write_text(text)
    if page == "docs/bundle.md":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        (folder / "image.tar").write_bytes(b"layers")
        (folder / "image.spdx.json").write_text("{}")
    if page == "docs/quantization.md":
        (folder / "text.txt").write_text("What is 17 + 25? It is 42. " * 20)


def run(line: str, service: Appliance, capsys: pytest.CaptureFixture[str], config: pytest.Config) -> None:
    given = line
    for old, new in REPLACED.items():
        line = line.replace(old, new)
    program, *words = shlex.split(at(line, service.url), comments=True)
    if program != "slipway" and any(one in line for one in SERVERS):
        assert main(["init", "--from", given, "-o", "converted.yaml", "--force"]) == 0, capsys.readouterr().err
    elif "=" in program or program == "curl" and any(service.url in word for word in words):
        execute([program, *words], given)
    elif program in ("cd", "install"):
        in_a_shell(line, service)
    elif program == "slipway":
        slipway(given, words, capsys, service)
    elif program == "make":
        made = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert made.returncode == 0 and made.stdout.strip(), f"{given}\n{made.stderr}"
        assert all(word.partition("=")[2] in made.stdout for word in words[1:]), given
    elif program.endswith("pytest"):
        options = [word for word in words if word.startswith("--")]
        assert all(config.getoption(one[2:].replace("-", "_"), None) != "absent" for one in options), given
        assert all((ROOT / word).exists() for word in words if "/" in word), given
    elif program.endswith("python"):
        module = words[1]
        small = next((options for name, options in TOOLS.items() if module.startswith(name)), None)
        assert words[0] == "-m" and small is not None, f"{given}: test_commands.py runs it"
        execute(["python", *(word.replace("NAME", "rms_norm") for word in words), *small], given)
    else:
        assert program in OTHERS, f"{given}: no test runs it"
        written = re.findall(r"\bout/[\w.-]+", given)
        assert all(Path(word).exists() for word in written), f"{given}: no command before it has written {written}"
        if program == "docker":
            docker(given, words)


def execute(command: list[str], given: str) -> None:
    """Run a program, after assignments to variables."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    while "=" in command[0]:
        name, _, value = command.pop(0).partition("=")
        environ[name] = value
    program, *words = command
    if program == "python":
        program, environ["PYTHONPATH"] = sys.executable, str(ROOT)
    elif program == "curl":
        words = ["-fsS", *words]
    done = subprocess.run([program, *words], env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.strip(), f"{given}\n{done.stderr}"


def in_a_shell(line: str, service: Appliance) -> None:
    """Run a command in the run directory of the service. `install` writes into ./etc."""
    line = line.replace("/tmp/slipway-…", str(run_directory(service.process.pid))).replace(" /etc/", " etc/")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", line], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def slipway(given: str, words: list[str], capsys: pytest.CaptureFixture[str], service: Appliance) -> None:
    command, *rest = words
    if command == "serve":  # starts in place of the service that runs
        command = "check"
    more = ["--url", service.url] if command == "usage" else SMALL.get(command, [])
    code = main([command, *rest, *more])
    # diff says with 1 that something differs.
    assert code == 0 or (command == "diff" and code == 1), f"{given}\n{capsys.readouterr().err}"


def docker(given: str, words: list[str]) -> None:
    """Parse the arguments that a container of the image is given."""
    if words[0] == "run" and "slipway" in words:
        end = words.index(">") if ">" in words else len(words)
        arguments = words[words.index("slipway") + 1 : end]
        command, *rest = arguments if arguments and arguments[0] in COMMANDS else ["serve", *arguments]
        parser(command).parse_args([command, *rest])
