"""`slipway render TARGET MANIFEST`: print deployment files that follow from the plan."""

import argparse
from typing import Any

import yaml

from appliance.config.settings import Given, Settings, load
from appliance.deployment.compose import compose
from appliance.deployment.kubernetes import kubernetes
from appliance.deployment.service import Deployment, deployment
from appliance.planning.plan import Plan


class _Dumper(yaml.SafeDumper):
    """Dumper that writes texts of several lines as blocks, and nothing as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _kubernetes(one: Deployment) -> list[dict[str, Any]]:
    return kubernetes(one)


def _compose(one: Deployment) -> list[dict[str, Any]]:
    return [compose(one)]


TARGETS = {"compose": _compose, "kubernetes": _kubernetes}


def render(options: argparse.Namespace, given: Given, plan: Plan) -> str:
    """Return the files as YAML documents. Raise Refused for values that cannot be rendered."""
    settings: Settings = load(given)
    one = deployment(settings, plan, name=options.name, image=options.image)
    documents = TARGETS[options.target](one)
    head = f"# Written by `slipway render {options.target} {options.manifest.name}`; {_planned(plan)}.\n"
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _planned(plan: Plan) -> str:
    return f"planned for {plan.machine.described or 'the machine that ran it'}"
