"""Write docs/compatibility.md from the rules in appliance/constraints: permitted combinations of keys, and reasons."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.config.keys import find  # noqa: E402
from appliance.config.spelling import spell  # noqa: E402
from appliance.constraints.rule import Rule  # noqa: E402
from appliance.constraints.rules import RULES  # noqa: E402
from appliance.constraints.table import TABLES, Table, cells  # noqa: E402
from appliance.constraints.unused_keys import ANY, UNUSED_KEYS, UnusedKeys  # noqa: E402
from appliance.constraints.variables import VARIABLES  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Compatibility

<!-- made by tools/compatibility_page.py from appliance/constraints; a test keeps it so -->

Look up which manifest keys, models and devices can be combined, and the values that `auto` selects. `slipway check`
checks a manifest with the rules below before anything starts. An impossible combination is refused with a minimal set
of conflicting keys, their locations, the reasons, and for each key the values that would resolve the conflict:

```
m.yaml:6:13: quantization.kv_cache: fp8 cannot be combined with hardware.device: cpu (m.yaml:4:11): only Triton kernels
support an fp8 KV cache; Triton kernels require a GPU; use auto, float32, bfloat16, float16 or int8, or
hardware.device: auto or cuda
```

`slipway plan` prints the value of each `auto` and the reason: its preference, or the rule that excludes the preference.

In the tables, "yes" means that the combination starts and generates; otherwise the cell names the [rule](#rules) that
refuses it. "compiled" is any of the compiled kernels of a CPU (`amx`, `avx512bf16`, `avx512`, `avxvnni`, `avx2`,
`neon`, `base`); `amx` and `avx512bf16` also support `model.dtype: bfloat16`.
`tests/appliance/constraints/test_cells.py` tests every cell: permitted combinations run on a tiny model, others are
refused, and an engine that is forced to use them fails.
"""

RULES_HEAD = """
## Rules

Each rule is declared in the file of its subject in `appliance/constraints`. "by choice": a forced engine would start,
but would ignore the request or perform badly.

| rule | connects | requirement |
|---|---|---|
"""

IDLE_HEAD = """
## Keys without an effect

Keys that have no effect for a model are refused at their location. In an extended file, which other manifests may
share, they are a warning. `auto`, null and the values in parentheses are always accepted.

| models | keys | reason |
|---|---|---|
"""

AUTO_HEAD = """
## Preferences of `auto`

Keys are resolved in this order; each takes its first value that the rules permit with the earlier ones. To satisfy
another key, `auto` never gives up a GPU or its Triton kernels and never reduces the number of bits: such a manifest is
refused with the values to write instead.

| key | preferred values of `auto` |
|---|---|
"""


def compatibility_page() -> str:
    """Return the page as text."""
    rules = [_rule(rule) for rule in RULES if _is_served(rule)]
    return "".join(
        [
            HEAD,
            *map(_table, TABLES),
            RULES_HEAD,
            *rules,
            IDLE_HEAD,
            *map(_idle, UNUSED_KEYS),
            AUTO_HEAD,
            *_preferences(),
        ]
    )


def _idle(idle: UnusedKeys) -> str:
    return f"| {idle.models} | {', '.join(_may(key, so) for key, so in idle.keys.items())} | {idle.because} |\n"


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
    """Return true if the manifest has all keys of the rule."""
    return all(find(tuple(_key(name).split("."))) is not None for name in rule.keys)


def _key(name: str) -> str:
    return next(variable.key for variable in VARIABLES if variable.name == name)


def _rule(rule: Rule) -> str:
    ties = ", ".join([*(f"`{_key(name)}`" for name in rule.keys), *_facts(rule)])
    return f"| `{rule.name}` | {ties} | {rule.text}{' (by choice)' if rule.chosen else ''} |\n"


def _facts(rule: Rule) -> list[str]:
    """Return the facts of a rule: checkpoint, machine, memory."""
    kinds = dict.fromkeys(fact.partition(".")[0] for fact in rule.facts)
    return [{"model": "the checkpoint", "machine": "the machine", "lacks": "the memory"}[kind] for kind in kinds]


if __name__ == "__main__":
    write_pages(__doc__, {"compatibility.md": compatibility_page})
