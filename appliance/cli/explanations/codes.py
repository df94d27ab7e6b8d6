"""Explanations of exit codes, kinds of manifest problems, compatibility rules and environment variables."""

from appliance.cli.explanations.layout import field
from appliance.config import exits
from appliance.config.codes import CODES
from appliance.config.variables import VARIABLES, values
from appliance.constraints import variables
from appliance.constraints.rules import RULES
from appliance.observability.alerts import ALERTS
from appliance.supervisor.causes import CAUSES


def explain_exit(word: str) -> str:
    for one in exits.EXITS:
        if word.lower() in (str(one.number), one.name):
            head = f"exit code {one.number}, {one.name}"
            return "\n".join([head, field("cause", one.cause), field("cure", one.cure)])
    return ""


def explain_cause(word: str) -> str:
    """Explain a cause of an exit, by its name in messages and crash bundles."""
    found = next((one for one in CAUSES if one.name == word.lower()), None)
    if found is None:
        return ""
    head = f"{found.name}, a crash cause"
    return "\n".join([head, field("meaning", found.meaning), field("cure", found.cure)])


def explain_alert(word: str) -> str:
    """Explain an alert, with the actions of an operator."""
    found = next((alert for alert in ALERTS if alert.name.lower() == word.lower()), None)
    if found is None:
        return ""
    head = f"{found.name}, an alert ({found.severity})"
    actions = [field(f"action {number}", text) for number, text in enumerate(found.actions, 1)]
    return "\n".join([head, field("meaning", found.meaning), *actions, field("see also", "docs/alerts.md")])


def explain_problem(word: str) -> str:
    if word.lower() not in CODES:
        return ""
    meaning, cure = CODES[word.lower()]
    head = f"{word.lower()}, a kind of manifest problem"
    return "\n".join([head, field("meaning", meaning), field("cure", cure)])


def explain_rule(word: str) -> str:
    """Explain a rule by its name in docs/compatibility.md."""
    found = next((one for one in RULES if one.name == word.lower()), None)
    if found is None:
        return ""
    tied = [one.key for one in variables.VARIABLES if one.name in found.keys]
    kinds = dict.fromkeys(fact.partition(".")[0] for fact in found.facts)
    tied += [{"model": "the checkpoint", "machine": "the machine", "lacks": "the memory"}[kind] for kind in kinds]
    lines = [f"{found.name}, a compatibility rule", field("says", found.text), field("ties", ", ".join(tied))]
    if found.chosen:
        lines.append(
            field("by choice", "An engine that ignores the rule would start but return wrong results or run slowly.")
        )
    return "\n".join([*lines, field("see also", "docs/compatibility.md")])


def explain_variable(word: str) -> str:
    found = next((one for one in VARIABLES if one.name == word.upper()), None)
    if found is None:
        return ""
    lines = [f"{found.name}, an environment variable", field("meaning", found.text), field("value", values(found))]
    return "\n".join([*lines, *([field("default", found.default)] if found.default else [])])
