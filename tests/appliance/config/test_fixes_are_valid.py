"""Fixes that `slipway check --fix` makes without asking are valid: the same key has no problem afterwards."""

from pathlib import Path

import pytest

from appliance.cli.fix import fix
from appliance.cli.main import main
from appliance.config.findings import findings
from appliance.config.keys import Key, leaves
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Given, load

DEMO = Path(__file__).resolve().parents[3] / "manifests/demo"
TRAPS = ("12:30", "1:02:03", "010", "1e3", "no", "on", "0x10", "2026-01-01", "1_000", ".inf", "12", "1.5", "true", "a")
KEYS = [key for key in leaves() if "*" not in key.path and key.path[0] not in ("apiVersion",)]


def manifest(key: Key, text: str) -> str:
    inner = text
    for part in reversed(key.path[1:]):
        inner = f"{{{part}: {inner}}}"
    head = "" if key.path[0] == "model" else "model: {source: {path: /m}}\n"
    return f"apiVersion: slipway/v2\n{head}{key.path[0]}: {inner}\n"


def problems(file: Path) -> list[Problem]:
    try:
        load(Given(file))
    except Refused as refused:
        return [one for one in refused.problems if one.code in ("ambiguous", "wrong-value")]
    return []


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
@pytest.mark.sampled(3)
def test_a_fix_of_a_value_leaves_no_problem_with_it(key: Key, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    for trap in TRAPS:
        file.write_text(manifest(key, trap))
        found = [one for one in findings(problems(file)) if one.fixable and one.problem.key.startswith(key.name)]
        if not found:
            continue
        fix(found)
        left = [one for one in problems(file) if one.key.startswith(key.name)]
        assert not left, f"{trap} became {file.read_text()}"


def test_a_time_of_day_is_not_a_size_but_may_be_a_duration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.yaml"
    text = f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}}}\nlimits: {{max_body: 12:30}}\n"
    file.write_text(f"{text}lifecycle: {{drain: 12:30}}\n")
    assert main(["check", "--fix", str(file)]) == 2
    said = capsys.readouterr().err
    assert "limits.max_body" in said and "must be a size such as 8GiB" in said and '"12:30"' not in said
    assert "did you mean 750s?" in said, "12 minutes and 30 seconds"
    assert file.read_text() == f"{text}lifecycle: {{drain: 12:30}}\n", "neither is certain"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("enforce_eager: true\n", "enforce_eager: unknown key; leave it out"),
        ("engine: {enforce_eager: true}\n", "engine.enforce_eager: unknown key; leave it out"),
        ("num_ctx: 4096\n", "num_ctx: unknown key; the name here is model.max_context"),
        ("option.tensor_parallel_degree: 2\n", "the name here is parallelism.tensor"),
        ("option.max_rolling_batch_size: 2\n", "the name here is engine.scheduling.max_running"),
        ("tensor_parallel_degree: 2\n", "the name here is parallelism.tensor"),
    ],
)
def test_names_of_other_servers_are_known(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}}}\n{text}")
    assert main(["check", str(file)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("token", ["hf_abcdefghijklmnopqrst", "sk-abcdefghijklmnop", "glpat-abcdefghijklmnop"])
def test_a_secret_in_clear_text_is_a_warning_that_names_the_alternatives(
    token: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}, names: [demo, {token}]}}\n")
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr()
    assert f"{file}:2:" in said.err and "model.names[1]: looks like a secret in clear text" in said.err
    assert "{file: PATH}} or {env: VARIABLE}" in said.err and token not in said.err


def test_a_password_in_an_address_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.yaml"
    url = "http://user:hunter2@127.0.0.1:1/model.tar"
    file.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{http: {{url: '{url}'}}}}}}\n")
    assert main(["check", str(file), f"--model.download.cache={tmp_path}", "--model.download.attempts=1"]) == 20
    said = capsys.readouterr()
    assert "127.0.0.1" in said.err and "hunter2" not in said.err + said.out


def test_a_secret_in_the_place_of_its_name_gets_the_form_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}}}\nendpoints: {{api_keys: sk-abcdefgh}}\n"
    )
    assert main(["check", str(file)]) == 2
    said = capsys.readouterr().err
    assert "secrets: {NAME: {file: PATH}} or {env: VARIABLE}" in said and "sk-abcdefgh" not in said


def test_a_misspelt_key_and_a_wrong_folder_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.yaml"
    (tmp_path / "models").mkdir()
    file.write_text("apiVersion: slipway/v2\nmodel: {source: {path: model}, max_contxt: 12}\n")
    assert main(["check", str(file)]) == 2
    said = capsys.readouterr().err
    assert "model.source.path" in said and "no such directory" in said and "did you mean models?" in said
    assert "model.max_contxt: unknown key" in said and "m.yaml: 2 problems" in said


def test_an_existing_folder_is_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}, max_contxt: 12}}\n")
    assert main(["check", str(file)]) == 2
    assert "m.yaml: 1 problem" in capsys.readouterr().err
