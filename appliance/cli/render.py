"""`slipway render TARGET MANIFEST`: print or write deployment files that follow from the plan."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from appliance.config.problems import Problem, Refused
from appliance.config.settings import Given, Settings, load
from appliance.config.yaml_loader import Place
from appliance.deployment import azureml, sagemaker, systemd, vertex
from appliance.deployment.compose import compose
from appliance.deployment.grafana import grafana
from appliance.deployment.helm import helm
from appliance.deployment.kserve import kserve
from appliance.deployment.kubernetes import kubernetes
from appliance.deployment.leaderworkerset import leaderworkerset
from appliance.deployment.prometheus_rules import bucket_bounds, prometheus_rules, thresholds
from appliance.deployment.ray import ray
from appliance.deployment.service import CONTAINER, Deployment, Layout, deployment, deployment_name
from appliance.observability.rules import LATENCIES, Objectives
from appliance.planning.plan import Plan


class _Dumper(yaml.SafeDumper):
    """Dumper that writes texts of several lines as blocks, and nothing as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


IMAGE = "slipway:latest"


@dataclass(frozen=True)
class Job:
    """One call of the command."""

    options: argparse.Namespace
    settings: Settings
    plan: Plan
    name: str

    def deployment(self, layout: Layout = CONTAINER) -> Deployment:
        return deployment(self.settings, self.plan, name=self.name, image=self.options.image or IMAGE, layout=layout)

    def yaml(self, *documents: dict[str, Any]) -> str:
        """Return YAML documents below a line with their origin."""
        planned = self.plan.machine.described or "the machine that ran it"
        words = f"slipway render {self.options.target} {self.options.manifest.name}"
        head = f"# Written by `{words}`; planned for {planned}.\n"
        return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _objects(render: Callable[[Deployment], list[dict[str, Any]]]) -> Callable[[Job], str]:
    return lambda job: job.yaml(*render(job.deployment()))


def _json(files: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in files.items()}


def _sagemaker(job: Job) -> dict[str, str]:
    options = job.options
    given = {"model_uri": options.model_uri, "role": options.role, "instance_type": options.instance_type}
    return _json(sagemaker.sagemaker(job.deployment(sagemaker.LAYOUT), job.settings, job.plan, **given))


def _vertex(job: Job) -> dict[str, str]:
    options = job.options
    given = {"model_uri": options.model_uri, "parent": options.parent, "instance_type": options.instance_type}
    return _json(vertex.vertex(job.deployment(vertex.LAYOUT), job.settings, job.plan, **given))


def _azureml(job: Job) -> dict[str, str]:
    one = job.deployment(azureml.LAYOUT)
    files = azureml.azureml(one, job.settings, job.plan, instance_type=job.options.instance_type)
    return {name: job.yaml(value) for name, value in files.items()}


def _objectives(options: argparse.Namespace) -> Objectives:
    """Return the objectives of the command line. Raise Refused for a time between the bounds of buckets."""
    default = Objectives()
    share = default.share if options.objective is None else options.objective
    if not 0 < share < 1:
        _refuse("--objective", f"{share:g} is not a share between 0 and 1, such as 0.99")
    return Objectives(
        _bound("--first-token", options.first_token, default.first_token_s, "time_to_first_token"),
        _bound("--token", options.token, default.token_s, "inter_token_latency"),
        share,
    )


def _bound(option: str, given: float | None, default: float, name: str) -> float:
    bounds = bucket_bounds(LATENCIES[name])
    if given is not None and given not in bounds:
        near = sorted(sorted(bounds, key=lambda bound: abs(bound - given))[:3])
        _refuse(
            option, f"{given:g} is not a bound of the histogram's buckets; use {', '.join(map('{:g}'.format, near))}"
        )
    return default if given is None else given


def _rules(job: Job) -> str:
    return job.yaml(prometheus_rules(thresholds(job.plan, _objectives(job.options))))


def _dashboard(job: Job) -> str:
    return json.dumps(grafana(job.name, _objectives(job.options)), indent=2) + "\n"


@dataclass(frozen=True)
class Target:
    """A kind of deployment files. `render` returns one text, or texts by file name, which need a folder."""

    render: Callable[[Job], str | dict[str, str]]
    options: tuple[str, ...] = ("image",)
    """Options that have an effect."""
    suffix: str = "yaml"
    """Suffix of the file, if there is one file."""


_OBJECTIVES = ("first_token", "token", "objective")
_OPTIONS = ("image", "model_uri", "role", "parent", "instance_type", *_OBJECTIVES)
TARGETS = {
    "compose": Target(_objects(lambda one: [compose(one)])),
    "kubernetes": Target(_objects(kubernetes)),
    "helm": Target(lambda job: helm(job.deployment())),
    "kserve": Target(_objects(kserve)),
    "leaderworkerset": Target(_objects(leaderworkerset)),
    "ray": Target(_objects(ray)),
    "sagemaker": Target(_sagemaker, ("image", "model_uri", "role", "instance_type")),
    "vertex": Target(_vertex, ("image", "model_uri", "parent", "instance_type")),
    "azureml": Target(_azureml, ("image", "instance_type")),
    "systemd": Target(lambda job: systemd.systemd(job.deployment(systemd.layout(job.name))), ()),
    "prometheus-rules": Target(_rules, _OBJECTIVES),
    "grafana": Target(_dashboard, _OBJECTIVES, "json"),
}


def render(options: argparse.Namespace, given: Given, plan: Plan) -> str:
    """Return the files as text, or write them and return their names. Raise Refused for values that cannot be
    rendered."""
    target = TARGETS[options.target]
    _check_options(options, target)
    if not re.fullmatch(r"([a-z]([a-z0-9-]{0,51}[a-z0-9])?)?", options.name):
        _refuse("--name", f"{options.name} is not a name of at most 53 lower-case letters, digits and dashes")
    content = target.render(Job(options, load(given), plan, deployment_name(options.name, plan)))
    if isinstance(content, str) and options.output is None:
        return content
    if options.output is None:
        _refuse("--output", f"{options.target} has several files; name a folder for them")
    files = {f"{options.target}.{target.suffix}": content} if isinstance(content, str) else content
    return "".join(f"{_write(options.output / name, text)}\n" for name, text in files.items())


def _check_options(options: argparse.Namespace, target: Target) -> None:
    """Raise Refused for an option without an effect on the target."""
    for name in _OPTIONS:
        if getattr(options, name) not in ("", None) and name not in target.options:
            _refuse(f"--{name.replace('_', '-')}", f"has no effect on {options.target}")


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        _refuse("--output", f"{path} cannot be written: {error.strerror}")
    return path


def _refuse(option: str, message: str) -> None:
    raise Refused([Problem(Place(option), "", message)])
