"""Writes docs/compatibility.md from the rules in appliance/constraints: what goes together, and why other things do
not."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.config.keys import find, spell  # noqa: E402
from appliance.constraints.rule import Rule  # noqa: E402
from appliance.constraints.rules import RULES  # noqa: E402
from appliance.constraints.table import TABLES, Table, cells  # noqa: E402
from appliance.constraints.unused_keys import ANY, IDLE, Idle  # noqa: E402
from appliance.constraints.variables import VARIABLES  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# What goes together

<!-- made by tools/compatibility_page.py from appliance/constraints; a test keeps it so -->

`slipway check` proves a manifest by the rules below before anything starts. What cannot work is refused with the least
set of keys that are in conflict, the places where they were written, the reasons, and for each key the values with
which the rest would go together:

```
m.yaml:6:13: quantization.kv_cache: fp8 cannot go with hardware.device: cpu (m.yaml:4:11): only Triton kernels read fp8
pages; Triton kernels are for a GPU; use auto, float32, bfloat16, float16 or int8, or hardware.device: auto or cuda
```

`slipway plan` prints what each `auto` became and why: what it prefers, or the rule that excludes that.

In the tables, "yes" starts and generates; a name is that of the [rule](#rules) that refuses. "compiled" is any of the
compiled kernels of a CPU (`amx`, `avx512`, `avxvnni`, `avx2`, `neon`, `base`). Every cell is tried by
`tests/appliance/constraints/test_cells.py`: what is legal runs on a tiny model, what is not is refused, and an engine
that is forced to it fails.
"""

RULES_HEAD = """
## Rules

A rule stands beside its subject in `appliance/constraints`. "by choice": an engine that was forced would start all the
same, but not do what was asked, or not do it well.

| rule | ties | says |
|---|---|---|
"""

IDLE_HEAD = """
## Keys without an effect

Written for a model for which they do nothing, these keys are refused, at the place where they were written; in a file
that the manifest extends, which others may share, they are a warning. `auto`, null and the values in brackets say
what is so, and may stand.

| of | keys | because |
|---|---|---|
"""

AUTO_HEAD = """
## What `auto` prefers

In this order, each with regard to those before it; a value is taken if the rules allow it. For the sake of another key
`auto` neither leaves a GPU or its Triton kernels, nor takes fewer bits: that is refused, and what to write is told.

| key | what `auto` takes |
|---|---|
"""


def compatibility_page() -> str:
    """The page as text."""
    rules = [_rule(rule) for rule in RULES if _is_served(rule)]
    return "".join(
        [HEAD, *map(_table, TABLES), RULES_HEAD, *rules, IDLE_HEAD, *map(_idle, IDLE), AUTO_HEAD, *_preferences()]
    )


def _idle(idle: Idle) -> str:
    return f"| {idle.whose} | {', '.join(_may(key, so) for key, so in idle.keys.items())} | {idle.because} |\n"


def _may(key: str, so: object) -> str:
    if so is ANY:
        return f"`{key}`"
    form = found.form if (found := find(tuple(key.split(".")))) else ""
    return f"`{key}` ({spell(so, form)})"


def _preferences() -> list[str]:
    known = [one for one in VARIABLES if not one.sole and find(tuple(one.key.split("."))) is not None]
    return [f"| `{one.key}` | {one.prefers} |\n" for one in known]


def _table(table: Table) -> str:
    lines = [f"\n## {table.title}\n\n{table.text}\n\n"]
    lines.append(f"| | {' | '.join(column.label for column in table.columns)} |\n")
    lines.append("|---|" + "---|" * len(table.columns) + "\n")
    found = list(cells(table))
    for row in table.rows:
        said = [", ".join(f"`{rule.name}`" for rule in cell.broken) or "yes" for cell in found if cell.row is row]
        lines.append(f"| {row.label} | {' | '.join(said)} |\n")
    return "".join(lines)


def _is_served(rule: Rule) -> bool:
    """Whether the manifest has the keys that it ties."""
    return all(find(tuple(_key(name).split("."))) is not None for name in rule.keys)


def _key(name: str) -> str:
    return next(variable.key for variable in VARIABLES if variable.name == name)


def _rule(rule: Rule) -> str:
    ties = ", ".join([*(f"`{_key(name)}`" for name in rule.keys), *_facts(rule)])
    return f"| `{rule.name}` | {ties} | {rule.text}{' (by choice)' if rule.chosen else ''} |\n"


def _facts(rule: Rule) -> list[str]:
    """The checkpoint, the machine."""
    kinds = dict.fromkeys(fact.partition(".")[0] for fact in rule.facts)
    return [{"model": "the checkpoint", "machine": "the machine", "lacks": "the memory"}[kind] for kind in kinds]


if __name__ == "__main__":
    write_pages(__doc__, {"compatibility.md": compatibility_page})
