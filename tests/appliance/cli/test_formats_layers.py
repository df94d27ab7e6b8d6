"""Output of `check` in each format for manifests composed of several files, and the files that `--fix` edits."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif

from appliance.cli.formats import FORMATS, as_text
from appliance.cli.main import main
from appliance.config.findings import findings
from appliance.config.problems import Refused
from appliance.config.settings import Given, load
from appliance.hardware.machine import Machine
from appliance.planning.validate import validate
from tests.appliance.config.seeded_layers import SEEDED

ROOT = Path(__file__).resolve().parents[3]
CPU = Machine(8, "affinity", 2**36, "MemAvailable", no_gpu="no driver", kernels=("avx512", "avx2", "base"))
BASE = f"""\
model: {{source: {{path: {ROOT}/manifests/demo}}}}
hardware: {{device: cpu}}
observability: {{log_level: "${{var.level}}"}}
limits:
  max_stopp: 4
  max_body: ${{BODY}}
variables: {{level: debug}}
"""
TEXT = """\
apiVersion: slipway/v2
extends: [conf/base.yaml]
variables: {level: warn}
overlays:
  dev:
    endpoints: {prot: 1}
"""
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BODY", "8Mi")
    Path("conf").mkdir()
    Path("conf/base.yaml").write_text(BASE)
    Path("m.yaml").write_text(TEXT)


def test_text_names_the_way_to_a_file_and_where_a_value_was_written() -> None:
    with pytest.raises(Refused) as refused:
        load(Given(Path("m.yaml"), environ={"BODY": "8Mi"}))
    assert as_text(findings(refused.value.problems)) == (
        "m.yaml:6:17: endpoints.prot: unknown key; did you mean port?; in overlay dev\n"
        "   6 |     endpoints: {prot: 1}\n"
        "     |                 ^^^^\n"
        "   6 +     endpoints: {port: 1}\n"
        'conf/base.yaml:3:28: observability.log_level: "warn" (from ${var.level}); '
        "must be one of debug, info, warning, error; did you mean warning?; extended by m.yaml:2:11\n"
        '   3 | observability: {log_level: "${var.level}"}\n'
        "     |                            ^^^^^^^^^^^^^^\n"
        "     | written in m.yaml:\n"
        "   3 - variables: {level: warn}\n"
        "   3 + variables: {level: warning}\n"
        "conf/base.yaml:5:3: limits.max_stopp: unknown key; did you mean max_stop?; extended by m.yaml:2:11\n"
        "   5 |   max_stopp: 4\n"
        "     |   ^^^^^^^^^\n"
        "   5 +   max_stop: 4\n"
        'conf/base.yaml:6:13: limits.max_body: "8Mi" (from ${BODY}); must be a size such as 8GiB; did you mean 8MiB? '
        "set BODY=8MiB; extended by m.yaml:2:11\n"
        "   6 |   max_body: ${BODY}\n"
        "     |             ^^^^^^^"
    )


def test_json_format_has_layer_chain_and_file_of_each_edit(capsys: Output) -> None:
    assert main(["check", "--format", "json", "m.yaml"]) == 2
    overlay, level, _, body = json.loads(capsys.readouterr().out)
    assert (overlay["layer"], overlay["extended_by"]) == ("overlay dev", [])
    assert level["source"] == "conf/base.yaml" and [edit["file"] for edit in level["edits"]] == ["m.yaml"]
    assert level["extended_by"] == [{"source": "m.yaml", "line": 2, "column": 11}]
    assert body["edits"] == [] and body["suggestion"] == "did you mean 8MiB? set BODY=8MiB"


def test_github_and_sarif_name_the_file_with_the_mistake(capsys: Output) -> None:
    assert main(["check", "--format", "github", "m.yaml"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",title")[0] for line in lines] == [
        "::error file=m.yaml,line=6,col=17,endColumn=20",
        "::error file=conf/base.yaml,line=3,col=28,endColumn=41",
        "::error file=conf/base.yaml,line=5,col=3,endColumn=11",
        "::error file=conf/base.yaml,line=6,col=13,endColumn=19",
    ]
    assert lines[0].endswith("in overlay dev") and lines[1].endswith("extended by m.yaml:2:11")
    assert main(["check", "--format", "sarif", "m.yaml"]) == 2
    written = json.loads(capsys.readouterr().out)
    Sarif.model_validate(written)
    overlay, level, typo, _ = written["runs"][0]["results"]
    assert overlay["message"]["text"].endswith("in overlay dev")
    where: dict[str, Any] = typo["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"] == "conf/base.yaml" and where["region"]["startLine"] == 5
    (change,) = level["fixes"][0]["artifactChanges"]
    assert change["artifactLocation"]["uri"] == "m.yaml"
    (way,) = level["relatedLocations"]
    assert way["physicalLocation"]["artifactLocation"]["uri"] == "m.yaml"
    assert way["physicalLocation"]["region"] == {"startLine": 2, "startColumn": 11}


def test_fix_edits_each_file_and_reports_unfixable_problems(capsys: Output) -> None:
    assert main(["check", "--fix", "m.yaml"]) == 2
    assert Path("m.yaml").read_text() == TEXT.replace("warn}", "warning}").replace("prot", "port")
    assert Path("conf/base.yaml").read_text() == BASE.replace("stopp", "stop")
    err = capsys.readouterr().err.splitlines()
    assert err[1] == (
        "conf/base.yaml:3:28: observability.log_level: fixed: m.yaml:3: variables: {level: warn} → "
        "variables: {level: warning}"
    )
    assert err[3] == (
        "conf/base.yaml:6:13: limits.max_body: not fixed, because the value is not in a file: set BODY=8MiB"
    )


def test_fix_runs_two_rounds_for_a_wrong_key_with_a_wrong_default() -> None:
    Path("conf/base.yaml").write_text(BASE.replace("stopp", "stop") + "kv_cache_dtype: ${KV:-half}\n")
    assert main(["check", "--fix", "m.yaml"]) == 2
    assert 'quantization: {kv_cache: "${KV:-float16}"}\n' in Path("conf/base.yaml").read_text()


def test_ambiguous_advice_is_not_repeated(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTEXT", "1000000")
    Path("m.yaml").write_text(
        f"apiVersion: slipway/v2\nmodel:\n  source: {{path: {ROOT}/manifests/demo}}\n  max_context: ${{CONTEXT}}\n"
    )
    assert main(["check", "--fix", "m.yaml", "--hardware.device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "use at most 2048" in err and "the value comes from ${CONTEXT}; set CONTEXT=2048" in err
    assert "not fixed" not in err


def test_fix_explains_how_to_pass_an_option(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BODY", "8MiB")
    assert main(["check", "--fix", "m.yaml", "--limits.max-choices", "1k", "-s", "endpoints.docs=no"]) == 2
    err = capsys.readouterr().err
    assert "--limits.max-choices: limits.max_choices: not fixed, because the value is not in a file: " in err
    assert "pass --limits.max-choices 1024\n" in err and "pass --set endpoints.docs=false\n" in err


def conflict(text: str, base: str) -> Refused:
    Path("m.yaml").write_text("apiVersion: slipway/v2\nextends: conf/base.yaml\n" + text)
    Path("conf/base.yaml").write_text(f"model: {{source: {{path: {ROOT}/manifests/demo}}}}\n{base}")
    with pytest.raises(Refused) as caught:
        validate(Given(Path("m.yaml")), CPU)
    return caught.value


def test_a_conflict_of_keys_in_two_files_names_both_places() -> None:
    refused = conflict("hardware: {kernels: torch}\n", "quantization: {weights: int8}\n")
    (problem,) = refused.problems
    assert str(problem).startswith(
        "m.yaml:3:21: hardware.kernels: torch cannot be combined with quantization.weights: int8 "
        "(conf/base.yaml:2:25, extended by m.yaml:2:10): "
    )
    ((key, place),) = problem.related
    assert (key, str(place)) == ("quantization.weights", "conf/base.yaml:2:25")
    written = json.loads(FORMATS["sarif"](findings(refused.problems)))
    Sarif.model_validate(written)
    (result,) = written["runs"][0]["results"]
    named = [one["physicalLocation"]["artifactLocation"]["uri"] for one in result["relatedLocations"]]
    assert {"m.yaml", "conf/base.yaml"} == {
        *named,
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
    }


@pytest.mark.parametrize("seeded", SEEDED, ids=[seeded.name for seeded in SEEDED])
def test_every_seeded_mistake_is_valid_sarif_and_no_format_shows_a_secret(tmp_path: Path, seeded: Any) -> None:
    for name, text in seeded.texts.items():
        (tmp_path / name).write_text(text)
    overlays = tuple(str(tmp_path / name) if "." in name else name for name in seeded.overlays)
    try:
        load(Given(tmp_path / "m.yaml", (), seeded.variables, overlays))
    except Refused as refused:
        found = findings(refused.problems)
        Sarif.model_validate(json.loads(FORMATS["sarif"](found)))
        for write in FORMATS.values():
            assert "hunter2" not in write(found)
