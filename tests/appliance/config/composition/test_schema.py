"""The editor schema and the loader accept the same layers, as far as a schema can express it."""

from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from appliance.config.keys import leaves
from appliance.config.problems import Refused
from appliance.config.schema_file import manifest_schema
from appliance.config.settings import Settings

Load = Callable[..., Settings]
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n"
VALIDATOR = jsonschema.Draft202012Validator(manifest_schema())

LEGAL = [
    "overlays: {dev: {limits: {max_stop: 1}, model: {max_context: 5}}, prod: {}}",
    "overlays: {dev: {variables: {a: 1}, hardware: {profiles: [{name: p, match: {}, set: {}}]}}}",
    "variables: {a: 1, b: x, c: true, d: 0.5, e: '${A}'}",
    "hardware: {profiles: [{name: p, match: {gpu: H200, count: 2, memory: '>=80GB'}, set: {model: {dtype: float16}}}]}",
    "hardware: {profiles: [{name: p, match: {count: '>=2 <5', compute_capability: 9.0, cores: 3}, set: {}}]}",
    "hardware: {profiles: [{name: p, match: {cores: '${A}', memory: any}, set: {limits: {max_stop: '${A}'}}}]}",
    "x-note: [1, {a: b}]\nlimits: {x-why: because, max_stop: 1}\nengine: {cache: {x-: 1}}",
    "endpoints: {port: '${A}', docs: '${B}', host: a, keep_alive: '${C}', compat: '${D}'}",
    "hardware: {device: '${D}', memory_share: '${E:-0.5}', cpus: '${F:-none}', kv_cache_memory: '${G}'}",
    "secrets: {x-key: {file: '${DIR}/x'}, k: {env: A}}",
]
WRONG = [
    "overlays: {dev: {limit: {}}}",
    "overlays: {dev: {limits: {max_stop: 0}}}",
    "overlays: {Dev: {}}",
    "overlays: {dev: {overlays: {}}}",
    "overlays: {dev: {extends: a}}",
    "overlays: [dev]",
    "variables: {A: 1}",
    "variables: {a: [1]}",
    "extends: 5",
    "extends: [5]",
    "hardware: {profiles: [{name: p, match: {gpus: 1}, set: {}}]}",
    "hardware: {profiles: [{name: p, match: {count: '2'}, set: {}}]}",
    "hardware: {profiles: [{name: p, match: {}, set: {zzz: 1}}]}",
    "hardware: {profiles: [{name: p, match: {}, set: {variables: {}}}]}",
    "hardware: {profiles: [{name: p, match: {}, set: {hardware: {profiles: []}}}]}",
    "hardware: {profiles: [{name: p, match: {}}]}",
    "endpoints: {port: 'A'}",
    "endpoints: {port: '$A'}",
    "hardware: {device: gpu}",
    "xnote: 1",
]


@pytest.mark.parametrize("text", LEGAL)
def test_values_accepted_by_the_loader_are_valid_in_the_schema(loaded: Load, text: str) -> None:
    environ = {"A": "9", "B": "true", "C": "5s", "D": "auto", "G": "1GiB", "DIR": "/d"}
    if "compat" in text:
        environ["D"] = "openai"
    loaded(HEAD + text + "\n", **environ)
    VALIDATOR.validate(yaml.safe_load(HEAD + text))


@pytest.mark.parametrize("text", WRONG)
def test_values_rejected_by_the_loader_are_invalid_in_the_schema(loaded: Load, text: str) -> None:
    with pytest.raises(Refused):
        loaded(HEAD + text + "\n", A="1")
    assert not VALIDATOR.is_valid(yaml.safe_load(HEAD + text))


def test_the_schema_allows_interpolation_except_in_the_version() -> None:
    for key in leaves():
        if "*" in key.path or key.name == "apiVersion":
            continue
        several = 2 if key.allowed == "a list of 2 texts" else 1
        value: object = ["${A}"] * several if key.types == {"array"} else "${A}"
        if key.name == "adapters":
            value = [{"name": "${A}", "path": "${A}"}]
        for part in reversed(key.path):
            value = {part: value}
        assert isinstance(value, dict)
        VALIDATOR.validate({"extends": "a", **value})


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ("apiVersion: slipway/v2\nextends: base.yaml\n", True),
        ("limits: {max_stop: 3}\nmodel: {max_context: 4}\n", True),
        ("apiVersion: slipway/v2\n", False),
        ("apiVersion: slipway/v2\nmodel: {names: [a]}\n", False),
        (HEAD, True),
    ],
)
def test_required_keys_are_required_only_in_complete_manifests(text: str, legal: bool) -> None:
    """A file that extends others inherits missing keys; a file without a version is a part of another."""
    assert VALIDATOR.is_valid(yaml.safe_load(text)) is legal


def test_files_of_the_repository_that_are_parts_of_manifests_are_legal_too() -> None:
    root = Path(__file__).resolve().parents[4]
    parts = sorted((root / "manifests/parts").glob("*.yaml"))
    assert parts
    for path in parts:
        VALIDATOR.validate(yaml.safe_load(path.read_text()))
