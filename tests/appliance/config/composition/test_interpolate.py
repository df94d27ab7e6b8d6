"""`${…}` in values: the resulting value and type, and the position of mistakes. `⟪` marks the expected position."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from appliance.config.composition.interpolate import Names, Unreadable, interpolate, join, parse
from appliance.config.settings import Settings
from appliance.config.yaml_loader import Place, read_yaml

Load = Callable[..., Settings]
Refuse = Callable[..., list[str]]
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n"
ENVIRON = {"A": "a", "PORT": "8000", "EMPTY": "", "B_1": "b$c", "T": "true"}
VARIABLES = {"n": 7, "text": "t", "yes": True, "none": "", "share": 0.5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}", "a"), ("x${A}y", "xay"), ("${A}${B_1}", "ab$c"), ("$$", "$"), ("$$${A}$$", "$a$"), ("$${A}", "${A}"),
        ("$$$${A}", "$${A}"), ("a$", "a$"), ("$ 5", "$ 5"), ("$5", "$5"), ("${NO:-d}", "d"), ("${A:-d}", "a"),
        ("${EMPTY:-d}", "d"), ("${EMPTY}", ""), ("[${EMPTY}]", "[]"), ("${NO:-}", ""), ("${NO:-a b:c-}", "a b:c-"),
        ("${NO:-${A}}", "a"), ("${NO:-x${NO2:-${A}y}z}", "xayz"), ("${NO:-$$}", "$"), ("${NO:-a}b}", "ab}"),
        ("${var.n}", 7), ("${var.yes}", True), ("${var.text}", "t"), ("${var.share}", 0.5), ("v${var.n}", "v7"),
        ("${var.yes}!", "true!"), ("${var.none:-${var.n}}", "7"), ("${var.zz:-${var.n}}", "7"),
        ("${NO:-${var.n}}x", "7x"),
        ("}", "}"), ("", ""), ("a: {b}", "a: {b}"),
    ],
)  # fmt: skip
def test_a_text_becomes(text: str, value: Any) -> None:
    found = join(parse(text), Names(ENVIRON, VARIABLES))
    assert (found, isinstance(found, bool)) == (value, isinstance(value, bool))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("⟪${", "has no closing }", "write ${NAME}"),
        ("a ⟪${A", "${A has no closing }", "write ${A}"),
        ("$$ ⟪${}", "the name is missing", "${NAME} for an environment variable"),
        ("⟪${a b}", "'a b' is not a valid name", "${var.name}"),
        ("⟪${ A }", "' A ' is not a valid name", "write ${A}"),
        ("${A} ⟪${1}", "'1' is not a valid name", ""),
        ("⟪${env.A}", "'env.A' is not a valid name", "write ${A}"),
        ("⟪${vars.n}", "'vars.n' is not a valid name", "write ${var.n}"),
        ("⟪${var.}", "'var.' is not a valid name", ""),
        ("⟪${var.N}", "'var.N' is not a valid name", ""),
        ("⟪${A-d}", "'A-d' is not a valid name", "write ${A:-d}"),
        ("⟪${A:d}", "${A:… is not a valid interpolation", "write ${A:-default}"),
        ("⟪${A$}", "${A$… is not a valid interpolation", ""),
        ("$$A ⟪$A", "$A", "write ${A}, or $$A for the text $A"),
        ("⟪$HOME/models", "$HOME", "write ${HOME}"),
        ("${NO:-x ⟪${}}", "the name is missing", ""),
        ("${NO:-⟪${NO2}}", "${NO2} is not set", "write ${NO2:-default}"),
        ("⟪${NO:-a", "${NO:-a has no closing }", "write ${NO}"),
        ("⟪${PROT}", "${PROT} is not set", "did you mean ${PORT}?"),
        ("⟪${port}", "${port} is not set", "did you mean ${PORT}?"),
        ("⟪${n}", "${n} is not set", "did you mean ${var.n}?"),
        ("⟪${var.a}", "${var.a} is not set", "did you mean ${A}?"),
        ("⟪${var.txt}", "${var.txt} is not set", "did you mean ${var.text}?"),
        ("⟪${var.zzzz}", "${var.zzzz} is not set", "variables has n, text, yes, none, share"),
        ("⟪${QQQQ}", "${QQQQ} is not set", "set it, or write ${QQQQ:-default}"),
        ("x ⟪${HF_TOKEN:-secret}", "${HF_TOKEN} has the name of a secret", "secrets: {name: {env: HF_TOKEN}}"),
        ("⟪${APIKEY}", "has the name of a secret", ""), ("⟪${db_password}", "has the name of a secret", ""),
        ("⟪${MY_SECRET}", "has the name of a secret", ""), ("⟪${API_KEYS}", "has the name of a secret", ""),
        ("⟪${var.api_key}", "${var.api_key} has the name of a secret", "secrets: {name: {env: NAME}}"),
        ("${NO:-${NO2:-⟪${A_TOKEN}}}", "has the name of a secret", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["", '"', "'", "|\n  some\n\n  ", ">-\n  one two\n  three "])
def test_a_mistake_is_at_its_dollar_whatever_the_style_of_the_text(
    text: str, message: str, hint: str, before: str
) -> None:
    """The text is the oracle: the mark is removed before the text is read."""
    after = before if before in ("'", '"') else ""
    marked = f"a: 1\nb:\n- {before}{text}{after}\n"
    start, _, rest = marked.partition("⟪")
    tree = interpolate(read_yaml((start + rest).encode(), "m"), Names(ENVIRON | {"HF_TOKEN": "hush"}, VARIABLES))
    (fault,) = tree.faults
    assert fault.place == Place("m", start.count("\n") + 1, len(start) - start.rfind("\n"))
    assert message in fault.message and hint in fault.hint and "hush" not in fault.message + fault.hint


def test_escaped_dollars_are_reported_at_the_start_of_the_text() -> None:
    tree = interpolate(read_yaml(b'a: "\\x24{NO}"\n', "m"), Names({}, {}))
    assert [(fault.message, fault.place) for fault in tree.faults] == [("${NO} is not set", Place("m", 1, 4))]


@pytest.mark.parametrize("seed", range(30))
def test_interpolation_matches_a_shell_on_random_texts(seed: int) -> None:
    """The oracle evaluates from inside out with a regular expression, because no default contains a brace."""
    source = random.Random(seed)
    environ = {name: source.choice(("", "x", "7", "a b")) for name in "ABC"}

    def make(depth: int) -> str:
        parts = [source.choice(("t", "1", ".", " ", "-")) for _ in range(source.randrange(3))]
        for _ in range(source.randrange(3) if depth else 0):
            parts.append(f"${{{source.choice('ABCDE')}:-{make(depth - 1)}}}")
        source.shuffle(parts)
        return "".join(parts)

    def innermost(match: re.Match[str]) -> str:
        return environ.get(match[1], "") or match[2]

    text = want = make(4)
    while "${" in want:
        want = re.sub(r"\$\{(\w+):-([^${}]*)\}", innermost, want)
    assert str(join(parse(text), Names(environ, {}))) == want


@pytest.mark.parametrize(
    ("key", "text", "environ", "value"),
    [
        ("endpoints.port", "${PORT:-8000}", {}, 8000),
        ("endpoints.port", '"${PORT:-8000}"', {"PORT": "9"}, 9),
        ("endpoints.docs", "${DOCS}", {"DOCS": "false"}, False),
        ("hardware.memory_share", "${SHARE}", {"SHARE": "0.5"}, 0.5),
        ("limits.max_output_tokens", "${MOST:-}", {}, None),
        ("limits.max_body", "${BODY}", {"BODY": "2MiB"}, 2 * 2**20),
        ("limits.max_body", "${BODY}MiB", {"BODY": "3"}, 3 * 2**20),
        ("model.chat_template", "${TEMPLATE:-}", {}, None),
        ("model.chat_template", "${TEMPLATE:-}", {"TEMPLATE": "no"}, "no"),
        ("endpoints.host", "${HOST}", {"HOST": "010"}, "010"),
        ("endpoints.host", "${HOST}", {"HOST": "12"}, "12"),
        ("hardware.cpus", "${CPUS}", {"CPUS": "0"}, "0"),
        ("observability.log_outputs", "${LOG}", {"LOG": "off"}, "off"),
        ("model.names", '["${N}", b]', {"N": "7"}, ("7", "b")),
        ("endpoints.host", "${H}", {"H": "${X}$$"}, "${X}$$"),
    ],
)
def test_an_interpolated_value_gets_the_type_of_its_key(
    loaded: Load, key: str, text: str, environ: dict[str, str], value: Any
) -> None:
    section, name = key.split(".")
    text = f"apiVersion: slipway/v2\n{section}:\n  {name}: {text}\n"
    found = loaded(text, "model.source.path=/m", **environ)
    got = getattr(getattr(found.manifest, section), name)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("variable", "key", "value"),
    [("4", "limits.max_stop", 4), ("4", "endpoints.host", "4"), ("true", "endpoints.host", "true"),
     ("'a b'", "endpoints.host", "a b"), ("false", "endpoints.docs", False)],
)  # fmt: skip
def test_variables_keep_their_type_but_for_keys_that_take_only_text(
    loaded: Load, variable: str, key: str, value: Any
) -> None:
    section, name = key.split(".")
    found = loaded(HEAD + f"variables: {{q: {variable}}}\n{section}: {{{name}: '${{var.q}}'}}\n").manifest
    assert getattr(getattr(found, section), name) == value


def test_a_text_of_a_variable_does_not_become_a_number(refused: Refuse) -> None:
    (problem,) = refused(HEAD + "variables: {q: '4'}\nlimits:\n  max_stop: ${var.q}\n")
    assert problem.startswith(
        'm.yaml:5:13: limits.max_stop: "4" (from ${var.q}); must be a whole number of at least 1; '
    )


def test_variables_may_name_each_other_in_any_order_and_the_environment(loaded: Load) -> None:
    text = HEAD + 'variables:\n  c: ${var.b}0\n  b: ${var.a}\n  a: ${N:-1}\nlimits: {max_stop: "${var.b}"}\n'
    text += 'endpoints: {host: "${var.c}"}\n'
    found = loaded(text, N="3").manifest
    assert (found.limits.max_stop, found.endpoints.host) == (3, "30")


def test_variables_of_higher_layers_reach_the_texts_of_lower_ones(loaded: Load) -> None:
    files = {"base.yaml": "model: {source: {path: '/m/${var.size}'}}\nvariables: {size: 8b}\n"}
    plain = "apiVersion: slipway/v2\nextends: base.yaml\n"
    text = plain + "variables: {size: 14b}\noverlays: {big: {variables: {size: 70b}}}\n"
    assert loaded(plain, files=files).manifest.model.source.path == "/m/8b"
    assert loaded(text, files=files).manifest.model.source.path == "/m/14b"
    assert loaded(text, "--overlay big", files=files).manifest.model.source.path == "/m/70b"
    assert loaded(text, "variables.size=1b", files=files).manifest.model.source.path == "/m/1b"
    assert loaded(text, files=files, SLIPWAY__VARIABLES__SIZE="2b").manifest.model.source.path == "/m/2b"


def test_a_circle_of_variables_is_refused_once_and_uses_of_it_are_not_judged(refused: Refuse) -> None:
    text = HEAD + "variables:\n  a: x${var.b}\n  b: ${var.c}\n  c: ${var.a:-1}\nlimits: {max_stop: '${var.a}'}\n"
    assert refused(text) == ["m.yaml:6:6: variables.c: ${var.a:-1} refers to itself: a → b → c → a"]


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ("{Q: 1}", "m.yaml:3:13: variables.Q: not a name for a variable; must match ^[a-z][a-z0-9_]*$"),
        ("{q: [1]}", "m.yaml:3:16: variables.q: a list; must be text, a number, true or false"),
        ("{q: {a: 1}}", "m.yaml:3:16: variables.q: a mapping; must be text, a number, true or false"),
        ("{q: }", "m.yaml:3:15: variables.q: empty; must be text, a number, true or false"),
        ("[q]", "m.yaml:3:12: variables: must be a mapping of names to values"),
        ("{q: '${NO}'}", "m.yaml:3:17: variables.q: ${NO} is not set; set it, or write ${NO:-default}"),
        ("{q: no}", "m.yaml:3:16: variables.q: no: YAML 1.1 reads an unquoted no as false"),
    ],
)
def test_a_wrong_variable_is_refused_at_its_place(refused: Refuse, variables: str, problem: str) -> None:
    problems = refused(HEAD + f"variables: {variables}\n")
    assert len(problems) == 1 and problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("text", "environ", "problem"),
    [
        (
            "endpoints:\n  port: ${PORT}\n",
            {"PORT": "abc"},
            'm.yaml:4:9: endpoints.port: "abc" (from ${PORT}); must be a whole number from 0 to 65535',
        ),
        (
            "endpoints:\n  port: ${PORT}\n",
            {"PORT": ""},
            "m.yaml:4:9: endpoints.port: empty (from ${PORT}); must be a whole number from 0 to 65535",
        ),
        (
            "endpoints:\n  port: 80${PORT}\n",
            {"PORT": "80"},
            'm.yaml:4:9: endpoints.port: "8080" (from 80${PORT}); must be a whole number from 0 to 65535',
        ),
        (
            "hardware:\n  device: ${D:-gpu}\n",
            {},
            'm.yaml:4:11: hardware.device: "gpu" (from ${D:-gpu}); must be one of auto, cpu, cuda; did you mean cuda?',
        ),
        (
            "endpoints:\n  docs: ${DOCS}\n",
            {"DOCS": "no"},
            'm.yaml:4:9: endpoints.docs: "no" (from ${DOCS}): YAML 1.1 reads an unquoted no as false, '
            "YAML 1.2 as text; set DOCS=false",
        ),
        (
            "endpoints: {api_keys: '${WHICH}'}\nsecrets: {k: {env: K}}\n",
            {"WHICH": "q"},
            "m.yaml:3:23: endpoints.api_keys: the value given (not shown) (from ${WHICH}) is not a name in secrets; "
            "secrets has k",
        ),
    ],
)
def test_a_wrong_interpolated_value_shows_its_origin(
    refused: Refuse, text: str, environ: dict[str, str], problem: str
) -> None:
    assert refused(HEAD + text, **environ) == [problem]


def test_values_that_look_like_tokens_are_not_quoted(refused: Refuse) -> None:
    (problem,) = refused(HEAD + "endpoints:\n  docs: ${DOCS:-ghp_16C7e42F292c6912E7710c838347Ae178B4a}\n")
    assert problem.startswith("m.yaml:4:9: endpoints.docs: ") and "ghp_" not in problem


def test_interpolation_within_braces_requires_quotes(refused: Refuse) -> None:
    (problem,) = refused(HEAD + "endpoints: {port: ${PORT:-1}}\n")
    assert problem.startswith("m.yaml:3:19: not valid YAML: ")
    assert problem.endswith('within { } and [ ] interpolation needs quotes: "${PORT:-1}"')


def test_a_replaced_value_is_not_interpolated(loaded: Load) -> None:
    found = loaded(HEAD + "endpoints:\n  port: ${NO}\n", "endpoints.port=1")
    assert found.manifest.endpoints.port == 1 and found.origin(("endpoints", "port")) == "--set endpoints.port"


def test_the_origin_of_a_value_names_its_interpolation(loaded: Load) -> None:
    found = loaded(HEAD + "endpoints:\n  port: ${PORT:-8000}\n  host: a$$b\n")
    assert found.origin(("endpoints", "port")) == "m.yaml:4:9 (${PORT:-8000})"
    assert found.origin(("endpoints", "host")) == "m.yaml:5:9"


def test_options_and_environment_are_not_interpolated(loaded: Load) -> None:
    found = loaded(HEAD, "endpoints.host=${A}$$", SLIPWAY__MODEL__SOURCE__PATH="/${A}", A="a").manifest
    assert (found.endpoints.host, found.model.source.path) == ("${A}$$", "/${A}")


def test_notes_are_not_interpolated(loaded: Load) -> None:
    assert loaded(HEAD + "x-a: ${NO}\nlimits: {x-b: '${', max_stop: 1}\n").manifest.limits.max_stop == 1


def test_interpolation_below_secrets_shows_no_value(loaded: Load, refused: Refuse) -> None:
    text = HEAD + "secrets:\n  k: {file: '${DIR}/k'}\n"
    found = loaded(text, DIR="/run")
    assert found.file(("secrets", "k", "file")).as_posix() == "/run/k"
    for wrong in (
        "k: ${WORD}",
        "k: {env: '${WORD}'}",
        "k: {value: '${WORD}'}",
        "k: {file: ['${WORD}']}",
        "K: {env: '${WORD}'}",
    ):
        problems = refused(HEAD + f"secrets:\n  {wrong}\n", WORD="hunter-2")
        assert problems and not [one for one in problems if "hunter" in one], problems


def test_a_secret_cannot_become_a_value_even_below_secrets(refused: Refuse) -> None:
    for text in (
        "secrets:\n  k: {env: '${HF_TOKEN}'}\n",
        "endpoints:\n  host: ${HF_TOKEN:-x}\n",
        "zzz: {q: '${HF_TOKEN}'}\n",
    ):
        problems = refused(HEAD + text, HF_TOKEN="hunter2")
        assert any("${HF_TOKEN} has the name of a secret" in one for one in problems)
        assert not [one for one in problems if "hunter2" in one]


@pytest.mark.parametrize("name", ["MAX_TOKENS", "KEYBOARD", "TOKEN_FILE", "SECRETS_DIR"])
def test_names_that_only_contain_a_secret_word_are_allowed(name: str) -> None:
    assert join(parse(f"${{{name}}}"), Names({name: "x"}, {})) == "x"


def test_a_fault_in_a_default_that_is_not_used_is_found_when_it_is_read() -> None:
    with pytest.raises(Unreadable):
        parse("${A:-${}}")
