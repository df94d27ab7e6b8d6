"""Output of `check` in each format. Oracles: the models of SARIF 2.1.0 made from its schema (pydantic-sarif),
GitHub's rules of escaping, the text of the manifest."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif

from appliance.cli.formats import FORMATS, as_github, as_text, has_colours
from appliance.cli.main import main
from appliance.config.codes import CODES
from appliance.config.findings import Finding, findings
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Given, load
from appliance.config.yaml_loader import Place
from tests.appliance.config.seeded import MARK, SEEDED

TEXT = """\
apiVersion: slipway/v2
model: {source: {path: /.}, dtype: fp16}
endpoints:
  prot: 8000
  docs: yes
max_running: 4
secrets:
  clients: hunter2
"""
Output = pytest.CaptureFixture[str]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(TEXT)
    return path


def found(path: Path) -> list[Finding]:
    with pytest.raises(Refused) as refused:
        load(Given(path))
    return findings(refused.value.problems)


def replaced(text: str, edits: list[dict[str, Any]]) -> str:
    """The text with edits of one file, from the last to the first, by lines and columns alone."""
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    for edit in sorted(edits, key=lambda e: (e["line"], e["column"]), reverse=True):
        first = starts[edit["line"] - 1] + edit["column"] - 1
        last = starts[edit["end_line"] - 1] + edit["end_column"] - 1
        text = text[:first] + edit["replacement"] + text[last:]
    return text


def test_text_format_shows_line_caret_and_fix(manifest: Path) -> None:
    shown = as_text(found(manifest)).replace(str(manifest), "m.yaml")
    assert shown == (
        'm.yaml:2:36: model.dtype: "fp16"; must be one of auto, float32, bfloat16, float16; did you mean float16?\n'
        "   2 | model: {source: {path: /.}, dtype: fp16}\n"
        "     |                                    ^^^^\n"
        "   2 + model: {source: {path: /.}, dtype: float16}\n"
        "m.yaml:4:3: endpoints.prot: unknown key; did you mean port?\n"
        "   4 |   prot: 8000\n"
        "     |   ^^^^\n"
        "   4 +   port: 8000\n"
        "m.yaml:5:9: endpoints.docs: yes: YAML 1.1 reads an unquoted yes as true, YAML 1.2 as text; write true\n"
        "   5 |   docs: yes\n"
        "     |         ^^^\n"
        "   5 +   docs: true\n"
        "m.yaml:6:1: max_running: unknown key; it belongs to engine.scheduling: max_running\n"
        "   6 | max_running: 4\n"
        "     | ^^^^^^^^^^^\n"
        "   6 + engine: {scheduling: {max_running: 4}}\n"
        "m.yaml:8:12: secrets.clients: a literal value (not shown); "
        "a secret is {file: path} or {env: NAME}, never the value itself\n"
        "   8 |   clients: •••\n"
        "     |            ^^^"
    )


def test_colours_are_for_terminals_that_take_them() -> None:
    assert has_colours(True, {}) and has_colours(True, {"NO_COLOR": ""})
    assert not has_colours(True, {"NO_COLOR": "1"}) and not has_colours(False, {})
    assert not has_colours(True, {"TERM": "dumb"})


def test_colours_change_nothing_else(manifest: Path) -> None:
    import re

    assert re.sub(r"\033\[\d+m", "", as_text(found(manifest), True)) == as_text(found(manifest))


def test_json_has_every_problem_with_edits_that_can_be_made(manifest: Path, capsys: Output) -> None:
    assert main(["check", "--format", "json", str(manifest)]) == 2
    out, err = capsys.readouterr()
    objects = json.loads(out)
    assert not err and [(one["line"], one["column"], one["key"], one["code"]) for one in objects] == [
        (2, 36, "model.dtype", "wrong-value"),
        (4, 3, "endpoints.prot", "unknown-key"),
        (5, 9, "endpoints.docs", "ambiguous"),
        (6, 1, "max_running", "unknown-key"),
        (8, 12, "secrets.clients", "literal-secret"),
    ]
    assert {one["source"] for one in objects} == {str(manifest)}
    after = replaced(TEXT, [edit for one in objects for edit in one["edits"]])
    manifest.write_text(after.replace("hunter2", "{file: k}"))
    assert load(Given(manifest)).manifest.engine.scheduling.max_running == 4


def test_sarif_is_valid_and_its_fixes_are_the_edits(manifest: Path, capsys: Output) -> None:
    assert main(["check", "--format", "sarif", str(manifest), "--limits.max-stop", "99.5"]) == 2
    out, err = capsys.readouterr()
    assert not err
    value = json.loads(out)
    Sarif.model_validate(value)
    (run,) = value["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(run["results"]) == 6 and all(rules[one["ruleIndex"]] == one["ruleId"] for one in run["results"])
    edits = [
        {
            "line": one["deletedRegion"]["startLine"],
            "column": one["deletedRegion"]["startColumn"],
            "end_line": one["deletedRegion"]["endLine"],
            "end_column": one["deletedRegion"]["endColumn"],
            "replacement": one["insertedContent"]["text"],
        }
        for result in run["results"]
        for fix in result.get("fixes", ())
        for change in fix["artifactChanges"]
        for one in change["replacements"]
    ]
    after = replaced(TEXT, edits)
    assert "  port: 8000\n  docs: true\nengine: {scheduling: {max_running: 4}}\n" in after and "float16}" in after
    assert "locations" in run["results"][-1] and "99.5" in run["results"][-1]["message"]["text"]


@pytest.mark.parametrize("seeded", SEEDED, ids=[seeded.name for seeded in SEEDED])
def test_every_seeded_mistake_is_valid_sarif_and_no_format_shows_a_secret(tmp_path: Path, seeded: Any) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(seeded.text.replace(MARK, ""))
    try:
        load(Given(path))
    except Refused as refused:
        shown = findings(refused.problems)
        Sarif.model_validate(json.loads(FORMATS["sarif"](shown)))
        for form in FORMATS.values():
            assert "hunter2" not in form(shown) and "abcdefgh" not in form(shown)


def test_a_good_manifest_is_an_empty_report(manifest: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(FORMATS["json"](())) == []
    Sarif.model_validate(json.loads(FORMATS["sarif"](())))


def test_github_parses_the_workflow_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unescaped as the runner does it: %0A, %0D and %25 in the message, also %3A and %2C in properties."""
    monkeypatch.chdir(tmp_path)
    message = "100 %: a,b\nsecond\rline %0A"
    place = Place(f"{tmp_path}/sub, folder/m:1.yaml", 3, 5)
    line = as_github([Finding(Problem(place, "a.b", message, code="unknown-key"), end=9)])
    assert "\n" not in line and "\r" not in line
    head, _, data = line.removeprefix("::error ").partition("::")
    properties = dict(one.split("=", 1) for one in head.split(","))

    def read(text: str, pairs: str) -> str:
        for code, char in {"%3A": ":", "%2C": ",", "%0D": "\r", "%0A": "\n", "%25": "%"}.items():
            text = text.replace(code, char) if char in pairs else text
        return text

    assert read(data, "\r\n%") == message
    assert {name: read(value, ":,\r\n%") for name, value in properties.items()} == {
        "file": "sub, folder/m:1.yaml",
        "line": "3",
        "col": "5",
        "endColumn": "8",
        "title": "slipway unknown-key: a.b",
    }


def test_plan_and_serve_tell_it_on_standard_error(manifest: Path, capsys: Output) -> None:
    for command in ("plan", "serve"):
        assert main([command, "--format", "github", str(manifest)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("::error file=") == 5 == err.count("\n")


def test_every_code_is_listed_with_words() -> None:
    assert all(meaning.endswith(".") and cure.endswith(".") for meaning, cure in CODES.values())


# -- fix --------------------------------------------------------------------------------------------------------------


def test_fix_applies_unambiguous_fixes_and_reports_them(manifest: Path, capsys: Output) -> None:
    manifest.chmod(0o640)
    assert main(["check", "--fix", str(manifest)]) == 2
    err = capsys.readouterr().err
    assert manifest.read_text() == (
        "apiVersion: slipway/v2\nmodel: {source: {path: /.}, dtype: float16}\nendpoints:\n  port: 8000\n  docs: true\n"
        "engine: {scheduling: {max_running: 4}}\nsecrets:\n  clients: hunter2\n"
    )
    assert manifest.stat().st_mode & 0o777 == 0o640 and [path.name for path in manifest.parent.iterdir()] == ["m.yaml"]
    assert err.count(": fixed: ") == 4 and "fixed: prot: 8000 → port: 8000\n" in err
    assert err.endswith("m.yaml: 1 problem\n") and "hunter2" not in err


def test_fix_finds_mistakes_behind_a_yaml_error(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: /.}}\nlimits:\n\tmax_body: 8Mi\n\tmax_stop: 4\nkind: X\n"
    )
    main(["check", "--fix", str(path)])
    assert path.read_text() == (
        "apiVersion: slipway/v2\nmodel: {source: {path: /.}}\nlimits:\n  max_body: 8MiB\n  max_stop: 4\n"
    )


def test_fix_leaves_doubt_alone_and_links_links(tmp_path: Path, capsys: Output) -> None:
    real = tmp_path / "real.yaml"
    text = "apiVersion: slipway/v2\nmodel: {source: {path: /.}}\nlimits:\n  max_stop: 0\n  max_body: 1MiB\n  max_body: 2MiB\n"  # noqa: E501
    real.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"kind: X\r\n")
    link = tmp_path / "m.yaml"
    link.symlink_to(real)
    assert main(["check", "--fix", str(link)]) == 2
    assert link.is_symlink() and real.read_bytes() == b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
