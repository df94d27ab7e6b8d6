"""The schema for editors, and the pages made from it, are current. The manifests themselves: tests/manifests."""

import json
from pathlib import Path

import jsonschema
import pytest

from appliance import __version__
from appliance.config.keys import keys, leaves
from appliance.config.schema_file import manifest_page, manifest_schema, schema_text
from appliance.config.settings import Given, load

ROOT = Path(__file__).resolve().parents[3]


def test_the_demo_is_served_under_its_name_on_the_port_that_make_serve_prints() -> None:
    manifest = load(Given(ROOT / "manifests/demo.yaml")).manifest
    assert (manifest.model.source.path, manifest.model.names, manifest.endpoints.port) == ("demo", ("demo",), 8000)


def test_the_schema_is_one_of_draft_2020_12_with_a_meaning_for_every_key() -> None:
    schema = json.loads(schema_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert [key.name for key in keys().values() if not key.text] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": {"prot": 1}},
        {"endpoints": {"port": "8000"}},
        {"hardware": {"device": "gpu"}},
        {"limits": {"max_body": "8Mi"}},
        {"lifecycle": {"drain": "8 sec"}},
        {"secrets": {"key": "hunter2"}},
        {"secrets": {"KEY": {"env": "A"}}},
        {"hardware": {"memory_share": 1.5}},
        {"apiVersion": "slipway/v3"},
    ],
)
def test_the_schema_rejects_values_that_the_loader_rejects(wrong: dict[str, object]) -> None:
    manifest = {"apiVersion": "slipway/v2", "model": {"source": {"path": "/m"}}} | wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(manifest_schema()).validate(manifest)


def test_the_pages_made_from_the_schema_are_current() -> None:
    hint = "run: python tools/manifest_page.py"
    assert (ROOT / "docs/manifest.md").read_text() == manifest_page(), hint
    assert (ROOT / "docs/manifest.schema.json").read_text() == schema_text(), hint


def test_the_page_has_a_row_for_every_key_with_default_and_meaning() -> None:
    page = manifest_page()
    for key in leaves():
        if len(key.path) > 1:
            meaning = " ".join(key.text.split(";")[0].split()).replace("|", "\\|")
            assert f"| `{key.path[-1]}` | " in page and meaning in page, key.name


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
