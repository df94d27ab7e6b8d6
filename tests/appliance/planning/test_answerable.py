"""`check` refuses setups that start and then fail every request: end tokens, sampling defaults, template, endpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.config.problems import Problem, Refused
from appliance.config.settings import Given
from appliance.planning.validate import validate
from tests.appliance.certificates import write_certificate

DEMO = Path(__file__).parents[3] / "manifests" / "demo"
Check = Callable[..., list[Problem]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the demo's checkpoint that a test may damage."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


@pytest.fixture
def check(tmp_path: Path, folder: Path) -> Check:
    """Return the problems of a manifest with these lines after its model, and the command's exit code."""

    def run(more: str = "", model: str = "", **environ: str) -> list[Problem]:
        path = tmp_path / "m.yaml"
        path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: model}}{model}}}\n{more}")
        try:
            validate(Given(path, (), environ))
        except Refused as refused:
            return refused.problems
        return []

    return run


def rewrite(file: Path, **values: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | values))


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_the_demo_is_accepted(check: Check) -> None:
    assert check() == []


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("token", [10**9, [2, 10**9]])
def test_an_end_token_beyond_the_vocabulary_is_refused(check: Check, folder: Path, file: str, token: Any) -> None:
    rewrite(folder / file, eos_token_id=token)
    problem = only(check())
    assert "eos_token_id is 1000000000; the vocabulary has the IDs 0 to" in problem.message and file in problem.message
    assert problem.key == "model.source.path" and problem.place.line == 2


def test_a_generation_config_that_is_ignored_is_not_checked(check: Check, folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=10**9, temperature=-5)
    assert check(model=", generation_config: ignore") == []


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -5, "greater than or equal to 0"),
        ("temperature", "hot", "valid number"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", -3, "greater than or equal to 0"),
        ("min_p", 2, "less than or equal to 1"),
        ("repetition_penalty", 0, "greater than or equal to 0.0001"),
    ],
)
def test_a_sampling_default_out_of_range_is_refused_unless_replaced(
    check: Check, folder: Path, name: str, value: Any, allowed: str
) -> None:
    rewrite(folder / "generation_config.json", **{name: value})
    problem = only(check())
    assert f"generation_config.json: {name} is {value!r}: " in problem.message and allowed in problem.message
    assert f"engine.sampling.{name}" in problem.message and "generation_config: ignore" in problem.message
    assert check(f"engine: {{sampling: {{{name}: 1}}}}\n") == []


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("{% for m in messages %}{{ m.content }", "not valid Jinja"),
        ("{{ messages[0].content | nothing }}", "not valid Jinja"),
        ("{{ messages[0]['content'] + 1 + [] }}", "fails on this conversation"),
        ("{{ undefined_function() }}", "fails on this conversation"),
    ],
)
def test_a_template_that_renders_no_conversation_is_refused(
    check: Check, folder: Path, tmp_path: Path, template: str, wrong: str
) -> None:
    (tmp_path / "own.jinja").write_text(template)
    problem = only(check(model=", chat_template: own.jinja"))
    assert wrong in problem.message and problem.key == "model.chat_template"
    (folder / "chat_template.jinja").write_text(template)
    problem = only(check())
    assert wrong in problem.message and "chat_template.jinja" in problem.message
    assert "Set model.chat_template to a corrected file" in problem.message


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}",
        "{% for m in messages %}{{ m.content[0].text.strip() }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_with_rules_of_its_own_is_accepted(check: Check, tmp_path: Path, template: str) -> None:
    (tmp_path / "own.jinja").write_text(template)
    assert check(model=", chat_template: own.jinja") == []


def tls(certificate: str, key: str) -> str:
    return f"endpoints: {{tls: {{certificate: {certificate}, key: {key}}}}}\n"


def test_certificates_that_cannot_be_served_are_refused(check: Check, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_certificate(tmp_path, name)
    (tmp_path / "text.pem").write_text("no certificate\n")
    assert check(tls("one.crt", "one.key")) == []
    missing = only(check(tls("missing.pem", "one.key")))
    assert missing.key == "endpoints.tls.certificate" and "cannot be read" in missing.message
    assert only(check(tls("one.crt", "missing.pem"))).key == "endpoints.tls.key"
    text = only(check(tls("text.pem", "one.key")))
    assert text.key == "endpoints.tls.certificate" and "no PEM certificate" in text.message
    swapped = only(check(tls("one.crt", "two.key")))
    assert swapped.key == "endpoints.tls.key" and "is not the private key of" in swapped.message


@pytest.mark.parametrize(
    ("keys", "wrong"), [("# none\n", "contains no key"), ("k name=a b=c", "line 1: word 3 must be one of")]
)
def test_a_key_list_without_valid_keys_is_refused(check: Check, tmp_path: Path, keys: str, wrong: str) -> None:
    (tmp_path / "keys").write_text(keys)
    more = "endpoints: {api_keys: k}\nsecrets: {k: {file: keys}}\n"
    problem = only(check(more))
    assert wrong in problem.message and problem.key == "endpoints.api_keys" and problem.place.line == 3
    problem = only(check(more.replace("file: keys", "env: KEYS"), KEYS=keys))
    assert wrong in problem.message and "environment variable KEYS" in problem.message


@pytest.mark.parametrize("host", ["999.1.1.1", "1.2.3", "no such host", "http://host", "a/b", "::g"])
def test_invalid_addresses_are_refused(check: Check, host: str) -> None:
    problem = only(check(f"endpoints: {{host: '{host}'}}\n"))
    assert problem.key == "endpoints.host" and "is neither an IP address nor a host name" in problem.message


@pytest.mark.parametrize("host", ["203.0.113.7", "host.invalid", "2001:db8::7"])
def test_an_address_of_another_machine_is_a_notice(tmp_path: Path, folder: Path, host: str) -> None:
    """The manifest may be checked on a machine other than its target; `serve` refuses it there."""
    (tmp_path / "m.yaml").write_text(
        f"apiVersion: slipway/v2\nmodel: {{source: {{path: model}}}}\nendpoints: {{host: '{host}'}}\n"
    )
    (notice,) = validate(Given(tmp_path / "m.yaml", (), {})).notices
    assert notice.key == "endpoints.host" and "`slipway serve` cannot listen on it here" in notice.message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "localhost"])
def test_addresses_of_this_machine_are_accepted(check: Check, tmp_path: Path, host: str) -> None:
    assert check(f"endpoints: {{host: '{host}'}}\n") == []
    assert validate(Given(tmp_path / "m.yaml", (), {})).notices == ()
