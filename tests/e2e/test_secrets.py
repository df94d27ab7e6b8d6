"""No secret leaves its place: a real service with one in a file and one in a variable is asked rightly and wrongly;
then everything that it wrote, printed, started or answered is searched for their values."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli.main import main
from tests.e2e.conftest import ROOT
from tests.tiers import thinned

IN_FILE, IN_VARIABLE, UNUSED, GUESSED = "canary-file-81f3", "canary-env-7c2a", "canary-unused-55d0", "canary-guess-90b1"
VALUES = (IN_FILE, IN_VARIABLE, UNUSED, GUESSED)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8}


@pytest.fixture(scope="module", params=thinned(["file", "variable"], kept=["variable"]))
def service(request, launch, tmp_path_factory):
    """Everything is logged that can be, and the scheduler is recorded."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "keys").write_text(f"{IN_FILE}\n")
    (folder / "run").mkdir(mode=0o700)
    manifest = folder / "m.yaml"
    manifest.write_text(
        "apiVersion: slipway/v2\n"
        f"model: {{source: {{path: {ROOT / 'manifests' / 'demo'}}}, names: [demo]}}\n"
        f"endpoints: {{api_keys: {'in_file' if request.param == 'file' else 'in_variable'}}}\n"
        "engine: {record: steps.jsonl}\n"
        "observability: {log_level: debug, log_requests: true, log_outputs: deltas}\n"
        "secrets: {in_file: {file: keys}, in_variable: {env: THE_KEYS}, unused: {env: OTHER_KEY}}\n"
    )
    variables = {"THE_KEYS": IN_VARIABLE, "OTHER_KEY": UNUSED, "XDG_RUNTIME_DIR": str(folder / "run")}
    appliance = launch(manifest, **variables)
    appliance.wait_ready()
    yield appliance, folder, IN_FILE if request.param == "file" else IN_VARIABLE, variables
    appliance.stop()


def searched(*texts: str) -> None:
    for text in texts:
        for value in VALUES:
            assert value not in text, text[max(0, text.index(value) - 300) : text.index(value) + 60]


def held(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name != "keys")


def test_no_value_of_a_secret_is_in_anything_the_service_writes_starts_or_answers(service):
    appliance, folder, key, _ = service
    answers = []
    for authorization in (f"Bearer {key}", f"Bearer {GUESSED}", f"Basic {GUESSED}", GUESSED, ""):
        for path, body in (("/v1/chat/completions", json.dumps(CHAT)), ("/v1/chat/completions", "{"), ("/v1/none", "")):
            answer = appliance.client.post(path, content=body, headers={"Authorization": authorization})
            answers.append(f"{answer.status_code} {answer.headers} {answer.text}")
    right = {"Authorization": f"Bearer {key}"}
    assert appliance.client.post("/v1/chat/completions", json=CHAT, headers=right).status_code == 200
    assert sum(answer.startswith("401") for answer in answers) >= 8
    for path in ("/metrics", "/ready", "/health", "/openapi.json", "/v1/models", "/version"):
        answer = appliance.client.get(path, headers=right)
        answers.append(f"{answer.headers} {answer.text}")
    searched(*answers, appliance.output())

    processes = appliance.processes()
    assert len(processes) >= 5  # slipway serve, supervisord, gateway, engine, monitor
    searched(*processes.values())
    gateway = appliance.pids()["gateway"]
    for pid, command in processes.items():
        environment = held(pid)
        allowed = {IN_VARIABLE, UNUSED} if pid in (gateway, appliance.process.pid) else set()
        assert {value for value in VALUES if value in environment} <= allowed, command

    (directory,) = (path for path in (folder / "run").iterdir() if path.is_dir())
    written = list(files(folder))
    names = {path.name for path in written}
    assert {"gateway.json", "engine-0.json", "supervisord.conf", "gateway.sh", "steps.jsonl"} <= names, names
    assert directory.stat().st_mode & 0o077 == 0
    for path in written:
        data = path.read_bytes()
        assert not [value for value in VALUES if value.encode() in data], path


@pytest.mark.parametrize("words", [("check",), ("check", "--format", "json"), ("plan",), ("plan", "--json")])
def test_no_command_prints_one(service, words, monkeypatch, capfd):
    _, folder, _, variables = service
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = main([*words, str(folder / "m.yaml")])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert printed.out
    searched(*printed)


@pytest.mark.parametrize(
    "line",
    [
        f"secrets: {{in_file: {UNUSED}}}",
        f"secrets:\n  in_file:{UNUSED}",
        f"secrets: {{in_file: {{file: {UNUSED}}}}}",
        f"secrets: {{in_file: {{env: {UNUSED}}}}}",
        f"secrets: {{in_file: {{value: {UNUSED}}}}}",
        f"secrets: {{in_file: '{UNUSED}",
        f"endpoints: {{api_keys: {UNUSED}}}",
        f"endpoints: {{api_keys: [{UNUSED}]}}",
        f"endpoints: {{api_key: {UNUSED}}}",
        f"api_key: {UNUSED}",
        f"limits: {{endpoints: {{api_keys: {UNUSED}}}}}",
        f"endpoints: {{host: [hf_{UNUSED.replace('-', '')}{UNUSED}]}}",
        f"served_model_name: hf_abcdefgh{UNUSED}",
        f"model: {{hf_token: {UNUSED}}}",
        f"my_password: {UNUSED}: x",
        f"hf_token: {UNUSED}\nlimits: {{max_stop: 0}}",
    ],
)
@pytest.mark.parametrize("form", thinned(["text", "json", "github", "sarif"], kept=["text", "sarif"]))
def test_a_literal_is_refused_without_being_repeated(tmp_path, line, form, capsys):
    path = tmp_path / "m.yaml"
    path.write_text(
        f"apiVersion: slipway/v2\n{'' if line.startswith('model') else 'model: {source: {path: x}}'}\n{line}\n"
    )
    assert main(["check", "--format", form, str(path)]) in (2, 10)
    searched(*capsys.readouterr())
    main(["check", "--fix", str(path)])
    searched(*capsys.readouterr())
