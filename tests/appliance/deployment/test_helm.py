"""The Helm chart: its templates, with values inserted as helm inserts them, are the objects of `render kubernetes`."""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from appliance.deployment.helm import helm
from appliance.deployment.kubernetes import kubernetes
from tests.appliance.deployment.manifests import CPU, deployed, write_demo
from tests.appliance.deployment.objects import check

EXPRESSION = re.compile(r"\{\{ (.*?) \}\}")


def insert(template: str, chart: dict[str, str], values: dict[str, Any]) -> str:
    """Evaluate the expressions that the chart uses. Raise AssertionError for another one."""
    files = {name.removeprefix("files/"): text for name, text in chart.items() if name.startswith("files/")}

    def evaluate(found: re.Match[str]) -> str:
        text = found[1]
        if text in ("$.Release.Name", ".Release.Name"):
            return "m"
        if text == ".Release.Namespace":
            return "default"
        if text == '(.Files.Glob "files/*").AsConfig | sha256sum':
            return sha256(yaml.safe_dump(files).encode()).hexdigest()
        if match := re.fullmatch(r'\.Files\.Get "(.*)" \| toJson', text):
            return json.dumps(chart[match[1]])
        match = re.fullmatch(r"toJson \.Values((\.\w+)+)", text)
        assert match, f"{text} is not an expression that this test evaluates"
        value: Any = values
        for part in match[1].split(".")[1:]:
            value = value[part]
        return json.dumps(value)

    return EXPRESSION.sub(evaluate, template)


def objects(chart: dict[str, str], **values: Any) -> list[dict[str, Any]]:
    given = {**yaml.safe_load(chart["values.yaml"]), **values}
    jsonschema.validate(given, json.loads(chart["values.schema.json"]))
    texts = [text for name, text in chart.items() if name.startswith("templates/") and name.endswith(".yaml")]
    return [yaml.safe_load(insert(text, chart, given)) for text in texts]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_demo(tmp_path, CPU)


def test_objects_with_default_values_are_those_for_kubernetes(manifest: Path) -> None:
    one = deployed(manifest, "cpu:4:16GiB")
    found = objects(helm(one))
    check(found)
    for each in found:  # fields that only the chart has
        match each["kind"]:
            case "Deployment":
                template = each["spec"]["template"]
                assert len(template["metadata"].pop("annotations")["checksum/files"]) == 64
                assert [template["spec"].pop(name) for name in ("imagePullSecrets", "tolerations")] == [[], []]
                assert [template["spec"].pop(name) for name in ("nodeSelector", "affinity")] == [{}, {}]
                assert template["spec"]["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
            case "Service":
                assert each["metadata"].pop("annotations") == {} and each["spec"].pop("type") == "ClusterIP"
            case "PersistentVolumeClaim":
                assert each["spec"].pop("storageClassName") is None
    assert found == kubernetes(one)


def test_values_replace_fields(manifest: Path) -> None:
    chart = helm(deployed(manifest, "cpu:4:16GiB"))
    values = {"image": "registry/slipway:2", "modelsClaim": "weights", "secretName": "keys", "nodeSelector": {"a": "b"}}
    text = json.dumps(objects(chart, **values))
    assert all(json.dumps(value) in text for value in values.values()) and '"claimName": "models"' not in text


def test_misspelt_values_are_refused_by_the_schema(manifest: Path) -> None:
    with pytest.raises(jsonschema.ValidationError, match="imagee"):
        objects(helm(deployed(manifest, "cpu:4:16GiB")), imagee="x")


def test_notes_name_the_release_and_the_port(manifest: Path) -> None:
    chart = helm(deployed(manifest, "cpu:4:16GiB"))
    notes = insert(chart["templates/NOTES.txt"], chart, {})
    assert "port-forward service/m 8100:8100" in notes and "{" not in notes
    described = yaml.safe_load(chart["Chart.yaml"])
    assert described["apiVersion"] == "v2" and re.fullmatch(r"\d+\.\d+\.\d+", described["version"])
