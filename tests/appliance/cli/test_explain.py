"""`slipway explain`: every key, section, exit code, kind of problem and error of the API has something to say."""

from pathlib import Path

import pytest
import yaml

from appliance.cli.explain import explain
from appliance.cli.explanations.api import API
from appliance.cli.main import main
from appliance.config import exits
from appliance.config.codes import CODES
from appliance.config.deprecated import Deprecated
from appliance.config.keys import Key, keys, leaves, takes
from appliance.config.manifest import API_VERSION
from appliance.config.settings import Given, load
from appliance.config.variables import VARIABLES
from appliance.constraints import variables
from appliance.constraints.rule import Rule
from appliance.constraints.rules import RULES
from appliance.observability.alerts import ALERTS
from appliance.server.errors.api import ApiError


def said(word: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert explain(word) == 0
    return capsys.readouterr().out


def joined(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("key", leaves(), ids=lambda key: key.name)
def test_explain_prints_a_valid_value_for_each_key(key: Key, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(key.name, capsys)
    assert text.startswith(key.name) and joined(key.text) in joined(text) and key.allowed in joined(text)
    (line,) = [line.split(maxsplit=2)[2] for line in text.splitlines() if line.startswith("  in YAML ")]
    value = yaml.safe_load(line)
    for part in key.path:
        value = value[0] if isinstance(value, list) else value["NAME" if part == "*" else part]
    assert "*" in key.path or takes(key.path, value), f"{line} is not a manifest"


@pytest.mark.parametrize(
    "key", [key for key in keys().values() if key.kind == "section" and "*" not in key.path], ids=lambda key: key.name
)
def test_a_section_lists_its_keys(key: Key, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(key.name, capsys)
    below = [other for other in keys().values() if other.path[:-1] == key.path and other.path[-1] != "*"]
    assert all(f"\n  {other.path[-1]} (" in text and joined(other.text) in joined(text) for other in below)


@pytest.mark.parametrize("key", [key for key in keys().values() if key.kind == "layer"], ids=lambda key: key.name)
def test_explain_prints_valid_examples_for_composition_keys(
    key: Key, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(key.name, capsys)
    assert joined(key.text) in joined(text) and "flag" not in text
    (line,) = [line.split(maxsplit=2)[2] for line in text.splitlines() if line.startswith("  in YAML ")]
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "service.yaml").write_text("limits: {max_stop: 3}\n")
    (tmp_path / "m.yaml").write_text(f"apiVersion: {API_VERSION}\nmodel: {{source: {{path: m}}}}\n{line}\n")
    load(Given(tmp_path / "m.yaml"))


@pytest.mark.parametrize("one", exits.EXITS, ids=lambda one: one.name)
def test_an_exit_code_is_explained_by_number_and_by_name(one: exits.Exit, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(str(one.number), capsys) in said(one.name, capsys)
    text = joined(said(one.name, capsys))
    assert one.cause in text and one.cure in text


def test_an_alert_is_explained_with_its_actions(capsys: pytest.CaptureFixture[str]) -> None:
    for alert in ALERTS:
        text = joined(said(alert.name.lower(), capsys))
        assert text.startswith(alert.name) and joined(alert.meaning) in text
        assert all(joined(action) in text for action in alert.actions)


@pytest.mark.parametrize("code", CODES)
def test_a_kind_of_problem_is_explained(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(part in joined(said(code, capsys)) for part in CODES[code])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_explained_and_named_by_the_keys_that_it_ties(rule: Rule, capsys: pytest.CaptureFixture[str]) -> None:
    text = joined(said(rule.name, capsys))
    assert f"{rule.name}, a compatibility rule" in text and rule.text in text
    tied = [one.key for one in variables.VARIABLES if one.name in rule.keys]
    assert (tied or rule.facts) and all(key in text for key in tied)
    for key in {key.name for key in leaves()} & set(tied):
        assert rule.name in joined(said(key, capsys)), key


@pytest.mark.parametrize("name", [one.name for one in VARIABLES])
def test_an_environment_variable_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (meaning,) = [one.text for one in VARIABLES if one.name == name]
    text = joined(said(name, capsys))
    assert meaning in text and text.lower() == joined(said(name.lower(), capsys)).lower()


def test_an_old_name_leads_to_the_new_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = Deprecated("engine.batch", "engine.scheduling.max_running", "0.1.0", "0.3.0")
    monkeypatch.setattr("appliance.cli.explanations.keys.DEPRECATED", (row,))
    text = said("engine.batch", capsys)
    assert text.startswith("engine.batch was renamed") and "\nengine.scheduling.max_running\n" in text


def errors(kind: type[ApiError] = ApiError) -> list[type[ApiError]]:
    return [kind, *(inner for one in kind.__subclasses__() for inner in errors(one))]


def test_every_error_of_the_api_is_explained_by_status_and_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert {kind.__name__ for kind in errors()} == set(API)
    for kind in errors():
        for word in (str(kind.status), kind.type, kind.__name__):
            assert API[kind.__name__][0] in joined(said(word, capsys)), word


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("max_context", "model.max_context"),
        ("--model.max-context", "model.max_context"),
        ("SLIPWAY__MODEL__MAX_CONTEXT", "model.max_context"),
        ("maxContext", "model.max_context"),
        ("gpu-memory-utilization", "hardware.memory_share"),
        ("max_num_seqs", "engine.scheduling.max_running"),
    ],
)
def test_other_spellings_and_names_of_other_servers_lead_to_the_key(
    word: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{name}\n" in said(word, capsys)


@pytest.mark.parametrize(
    ("word", "near"),
    [("max_contxt", "model.max_context"), ("integrty", "integrity"), ("unknown-kye", "unknown-key"), ("qqqq", "try")],
)
def test_explain_exits_with_2_and_suggests_similar_words(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", word]) == exits.MANIFEST.number
    told = capsys.readouterr()
    assert near in told.err and told.out == ""


def test_every_key_with_auto_documents_auto() -> None:
    assert [key.name for key in leaves() if "auto" in key.choices and "auto" not in key.text] in (
        [],
        ["model.generation_config"],  # "auto" or "ignore": its text says what both do
    )


def test_every_free_form_key_has_a_valid_example() -> None:
    for key in leaves():
        assert key.examples or key.choices or key.types == {"boolean"}, key.name
        for value in key.examples:
            assert "*" in key.path or takes(key.path, value), f"{key.name}: {value}"
