"""Overlays: which ones apply to the file, and their mistakes, selected or not."""

from collections.abc import Callable

import pytest

from appliance.config.settings import Settings

Load = Callable[..., Settings]
Refuse = Callable[..., list[str]]
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n"
TEXT = (
    HEAD
    + """\
limits: {max_stop: 1, max_choices: 1, max_prompts: 1}
overlays:
  dev: {limits: {max_stop: 2, max_choices: 2}}
  prod:
    limits: {max_choices: 3}
"""
)


def limits(found: Settings) -> tuple[int, int, int]:
    given = found.manifest.limits
    return given.max_stop, given.max_choices, given.max_prompts


@pytest.mark.parametrize(
    ("words", "environ", "want"),
    [
        ((), {}, (1, 1, 1)),
        (("--overlay dev",), {}, (2, 2, 1)),
        (("--overlay dev", "--overlay prod"), {}, (2, 3, 1)),
        (("--overlay prod", "--overlay dev"), {}, (2, 2, 1)),
        ((), {"SLIPWAY_OVERLAY": "dev"}, (2, 2, 1)),
        ((), {"SLIPWAY_OVERLAY": "dev, prod"}, (2, 3, 1)),
        ((), {"SLIPWAY_OVERLAY": ""}, (1, 1, 1)),
        (("--overlay prod",), {"SLIPWAY_OVERLAY": "dev"}, (1, 3, 1)),
        (("--overlay o/x.yaml", "--overlay prod"), {}, (1, 3, 4)),
        ((), {"SLIPWAY_OVERLAY": "prod,y.yml"}, (1, 3, 5)),
    ],
)
def test_overlays_are_chosen_by_name_or_file_and_the_later_wins(
    loaded: Load, words: tuple[str, ...], environ: dict[str, str], want: tuple[int, int, int]
) -> None:
    files = {"o/x.yaml": "limits: {max_prompts: 4, max_choices: 4}\n", "y.yml": "limits: {max_prompts: 5}\n"}
    assert limits(loaded(TEXT, *words, files=files, **environ)) == want


def test_overlay_values_and_settings_name_the_overlay(loaded: Load) -> None:
    files = {"x.yaml": "extends: y.yaml\n", "y.yaml": "limits: {max_prompts: 4}\n"}
    found = loaded(TEXT, files=files, SLIPWAY_OVERLAY="dev,x.yaml")
    assert found.origin(("limits", "max_stop")) == "m.yaml:5:28 (overlay dev)"
    assert found.origin(("limits", "max_prompts")) == "y.yaml:1:23"
    assert found.layers == ("extends y.yaml", "overlay dev by SLIPWAY_OVERLAY", "overlay x.yaml by SLIPWAY_OVERLAY")


def test_overlays_of_a_base_and_of_the_file_are_merged_and_win_over_both(loaded: Load) -> None:
    base = "limits: {max_stop: 9}\noverlays: {dev: {limits: {max_stop: 5, max_choices: 5}}}\n"
    text = HEAD + "extends: base.yaml\nlimits: {max_stop: 1}\noverlays: {dev: {limits: {max_choices: 6}}}\n"
    found = loaded(text, "--overlay dev", files={"base.yaml": base})
    assert limits(found)[:2] == (5, 6)
    assert found.origin(("limits", "max_stop")) == "base.yaml:2:37 (overlay dev)"


@pytest.mark.parametrize(
    ("words", "environ", "problem"),
    [
        (("--overlay dve",), {}, "--overlay dve: no such overlay; the manifest has dev, prod; did you mean dev?"),
        ((), {"SLIPWAY_OVERLAY": "dev,Prod"},
         "SLIPWAY_OVERLAY: Prod: no such overlay; the manifest has dev, prod; did you mean prod?"),
        (("--overlay qqq",), {}, "--overlay qqq: no such overlay; the manifest has dev, prod"),
        (("--overlay o/x.yaml",), {}, "--overlay o/x.yaml: no such file, nor the folder o"),
        (("--overlay n.yaml",), {}, "--overlay n.yaml: no such file; did you mean m.yaml?"),
        ((), {"SLIPWAY_OVERLAY": "n.yaml"}, "SLIPWAY_OVERLAY: n.yaml: no such file; did you mean m.yaml?"),
    ],
)  # fmt: skip
def test_a_missing_overlay_is_reported_with_existing_ones(
    refused: Refuse, words: tuple[str, ...], environ: dict[str, str], problem: str
) -> None:
    assert refused(TEXT, *words, **environ) == [problem]


def test_an_overlay_name_without_overlays_suggests_a_file(refused: Refuse) -> None:
    (problem,) = refused(HEAD, "--overlay dev")
    assert problem == "--overlay dev: no such overlay; the manifest has no overlays; a file ends with .yaml"


@pytest.mark.parametrize("words", [(), ("--overlay dev",), ("--overlay dev", "--overlay prod"), ("limits.max_stop=4",)])
def test_mistakes_of_overlays_are_reported_once_whether_selected_or_not(
    refused: Refuse, words: tuple[str, ...]
) -> None:
    text = HEAD + "limits: {max_stop: 1}\noverlays:\n"
    text += "  dev: {limits: {max_stop: 0}, endpoint: {port: 1}, endpoints: {docs: no}}\n"
    text += "  prod: {model: {max_context: '${var.no}'}, limits: {max_choices: 0}}\n"
    assert refused(text, *words) == [
        "m.yaml:5:28: limits.max_stop: 0; must be a whole number of at least 1; in overlay dev",
        "m.yaml:5:32: endpoint: unknown key; did you mean endpoints?; in overlay dev",
        "m.yaml:5:71: endpoints.docs: no: YAML 1.1 reads an unquoted no as false, YAML 1.2 as text; write false; "
        "in overlay dev",
        "m.yaml:6:32: model.max_context: ${var.no} is not set; variables has nothing; in overlay prod",
        "m.yaml:6:67: limits.max_choices: 0; must be a whole number of at least 1; in overlay prod",
    ]


def test_variables_of_an_overlay_are_required_only_if_it_is_selected(loaded: Load, refused: Refuse) -> None:
    text = HEAD + "overlays:\n  prod:\n    endpoints: {host: '${HOST}'}\n  dev: {limits: {max_stop: 2}}\n"
    assert limits(loaded(text, "--overlay dev"))[0] == 2
    (problem,) = refused(text, "--overlay prod")
    assert problem.startswith("m.yaml:5:24: endpoints.host: ${HOST} is not set; ") and "in overlay prod" in problem
    assert loaded(text, "--overlay prod", HOST="h").manifest.endpoints.host == "h"


def test_a_mistake_in_a_profile_of_an_overlay_names_both(refused: Refuse) -> None:
    text = HEAD + "overlays:\n  dev:\n    hardware:\n      profiles:\n"
    text += "        - {name: p, match: {}, set: {limits: {max_stop: 0}}}\n"
    assert refused(text) == [
        "m.yaml:7:57: limits.max_stop: 0; must be a whole number of at least 1; in profile p of overlay dev"
    ]


def test_an_overlay_that_fits_badly_to_the_file_is_refused_though_not_chosen(loaded: Load, refused: Refuse) -> None:
    text = HEAD + "overlays:\n  closed:\n    endpoints: {api_keys: k}\n"
    assert refused(text) == [
        "m.yaml:5:27: endpoints.api_keys: the value given (not shown) is not a name in secrets; "
        "secrets has no names; put a secret into a file or a variable: secrets: {NAME: {file: PATH}} or "
        "{env: VARIABLE}, and write NAME; in overlay closed"
    ]
    assert loaded(text + "secrets: {k: {env: K}}\n").manifest.endpoints.api_keys is None


def test_an_overlay_can_rely_on_environment_and_options(loaded: Load) -> None:
    text = HEAD + "overlays: {a: {endpoints: {api_keys: k}}, b: {endpoints: {api_keys: e}}}\n"
    assert loaded(text, "secrets.k.env=K", SLIPWAY__SECRETS__E__ENV="E").manifest.endpoints.api_keys is None


def test_mistakes_of_the_file_are_not_repeated_for_each_overlay(refused: Refuse) -> None:
    text = HEAD + "zzz: 1\nendpoints: {port: a, docs: no}\n"
    text += "overlays: {a: {limits: {max_stop: 1}}, b: {endpoints: {docs: true}}}\n"
    assert [problem.split(" ")[0] for problem in refused(text)] == ["m.yaml:3:1:", "m.yaml:4:19:", "m.yaml:4:28:"]


def test_required_keys_may_be_missing_in_an_overlay(loaded: Load, refused: Refuse) -> None:
    text = "apiVersion: slipway/v2\noverlays:\n  a: {model: {source: {path: /a}}}\n  b: {model: {max_context: 9}}\n"
    assert loaded(text, "--overlay a").manifest.model.source.path == "/a"
    assert loaded(text, "--overlay a", "--overlay b").manifest.model.max_context == 9
    assert refused(text) == ["m.yaml:1:1: model: missing; must be a mapping with source, credentials, download, names, dtype, max_context, "  # noqa: E501
                             "chat_template, format, generation_config, task, text_only, media, pooling, trust_remote_code, lock"]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("overlays", "problem"),
    [
        ("[dev]", "m.yaml:3:11: overlays: must be a mapping of names to keys of the manifest"),
        ("{Dev: {}}", "m.yaml:3:12: overlays.Dev: not a name for an overlay; must match"),
        ("{a.yaml: {}}", "m.yaml:3:12: overlays.a.yaml: not a name for an overlay; must match"),
        ("{dev: 5}", "m.yaml:3:17: overlays.dev: must be a mapping with keys of the manifest"),
        ("{dev: no}", "m.yaml:3:17: overlays.dev: no: YAML 1.1"),
        ("{dev: {overlays: {}}}", "m.yaml:3:18: overlays: an overlay cannot have overlays of its own; in overlay dev"),
        ("{dev: {extends: x}}", "m.yaml:3:18: extends: an overlay cannot have extends of its own; in overlay dev"),
        ("{dev: {}, dev: {}}", "m.yaml:3:21: overlays.dev: duplicate key"),
        ("{dev: {zzz: 1, zzz: 2}}", "m.yaml:3:26: zzz: duplicate key"),
    ],
)
def test_a_wrong_overlay_is_refused_at_its_place(refused: Refuse, overlays: str, problem: str) -> None:
    problems = refused(HEAD + f"overlays: {overlays}\n")
    assert problems[0].startswith(problem) or problems[-1].startswith(problem), problems


def test_an_overlay_file_cannot_have_overlays(refused: Refuse) -> None:
    files = {"x.yaml": "overlays: {a: {}}\n"}
    assert refused(HEAD, "--overlay x.yaml", files=files) == [
        "x.yaml:1:1: overlays: an overlay file cannot have overlays of its own"
    ]


def test_extends_and_overlays_come_from_files_only(refused: Refuse) -> None:
    hint = "can only be written in a file; apply another file with --overlay FILE"
    assert refused(HEAD, "extends=a.yaml", "overlays={dev: {}}") == [
        f"--set extends: {hint}",
        f"--set overlays: {hint}",
    ]
    assert refused(HEAD, SLIPWAY__EXTENDS="a.yaml") == [f"SLIPWAY__EXTENDS: extends: {hint}"]
