"""The manifest's JSON Schema (draft 2020-12) for editors, and its page in the documentation, from the one schema."""

import copy
import json
from typing import Any

from appliance.declare.keys import Key, keys, schema
from appliance.declare.variables import variables_table


def manifest_schema() -> dict[str, Any]:
    """The schema with the keywords that editors look for. `format` size and duration are annotations of our own."""
    value = copy.deepcopy(schema())
    # pydantic says which names a mapping takes, but leaves other names open.
    value["properties"]["secrets"]["additionalProperties"] = False
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Slipway manifest, version 2"}
    return {**head, **{name: part for name, part in value.items() if name != "title"}}


def schema_text() -> str:
    return json.dumps(manifest_schema(), indent=1, ensure_ascii=False) + "\n"


def manifest_page() -> str:
    """docs/manifest.md: every key with type, default and meaning."""
    lines = [PAGE_HEAD]
    for key in keys().values():
        if key.kind == "value":
            continue
        below = [other for other in keys().values() if other.path[:-1] == key.path and other.kind == "value"]
        lines += [f"## `{key.name}`", "", key.text, ""]
        lines += [*_table(below), ""] if below else []
    lines += [VARIABLES_HEAD, *variables_table()]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[Key]) -> list[str]:
    head = ["| key | value | default | meaning |", "|---|---|---|---|"]
    return head + [
        f"| `{row.path[-1]}` | {_cell(row.allowed)} | {_cell(row.default_text())} | {_cell(row.text)} |" for row in rows
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGE_HEAD = """\
# The manifest

<!-- made by tools/manifest_page.py from appliance/manifest.py; a test keeps it so -->

One YAML file describes one service. The least that works:

```yaml
apiVersion: slipway/v2
model: {source: {path: /models/Qwen3-0.6B}}
```

- `slipway check M` says what is wrong, with file, line and column, and `--fix` corrects it; `slipway plan M` says what
  would run and where each value comes from; `slipway schema` prints the JSON Schema for editors.
- Precedence, highest first: the command line, environment `SLIPWAY__SECTION__KEY`, the manifest, the defaults below.
  Mappings are merged key by key, everything else is replaced.
- On the command line of `serve`, `plan` and `check` every key is a flag: `--engine.cache.block-tokens 32` (dashes and
  underscores are one), the same as `--set engine.cache.block_tokens=32`; of two for one key the later wins.
  `slipway serve --help` shows the few with a short form (`-p`, `-H`, `-c`, `-dp`), `--help-all` every one.
- Values of flags, of `--set` and of variables are scalars as YAML reads them; `{…}`, `[…]` and quotes are YAML flow
  style, so JSON works: `--set engine='{cache: {block_tokens: 32}}'`.
- Unknown keys, wrong types and duplicate keys are errors. So is what YAML 1.1 and 1.2 read differently: unquoted `yes`,
  `no`, `on`, `off`, `y`, `n` (write `true` or `false`, or quote a text; a key that has the word among its values takes
  it), `010`, `0x10`, `1_000`, `1e3`, `12:30`, `2026-01-01`; and anchors, aliases, merge keys, tags, tabs as
  indentation.
- Sizes are numbers with `B`, `KiB`, `MiB`, `GiB`, `TiB`, `KB`, `MB`, `GB` or `TB` (a bare number counts bytes);
  durations are numbers with `ms`, `s`, `m` or `h` (a bare number counts seconds).
- `auto` is settled when the service starts; `slipway plan` says to what, and why.
- Relative paths start at the manifest's folder.

`apiVersion` must be given and is `slipway/v2`. Files of `slipway/v1` are still read, with a warning;
`slipway upgrade --write FILE` rewrites them and keeps comments, order and quotes.
[sources.md](sources.md) tells every kind of `model.source`.
"""

VARIABLES_HEAD = """\
## Environment variables

`SLIPWAY__SECTION__KEY` sets a key: `SLIPWAY__ENDPOINTS__PORT=9000`. Beside those, and the variables that `secrets`
names, Slipway reads:
"""
