"""A Helm chart with the Kubernetes objects of a deployment.

Values computed from the plan are defaults in values.yaml, from where the templates insert them as JSON, which is YAML
in one line. The manifest is a file of the chart: a change restarts the pods by the annotation with its checksum.
"""

import json
import re
from dataclasses import replace
from typing import Any

import yaml

from appliance.config.version import __version__
from appliance.deployment.kubernetes import Object, kubernetes
from appliance.deployment.service import Deployment

_RELEASE = "{{ .Release.Name }}"
_MARK = re.compile(r"'@@(.*?)@@'")  # an expression is quoted by YAML because of the @ at its start
_NOTES = """\
Slipway starts; the first start may take {startup} s. Wait for it:

  kubectl --namespace {{{{ .Release.Namespace }}}} rollout status deployment/{{{{ .Release.Name }}}}
  kubectl --namespace {{{{ .Release.Namespace }}}} port-forward service/{{{{ .Release.Name }}}} {port}:{port}
"""


def helm(one: Deployment) -> dict[str, str]:
    """Return the files of the chart by their paths."""
    objects = kubernetes(replace(one, name=_RELEASE))
    values = _values(one)
    for each in objects:
        _insert_values(each, one, values)
    chart = {
        "apiVersion": "v2",
        "name": one.name,
        "description": "One large language model, served by Slipway",
        "type": "application",
        "version": "0.1.0",
        "appVersion": __version__,
    }
    templates = {f"templates/{_file_name(each, one)}.yaml": _template(each) for each in objects}
    return {
        "Chart.yaml": _dump(chart),
        "values.yaml": _dump(values),
        "values.schema.json": json.dumps(_values_schema(values), indent=2) + "\n",
        **{f"files/{name}": text for name, text in one.files.items()},
        **templates,
        "templates/NOTES.txt": _NOTES.format(startup=one.startup, port=one.port),
    }


def _values(one: Deployment) -> dict[str, Any]:
    (container,) = kubernetes(one)[-2]["spec"]["template"]["spec"]["containers"]
    values: dict[str, Any] = {
        "image": one.image,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [],
        "resources": container["resources"],
        "service": {"type": "ClusterIP", "annotations": {}},
        "nodeSelector": {},
        "tolerations": [],
        "affinity": {},
    }
    if one.reads_models:
        values["modelsClaim"] = "models"
    if one.data or one.cache:
        values["storageClassName"] = None
    if one.secret_files or one.secret_variables:
        values["secretName"] = f"{one.name}-secrets"
    if one.tls:
        values["tlsSecretName"] = f"{one.name}-tls"
    return values


def _expression(text: str) -> str:
    return f"@@{{{{ {text} }}}}@@"


def _value(path: str) -> str:
    return _expression(f"toJson .Values.{path}")


def _insert_values(each: Object, one: Deployment, values: dict[str, Any]) -> None:
    """Replace parts of an object by expressions that insert values of the chart."""
    match each["kind"]:
        case "ConfigMap":
            each["data"] = {name: _expression(f'.Files.Get "files/{name}" | toJson') for name in one.files}
        case "PersistentVolumeClaim":
            each["spec"]["storageClassName"] = _value("storageClassName")
        case "Service":
            each["metadata"]["annotations"] = _value("service.annotations")
            each["spec"]["type"] = _value("service.type")
        case "Deployment":
            template = each["spec"]["template"]
            digest = _expression('(.Files.Glob "files/*").AsConfig | sha256sum')
            template["metadata"]["annotations"] = {"checksum/files": digest}
            _insert_pod_values(template["spec"], values)


def _insert_pod_values(pod: Object, values: dict[str, Any]) -> None:
    for name in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity"):
        pod[name] = _value(name)
    (container,) = pod["containers"]
    container["image"], container["resources"] = _value("image"), _value("resources")
    container["imagePullPolicy"] = _value("imagePullPolicy")
    for variable in container["env"]:
        if "valueFrom" in variable:
            variable["valueFrom"]["secretKeyRef"]["name"] = _value("secretName")
    for volume in pod["volumes"]:
        match volume["name"]:
            case "models":
                volume["persistentVolumeClaim"]["claimName"] = _value("modelsClaim")
            case "secrets":
                volume["secret"]["secretName"] = _value("secretName")
            case "tls":
                volume["secret"]["secretName"] = _value("tlsSecretName")


def _file_name(each: Object, one: Deployment) -> str:
    suffix = each["metadata"]["name"].removeprefix(_RELEASE)
    return f"{each['kind'].lower()}{suffix}"


def _template(each: Object) -> str:
    return _MARK.sub(lambda found: found[1].replace("''", "'"), _dump(each))


def _values_schema(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of values.yaml, so that helm reports misspelt values."""
    kinds: dict[type, Any] = {str: "string", list: "array", dict: "object"}
    properties = {name: {"type": kinds.get(type(value), ["string", "null"])} for name, value in values.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        # helm adds `global` to the values of every chart.
        "properties": {**properties, "global": {"type": "object"}},
        "additionalProperties": False,
    }


def _dump(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=float("inf"))
