"""Examples in the pages work (APP-04): Python parses, YAML is a manifest, commands, options, modules, targets exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from appliance.cli.main import COMMANDS, _long_options
from appliance.config.keys import find
from appliance.config.manifest import API_VERSION
from appliance.config.schema_file import manifest_schema
from appliance.config.settings import Given, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def fences(language: str) -> list[tuple[str, str]]:
    """(page:line, text) of every fenced block in this language."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[2] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append((f"{page.name}:{line}", match[3]))
    return found


def manifests() -> Iterator[tuple[str, str]]:
    """Every manifest on a page: blocks of their own, and those in a ConfigMap."""
    for place, text in fences("yaml"):
        for document in yaml.safe_load_all(text):
            if isinstance(document, dict) and str(document.get("apiVersion", "")).startswith("slipway/"):
                yield place, text
            elif isinstance(document, dict) and document.get("kind") == "ConfigMap":
                yield from ((f"{place} {name}", inner) for name, inner in document["data"].items())


def test_blocks_of_python_parse() -> None:
    blocks = fences("python")
    assert blocks
    for place, text in blocks:
        try:
            ast.parse(text)
        except SyntaxError as error:
            pytest.fail(f"{place}: {error}")


def test_blocks_of_yaml_are_manifests_objects_of_kubernetes_or_workflows() -> None:
    assert len(list(manifests())) >= 2
    for place, text in fences("yaml"):
        for document in yaml.safe_load_all(text):
            assert isinstance(document, dict), place
            kind = "kind" in document and "metadata" in document
            assert kind or "jobs" in document or document.get("apiVersion") == API_VERSION, f"{place}: of nothing known"


@pytest.mark.parametrize(("place", "text"), list(manifests()), ids=[place for place, _ in manifests()])
def test_a_manifest_on_a_page_is_taken(place: str, text: str, tmp_path: Path) -> None:
    value: dict[str, Any] = yaml.safe_load(text)
    jsonschema.Draft202012Validator(manifest_schema()).validate(value)
    if "extends" not in value:
        path = tmp_path / "m.yaml"
        path.write_text(text)
        load(Given(path))


def mentioned() -> Iterator[tuple[str, str]]:
    """(page:line, command line) of everything that begins with `slipway`, in backticks and in blocks."""
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for text in re.findall(r"`((?:\w+=\S+ )?slipway [a-z]+(?: [^`]*)?)`", line) or re.findall(
                r"^(?:\$ )?(slipway [a-z]+(?: .*)?)$", line
            ):
                yield f"{page.name}:{number}", text


def test_commands_and_options_on_the_pages_exist() -> None:
    found = list(mentioned())
    assert len(found) > 20, "the commands were not found"
    for place, text in found:
        command = re.sub(r"^\w+=\S+ ", "", text).split()[1]
        assert command in COMMANDS, f"{place}: there is no slipway {command}"
        known = {*_long_options(command), "--help", "--help-all"}
        for option in re.findall(r"(?<=\s)--[a-z][\w.-]*", text):
            assert option.replace("_", "-") in known, f"{place}: slipway {command} has no {option}"


KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: ([^` ]+)`|` (?:is|=) `((?!config\.)[^` ]+)`)")


def test_values_of_keys_on_the_pages_are_possible() -> None:
    """Read `key: value`, and `key` is `value`. A word in capital letters is a placeholder."""
    validator = jsonschema.Draft202012Validator(manifest_schema())
    found = []
    for page in PAGES:
        for path, *values in KEY.findall(page.read_text()):
            value = "".join(values)
            if find(tuple(path.split("."))) is None or value.isupper():
                continue
            nested: Any = yaml.safe_load(value)
            for part in reversed(path.split(".")):
                nested = {part: nested}
            minimal = {"apiVersion": API_VERSION, "model": {"source": {"path": "m"}}}
            given = nested | minimal | {"model": nested.get("model", {}) | minimal["model"]}  # type: ignore[operator]
            found.append((page.name, path, value, [error.message for error in validator.iter_errors(given)]))
    assert len(found) > 50
    assert [one for one in found if one[3]] == []


def test_every_command_is_in_the_readme() -> None:
    page = (ROOT / "README.md").read_text()
    assert [
        name for name in COMMANDS if f"`slipway {name}" not in page and name not in ("version", "healthcheck")
    ] == []


def test_targets_of_make_on_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def test_manifests_and_files_on_the_pages_exist() -> None:
    named = re.compile(r"`((?:manifests|docs|tests|tools|benchmarks|appliance|engine|kernels|docker)/[\w./-]+\.\w+)`")
    found = [(page.name, path) for page in PAGES for path in named.findall(page.read_text())]
    assert len(found) > 20
    gone = [one for one in found if not (ROOT / one[1]).exists()]
    assert [one for one in gone if not re.search(r"/[A-Z]+\.", one[1])] == [], "DEVICE.json stands for a name"
