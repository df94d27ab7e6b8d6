"""Sources of settings, their precedence, and where each value came from."""

from dataclasses import fields
from pathlib import Path

import pytest

from appliance.config.keys import leaves
from appliance.config.manifest import Manifest
from appliance.config.problems import Refused
from appliance.config.settings import Given, Layers, Option, Settings, load, variable

EXAMPLES = {
    ("huggingface", "repo"): "a/b",
    ("http", "url"): "https://h/x.tar",
    ("http", "sha256"): "a" * 64,
    ("pypi", "package"): "p",
    ("pypi", "version"): "0.1.2",
    ("pypi", "sha256"): "a" * 64,
    ("s3", "uri"): "s3://bucket/x",
    ("gs", "uri"): "gs://bucket/x",
    ("az", "uri"): "az://container/x",
    ("az", "account"): "mystorage",
}
NEEDED = {
    ("model", "source", kind): [("model", "source", kind, key)]
    for kind, key in EXAMPLES
    if key not in ("sha256", "account")
}
NEEDED["model", "source", "pypi"] = [("model", "source", *path) for path in EXAMPLES if path[0] == "pypi"]
BASE = "apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n"


def settings(tmp_path: Path, text: str = BASE, *sets: str, **environ: str) -> Settings:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    options = tuple(Option(f"--set {one.partition('=')[0]}", *one.split("=", 1)) for one in sets)
    return load(Given(path, options, environ))


def refusal(tmp_path: Path, text: str = BASE, *sets: str, **environ: str) -> str:
    with pytest.raises(Refused) as caught:
        settings(tmp_path, text, *sets, **environ)
    return str(caught.value)


def test_precedence_is_options_then_environment_then_manifest_then_defaults(tmp_path: Path) -> None:
    text = BASE + "limits: {max_stop: 3, max_choices: 3, max_prompts: 3}\n"
    variables = {"SLIPWAY__LIMITS__MAX_STOP": "2", "SLIPWAY__LIMITS__MAX_CHOICES": "2"}
    found = settings(tmp_path, text, "limits.max_stop=1", **variables)
    limits = found.manifest.limits
    assert (limits.max_stop, limits.max_choices, limits.max_prompts, limits.max_waiting) == (1, 2, 3, 1024)
    origins = [found.origin(("limits", name)) for name in ("max_stop", "max_choices", "max_prompts", "max_waiting")]
    column = text.splitlines()[2].index("max_prompts: 3") + len("max_prompts: ") + 1
    here = f"{tmp_path / 'm.yaml'}:3:{column}"
    assert origins == ["--set limits.max_stop", "SLIPWAY__LIMITS__MAX_CHOICES", here, "default"]


def test_the_order_is_defined_in_one_class() -> None:
    assert [one.name for one in fields(Layers)] == ["options", "environment", "overlays", "manifest", "profile"]


def test_nested_json_in_an_option_builds_nested_sections_and_keeps_the_rest(tmp_path: Path) -> None:
    text = BASE + "engine: {cache: {prefix: false}, scheduling: {max_running: 3}}\n"
    engine = settings(tmp_path, text, "engine={cache: {block_tokens: 32}}").manifest.engine
    assert (engine.cache.block_tokens, engine.cache.prefix, engine.scheduling.max_running) == (32, False, 3)


def test_json_in_the_environment_builds_lists_and_sections(tmp_path: Path) -> None:
    model = settings(tmp_path, BASE, SLIPWAY__MODEL='{"names": ["a", "b"]}').manifest.model
    assert (model.names, model.source.path) == (("a", "b"), "/m")


def test_a_more_precise_variable_wins_over_a_wider_one(tmp_path: Path) -> None:
    variables = {"SLIPWAY__LIMITS__MAX_STOP": "5", "SLIPWAY__LIMITS": "{max_stop: 4, max_choices: 4}"}
    limits = settings(tmp_path, BASE, **variables).manifest.limits
    assert (limits.max_stop, limits.max_choices) == (5, 4)


def test_options_are_laid_over_each_other_in_their_order(tmp_path: Path) -> None:
    options = ("limits.max_stop=1", "limits={max_choices: 7, max_prompts: 7}", "limits.max_prompts=2")
    limits = settings(tmp_path, BASE, *options).manifest.limits
    assert (limits.max_stop, limits.max_choices, limits.max_prompts) == (1, 7, 2)


def test_lists_are_replaced_not_joined(tmp_path: Path) -> None:
    text = "apiVersion: slipway/v2\nmodel: {source: {path: /m}, names: [a, b]}\n"
    assert settings(tmp_path, text, "model.names=[c]").manifest.model.names == ("c",)


def test_the_version_can_come_from_the_environment(tmp_path: Path) -> None:
    assert (
        settings(tmp_path, "model: {source: {path: /m}}\n", SLIPWAY__APIVERSION="slipway/v2").manifest.model.source.path
        == "/m"
    )


SECRETS = ("endpoints.api_keys", "model.credentials", "observability.traces.headers")


def test_every_key_can_be_set_by_a_variable_of_its_own(tmp_path: Path) -> None:
    values = {"boolean": "false", "integer": "2", "number": "1", "array": "[a]", "string": "x"}
    for key in leaves():
        if "*" in key.path:
            continue
        value = key.choices[-1] if key.choices else next(values[kind] for kind in values if kind in key.types)
        if key.types == {"array"} and "numbers" in key.allowed:
            value = "[1]"
        if key.path[:2] == ("endpoints", "routes") or key.name == "limits.media.folders":
            value = "[/a]"
        if key.name == "adapters":
            value = "[{name: x, path: a}]"
        if key.allowed == "a list of 2 texts":
            value = "[a, b]"
        if key.path[:2] == ("model", "source") and (examples := EXAMPLES.get(key.path[2:])):
            value = examples
        if key.path[:2] == ("observability", "traces"):
            value = {"endpoint": "http://collector", "attributes": "[a=b]"}.get(key.path[2], value)
        extra = {"SLIPWAY__SECRETS__X__FILE": "f"} if key.name in SECRETS else {}
        extra |= {variable(path): EXAMPLES[path[2:]] for path in NEEDED.get(key.path[:3], ()) if path != key.path}
        found = settings(tmp_path, BASE, **{variable(key.path): value, **extra})
        assert found.origin(key) == variable(key.path), key.name


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    others = {"SLIPWAY_PORT": "tcp://10.0.0.1:80", "SLIPWAY_SERVICE_HOST": "10.0.0.1", "HOME": "/", "XSLIPWAY__A": "1"}
    assert settings(tmp_path, BASE, **others).manifest.endpoints.port == 8000


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SLIPWAY__ENDPOINTS__PROT", "did you mean SLIPWAY__ENDPOINTS__PORT?"),
        ("SLIPWAY__PORT", "did you mean SLIPWAY__ENDPOINTS__PORT?"),
        ("SLIPWAY__MODEL__MAX_MODEL_LEN", "did you mean SLIPWAY__MODEL__MAX_CONTEXT?"),
        ("SLIPWAY__ENDPOINT__PORT", "did you mean SLIPWAY__ENDPOINTS__PORT?"),
        ("SLIPWAY__ENDPOINTS__PORT__X", "did you mean SLIPWAY__ENDPOINTS__PORT?"),
        ("SLIPWAY__", "keys, such as SLIPWAY__ENDPOINTS__PORT"),
        ("SLIPWAY__QQQ", "keys, such as SLIPWAY__ENDPOINTS__PORT"),
    ],
)
def test_an_unknown_variable_is_refused_with_a_suggestion(tmp_path: Path, name: str, words: str) -> None:
    message = refusal(tmp_path, BASE, **{name: "1"})
    assert message.startswith(f"{name}: unknown setting; ") and message.endswith(words)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"SLIPWAY__ENDPOINTS__PORT": "x"},
            'SLIPWAY__ENDPOINTS__PORT: endpoints.port: "x"; must be a whole number from 0',
        ),
        ({"SLIPWAY__HARDWARE__DEVICE": "gpu"}, "must be one of auto, cpu, cuda; did you mean cuda?"),
        ({"SLIPWAY__ENGINE__CACHE__PREFIX": "no"}, "write false"),
        ({"SLIPWAY__ENGINE": "{cahce: {}}"}, "SLIPWAY__ENGINE: engine.cahce: unknown key"),
        ({"SLIPWAY__ENGINE": "{cache: "}, "SLIPWAY__ENGINE: engine: not valid YAML"),
        ({"SLIPWAY__SECRETS__KEY": "hunter2"}, "secrets.key: a literal value (not shown)"),
    ],
)
def test_a_wrong_value_names_its_variable_and_the_choices(
    tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    message = refusal(tmp_path, BASE, **variables)
    assert words in message and "hunter2" not in message


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("endpoints.prot=1", "--set endpoints.prot: unknown key; did you mean port?"),
        ("port=1", "--set port: unknown key; it belongs to endpoints: port"),
        ("zzz=1", "--set zzz: unknown key; the manifest has apiVersion, model"),
        ("engine.cahce.prefix=true", "did you mean cache?"),
        ("endpoints.port.x=1", "endpoints.port has no keys below it"),
        ("endpoints.port=080", "--set endpoints.port: 080: a leading zero"),
        ("endpoints=8000", "--set endpoints: 8000; must be a mapping with host"),
        ("=1", "unknown key"),
        ("model..path=1", "unknown key"),
    ],
)
def test_a_wrong_option_is_refused_at_the_option(tmp_path: Path, option: str, words: str) -> None:
    assert words in refusal(tmp_path, BASE, option)


def test_an_option_overrules_a_wrong_value_of_a_lower_source(tmp_path: Path) -> None:
    found = settings(tmp_path, BASE + "endpoints: {port: eight}\n", "endpoints.port=8")
    assert found.manifest.endpoints.port == 8


def test_problems_of_all_sources_come_together_file_first(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE + "zzz: 1\n", "limits.max_stop=0", SLIPWAY__QQQ="1")
    lines = message.splitlines()
    assert len(lines) == 3 and lines[0].startswith(f"{tmp_path / 'm.yaml'}:3:1: zzz:")


def test_a_manifest_survives_the_way_to_a_dict_and_back(tmp_path: Path) -> None:
    text = BASE + "endpoints: {api_keys: k, keep_alive: 5s}\nlimits: {max_body: 1MiB}\nsecrets: {k: {env: KEY}}\n"
    manifest = settings(tmp_path, text, "model.names=[a]", "hardware.kv_cache_memory=2GiB").manifest
    assert Manifest.model_validate(manifest.model_dump(mode="json")) == manifest
    assert Manifest.model_validate(manifest.model_dump()) == manifest


def test_reading_the_same_layers_twice_is_deterministic(tmp_path: Path) -> None:
    first = settings(tmp_path, BASE, "limits.max_stop=1", SLIPWAY__LIMITS__MAX_CHOICES="2")
    second = settings(tmp_path, BASE, "limits.max_stop=1", SLIPWAY__LIMITS__MAX_CHOICES="2")
    assert first.manifest == second.manifest and first.tree == second.tree


def test_the_manifest_is_frozen_and_copies_change_named_fields_only(tmp_path: Path) -> None:
    limits = settings(tmp_path).manifest.limits
    changed = limits.model_copy(update={"max_stop": 1})
    assert changed.max_stop == 1 and changed.model_copy(update={"max_stop": limits.max_stop}) == limits
    with pytest.raises(ValueError, match="frozen"):
        limits.max_stop = 2  # type: ignore[misc]


@pytest.mark.parametrize("path", ["a", "/a/", "/%41", "//", ""])
def test_a_route_that_is_no_path_is_refused_with_the_form_of_a_path(path: str, tmp_path: Path) -> None:
    text = BASE + f"endpoints: {{routes: {{predict: ['/x', '{path}']}}}}\n"
    with pytest.raises(Refused, match=r"endpoints.routes.predict\[1\]: .*must be a path such as /score"):
        settings(tmp_path, text)
