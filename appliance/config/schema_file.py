"""JSON Schema of the manifest (draft 2020-12) for editors, and its documentation page, from the same schema."""

import copy
import json
from typing import Any

from appliance.config.effects import effect
from appliance.config.effects_format import in_short
from appliance.config.keys import PROFILES, Key, keys, schema, spell
from appliance.config.variables import variables_table

INTERPOLATED = {"type": "string", "pattern": r"\$\{"}
NOTES: dict[str, Any] = {"^x-": {}}


def manifest_schema() -> dict[str, Any]:
    """Return the schema with the keywords that editors use.

    The formats size and duration are custom annotations. Required keys are required only in a file that has an
    apiVersion and does not extend another file.
    """
    value = copy.deepcopy(schema())
    sections = value["$defs"]
    required = _take_required(value, sections)
    # pydantic constrains the names of a mapping, but allows other names.
    for name in ("secrets", "overlays", "variables"):
        value["properties"][name]["additionalProperties"] = False
    part = {**value, "title": "Overlay", "properties": _but(value["properties"], "extends", "overlays")}
    kept = {**part, "title": "ProfileValues", "properties": _but(part["properties"], "variables")}
    kept["properties"] = {**kept["properties"], "hardware": {"$ref": "#/$defs/Hardware"}}
    plain = {**sections["HardwareFile"], "properties": _but(sections["HardwareFile"]["properties"], "profiles")}
    sections |= {"Overlay": _but(part, "$defs"), "ProfileValues": _but(kept, "$defs"), "Hardware": plain}
    (pattern,) = value["properties"]["overlays"]["patternProperties"]
    value["properties"]["overlays"]["patternProperties"] = {pattern: {"$ref": "#/$defs/Overlay"}}
    text = sections["Profile"]["properties"]["set"]["description"]
    sections["Profile"]["properties"]["set"] = {"$ref": "#/$defs/ProfileValues", "description": text}
    for section in (value, *sections.values()):
        section["patternProperties"] = NOTES
        section["properties"] = {name: _interpolated(name, node) for name, node in section["properties"].items()}
    value["anyOf"] = [{"required": ["extends"]}, {"not": {"required": ["apiVersion"]}}, required]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Slipway manifest, version 2"}
    return {**head, **_but(value, "title")}


def _but(node: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: part for name, part in node.items() if name not in names}


def _take_required(node: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Remove `required` from a section and its subsections, and return it as a single condition."""
    wanted: dict[str, Any] = {}
    if names := node.pop("required", None):
        wanted["required"] = names
    for name, child in node["properties"].items():
        reference = child.get("$ref", "").removeprefix("#/$defs/")
        if reference and (inner := _take_required(sections[reference], sections)):
            wanted.setdefault("properties", {})[name] = inner
    return wanted


def _interpolated(name: str, node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key that also accepts a text with ${…}, unless it accepts any text already."""
    items = node.get("items", {})
    if node.get("type") == "array" and items.get("type") in ("integer", "number"):
        return {**node, "items": {"anyOf": [items, INTERPOLATED]}}
    if name == "apiVersion" or "$ref" in node or node.get("type") in ("array", "object"):
        return node
    if "anyOf" in node:
        scalars = [one for one in node["anyOf"] if "$ref" not in one and one.get("type") not in ("array", "object")]
        return {**node, "anyOf": [*node["anyOf"], INTERPOLATED]} if scalars and not _takes_text(scalars) else node
    if _takes_text([node]):
        return node
    outer = ("title", "description", "default", "format", "examples")
    inner = {key: part for key, part in node.items() if key not in outer}
    return {**{key: part for key, part in node.items() if key in outer}, "anyOf": [inner, INTERPOLATED]}


def _takes_text(nodes: list[dict[str, Any]]) -> bool:
    return any(node.get("type") == "string" and not {"pattern", "enum", "const"} & node.keys() for node in nodes)


def schema_text() -> str:
    return json.dumps(manifest_schema(), indent=1, ensure_ascii=False) + "\n"


def manifest_page() -> str:
    """Return docs/manifest.md: every key with type, default and meaning."""
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
    head = ["| key | value | default | example | a change | meaning |", "|---|---|---|---|---|---|"]
    return head + [
        f"| `{row.path[-1]}` | {_cell(row.allowed)} | {_cell(row.default_text())} | {_cell(_examples(row))} | "
        f"{_cell(_change(row))} | {_cell(row.text)} |"
        for row in rows
    ]


def _change(key: Key) -> str:
    return "that of the keys below set" if key.path[:2] == PROFILES else in_short(effect(key.name))


def _examples(key: Key) -> str:
    return ", ".join(f"`{spell(value, key.form)}`" for value in key.examples)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGE_HEAD = """\
# The manifest

<!-- made by tools/manifest_page.py from appliance/config/manifest.py; a test keeps it so -->

One YAML file describes one service. The least that works:

```yaml
apiVersion: slipway/v2
model: {source: {path: /models/Qwen3-0.6B}}
```

- `slipway check M` says what is wrong, with file, line and column, and `--fix` corrects it; `slipway plan M` says what
  would run and where each value comes from; `slipway schema` prints the JSON Schema for editors.
- Precedence, highest first; mappings are merged key by key, everything else is replaced:

  | source | written as |
  |---|---|
  | the command line | `--endpoints.port 9000`, `--set endpoints.port=9000` |
  | the environment | `SLIPWAY__ENDPOINTS__PORT=9000` |
  | overlays | `--overlay dev`, `--overlay site.yaml`, `SLIPWAY_OVERLAY=dev,site.yaml`; of several the last wins |
  | the manifest | the file itself |
  | `extends` | the files it starts from; of several the last wins |
  | a hardware profile | the first of `hardware.profiles` that matches the machine |
  | defaults | the tables below |

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
- The column "a change" says what a changed value entails: what must start again (`reload`: nothing, `slipway reload`
  changes it in a running service), whether the same request may get another reply, and what is made anew.
  `slipway diff A B` says it for two manifests, with the numbers of both plans; `slipway explain KEY` for one key.
- `auto` is settled when the service starts; `slipway plan` says to what, and why.
- Relative paths start at the folder of the file that they are written in, those of variables and flags at the
  manifest's.
- `apiVersion` must be given and is `slipway/v2`. Files of `slipway/v1` are still read, with a warning;
  `slipway upgrade --write FILE` rewrites them and keeps comments, order and quotes.
- Keys that start with `x-` are free for notes of your own in any section; nothing reads them.

- [sources.md](sources.md) tells every kind of `model.source`.
## Layers

Several files can share what they have in common, and one file can serve several occasions and machines:

```yaml
apiVersion: slipway/v2
extends: base.yaml
variables: {context: 8192}
model:
  source: {path: "${CHECKPOINTS:-/models}/Qwen3-8B"}
  max_context: ${var.context}
overlays:
  dev: {observability: {log_level: debug}, variables: {context: 2048}}
hardware:
  profiles:
    - name: h200
      match: {gpu: H200, memory: ">=140GB"}
      set: {engine: {scheduling: {max_running: 512}}}
    - name: cpu
      match: {device: cpu, cores: ">=16"}
      set: {quantization: {weights: int8}}
```

- `slipway plan` prints the files, overlays and profile that had a part, why the profiles before it do not match, and
  with each value where it is written: `base.yaml:4:12`, `m.yaml:8:42 (overlay dev)`, `m.yaml:13:50 (profile h200)`.
- A mistake is told at the place where it is written, with the way to that file: `base.yaml:3:9: …; extended by
  m.yaml:2:10`. Overlays and profiles are checked as well when they are not taken. `--fix` changes the file where the
  value was written, be it the value of a variable or a default; what the environment gives it leaves alone, and says
  what to set.
- An overlay may have any key but `extends` and `overlays`, a file of it any but `overlays`. `--overlay` replaces what
  `SLIPWAY_OVERLAY` asks for. A name with a slash or the ending `.yaml` or `.yml` is a file.
- A profile matches when every key of its `match` does. Ranges are comparisons, such as `">=2"` or `">=8 <64"`, and
  need quotes; a number alone means just that. Of several GPUs each must fit `gpu`, `memory` and `compute_capability`.
- `${NAME}` is a variable of the environment, `${var.name}` one of `variables`; `${NAME:-text}` has a default for one
  that is not set or empty, in which further `${…}` may stand. `$$` is one dollar. Within `{…}` and `[…]` of YAML it
  needs quotes: `{port: "${PORT}"}`.
- A value that is nothing but one `${…}` has the type that its text has in YAML, so `${PORT:-8000}` is a number; keys
  that take only text get text. Within a longer text it is text.
- Manifests have limits: 256 KiB and 4,000 values a file, 65,536 characters an interpolated text, 1,048,576 all of them
  together, 100 files. Messages show nothing of a file without any key of a manifest.
- Values of files are interpolated, keys are not, nor what flags and `SLIPWAY__…` give. In `extends` only the
  environment is known.
- A name that ends with `KEY`, `TOKEN`, `SECRET` or `PASSWORD` (capital or small) is refused in `${…}` and in
  `variables`: a secret is named below `secrets` and never becomes a value. So none is in a plan, a log or a generated
  file.
- Into which files a manifest is split, and what is variable in it, does not count in the hashes of its configuration.
- All files of one manifest have the same `apiVersion`, and one of them must have it. Those that are no manifest by
  themselves, such as `base.yaml` above, best leave it out: editors then miss nothing in them.
"""

VARIABLES_HEAD = """\
## Environment variables

`SLIPWAY__SECTION__KEY` sets a key: `SLIPWAY__ENDPOINTS__PORT=9000`. Beside those, and the variables that `secrets`
names, Slipway reads:
"""
