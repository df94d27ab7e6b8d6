"""`slipway plan --why KEY`: derivation of a number in the plan, step by step."""

import difflib

from appliance.config.keys import find
from appliance.config.spelling import spell
from appliance.planning.derivation import Account, Step, number
from appliance.planning.memory import spell_bytes
from appliance.planning.plan import Effective, Plan

# Names that an operator may use, and the account of each.
NAMES = {
    "kv_cache": "kv",
    "cache": "kv",
    "memory": "budget",
    "requests": "concurrency",
    "prompt": "prefill",
    "tower": "towers",
    "disk": "load",
    "blocks": "block",
    "activations": "workspace",
    "tables": "workspace",
    "process": "workspace",
    "hardware.kv_cache_memory": "kv",
    "hardware.memory_share": "budget",
}


def explain(plan: Plan, key: str) -> tuple[str, bool]:
    """Return the explanation and True, or a message with the valid names and False."""
    accounts = {account.key: account for account in (*plan.memory.accounts, *plan.estimate.accounts)}
    name = key.strip().lower().replace("-", "_").replace(" ", "_")
    effective = next((one for one in plan.effective if one.key == key or one.key.endswith(f".{name}")), None)
    wanted = NAMES.get(effective.key if effective else "") or NAMES.get(name, name)
    texts = [_account(accounts[one]) for one in _chosen(wanted, accounts)]
    if name == "context":
        texts = []
        effective = next(one for one in plan.effective if one.key == "model.max_context")
    if effective is not None:
        texts.insert(0, _key(effective))
        if effective.key == "model.max_context":
            texts += [_account(accounts[one]) for one in ("context", "kv", "concurrency")]
    if texts:
        return "\n\n".join(texts), True
    names = list(dict.fromkeys(one.split(":")[0] for one in accounts))
    keys = [one.key for one in plan.effective]
    close = difflib.get_close_matches(name, [*names, *NAMES, *keys], 1, 0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"--why {key}: unknown number; {meant}available: {', '.join(names)}, and every key of the manifest", False


def _chosen(wanted: str, accounts: dict[str, Account]) -> list[str]:
    """Return the account of this name, or all accounts of its family: decode has one per batch size."""
    return [key for key in accounts if key == wanted or key.startswith(f"{wanted}:")]


def _key(effective: Effective) -> str:
    key = find(tuple(effective.key.split(".")))
    form = key.form if key else ""
    value, text = spell(effective.value, form), key.text if key else ""
    became = f" → {spell(effective.resolved, form)}: {effective.reason}" if effective.reason else ""
    return f"{effective.key} = {value}{became}\n  from {effective.origin}. {' '.join(text.split())}"


def _account(account: Account) -> str:
    lines = [f"{account.key}: {account.meaning}"]
    lines += [f"  {_step(step)}" for step in account.steps]
    added = [step for step in account.steps if step.added]
    if len(added) > 1:
        lines.append(f"  total = {_value(account.total, account.unit)}")
    return "\n".join(lines)


def _step(step: Step) -> str:
    value = _value(step.value, step.unit)
    if step.formula == number(step.value):
        return f"{step.name} = {value}"
    return f"{step.name} = {step.formula} = {value}"


def _value(value: float, unit: str) -> str:
    """Format a value with its unit. Large byte counts are followed by a rounded value, such as GiB."""
    if unit == "B":
        text = f"{value:,.0f} B"
        return f"{text} ({spell_bytes(value)})" if value >= 2**20 else text
    if unit == "s":
        return f"{value:.4g} s"
    if unit == "tokens/s":
        return f"{value:,.1f} tokens/s"
    return f"{number(value)} {unit}"
