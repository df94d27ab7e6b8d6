"""JSON Schema of the manifest (draft 2020-12) for editors, and its documentation page, from the same schema."""

import copy
import json
from typing import Any

from appliance.config.aliases import other_names
from appliance.config.effects import effect
from appliance.config.effects_format import in_short
from appliance.config.keys import PROFILES, Key, keys, schema
from appliance.config.spelling import spell
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
    if node.get("type") == "array" and (items.get("type") in ("integer", "number") or "pattern" in items):
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
    lines += [VARIABLES_HEAD, *variables_table(), "", NAMES_HEAD, *_names_table()]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[Key]) -> list[str]:
    head = ["| key | value | default | example | a change | meaning |", "|---|---|---|---|---|---|"]
    return head + [
        f"| `{row.path[-1]}` | {_cell(row.allowed)} | {_cell(row.default_text())} | {_cell(_examples(row))} | "
        f"{_cell(_change(row))} | {_cell(row.text)} |"
        for row in rows
    ]


def _names_table() -> list[str]:
    named = [(key.name, names) for key in keys().values() if (names := other_names(key.name))]
    return ["| key | names |", "|---|---|", *(f"| `{key}` | {_cell(names)} |" for key, names in named)]


def _change(key: Key) -> str:
    return "as the keys in set" if key.path[:2] == PROFILES else in_short(effect(key.name))


def _examples(key: Key) -> str:
    return ", ".join(f"`{spell(value, key.form)}`" for value in key.examples)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGE_HEAD = """\
# The manifest

<!-- made by tools/manifest_page.py from appliance/config/sections; a test keeps it so -->

Write one YAML file for each service. This is the smallest one:

```yaml
apiVersion: slipway/v2
model: {source: {path: /models/Qwen3-0.6B}}
```

- `slipway check M` reports mistakes with file, line and column, and `--fix` corrects them; `slipway plan M` prints the
  resolved values and their origins; `slipway schema` prints the JSON Schema for editors.
- Precedence, highest first (mappings are merged key by key, everything else is replaced):

  | source | written as |
  |---|---|
  | the command line | `--endpoints.port 9000`, `--set endpoints.port=9000` |
  | the environment | `SLIPWAY__ENDPOINTS__PORT=9000` |
  | overlays | `--overlay dev`, `--overlay site.yaml`, `SLIPWAY_OVERLAY=dev,site.yaml`; the last one wins |
  | the manifest | the file itself |
  | `extends` | the extended files; the last one wins |
  | a hardware profile | the first of `hardware.profiles` that matches the machine |
  | defaults | the tables below |

- On the command line of `serve`, `plan` and `check` every key is a flag: `--engine.cache.block-tokens 32` (dashes and
  underscores are equivalent) equals `--set engine.cache.block_tokens=32`; the last one wins. `slipway serve --help`
  shows the flags with a short form (`-p`, `-H`, `-c`, `-dp`), `--help-all` all of them.
- Values of flags, of `--set` and of variables are scalars as YAML reads them; `{…}`, `[…]` and quotes are YAML flow
  style, so JSON works: `--set engine='{cache: {block_tokens: 32}}'`.
- Unknown keys, wrong types and duplicate keys are errors. Scalars that YAML 1.1 and 1.2 read differently are errors
  too: unquoted `yes`, `no`, `on`, `off`, `y`, `n` (write `true` or `false`, or quote a string; a key with the word
  among its values accepts it), `010`, `0x10`, `1_000`, `1e3`, `12:30`, `2026-01-01`. Anchors, aliases, merge keys, tags
  and tabs as indentation are not permitted.
- Sizes are numbers with `B`, `KiB`, `MiB`, `GiB`, `TiB`, `KB`, `MB`, `GB` or `TB` (a bare number counts bytes);
  durations are numbers with `ms`, `s`, `m` or `h` (a bare number counts seconds).
- The column "a change" lists the effects of a changed value: the programs that must restart (`reload`: none,
  `slipway reload` changes it in a running service), possible changes of replies, and caches that are rebuilt.
  `slipway diff A B` lists them for two manifests, with the numbers of both plans; `slipway explain KEY` for one key.
- `auto` is resolved when the service starts; `slipway plan` prints the value and the reason.
- Relative paths start at the folder of their file; in variables and flags at the manifest's folder.
- `apiVersion` must be given and is `slipway/v2`. Files of `slipway/v1` are still read, with a warning;
  `slipway upgrade --write FILE` rewrites them and keeps comments, order and quotes.
- Keys that start with `x-` are for your own notes in any section; Slipway ignores them.
- [sources.md](sources.md) describes every kind of `model.source`.

## Layers

Manifests can share common keys, and one manifest can serve several environments and machines:

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

- `slipway plan` prints the files, overlays and profile in use, the reasons why earlier profiles do not match, and the
  location of each value: `base.yaml:4:12`, `m.yaml:8:42 (overlay dev)`, `m.yaml:13:50 (profile h200)`.
- A mistake is reported at its location, with the path to that file: `base.yaml:3:9: …; extended by m.yaml:2:10`.
  Overlays and profiles that are not selected are checked too. `--fix` changes the file that contains the value, also
  the value of a variable or a default. It does not change values from the environment, but prints the variable to set.
- An overlay may have any key except `extends` and `overlays`; an overlay file any key except `overlays`. `--overlay`
  replaces `SLIPWAY_OVERLAY`. A name with a slash or the ending `.yaml` or `.yml` is a file.
- A profile matches if every key of its `match` does. Ranges are comparisons, such as `">=2"` or `">=8 <64"`, and need
  quotes; a plain number means equality. With several GPUs, each must match `gpu`, `memory` and `compute_capability`.
- `${NAME}` is an environment variable, `${var.name}` an entry of `variables`; `${NAME:-text}` has a default for unset
  or empty variables, which may contain further `${…}`. `$$` is a dollar sign. Use quotes within `{…}` and `[…]` of
  YAML: `{port: "${PORT}"}`.
- A value that consists of one `${…}` has the YAML type of its text, so `${PORT:-8000}` is a number; keys that accept
  only strings get a string. Within a longer string it is text.
- Limits: 256 KiB and 4,000 values per file, 65,536 characters per interpolated string, 1,048,576 characters in all of
  them, 100 files. Messages never quote a file that has no manifest key.
- Values in files are interpolated; keys, flags and `SLIPWAY__…` values are not. `extends` may use only the environment.
- Names that end with `KEY`, `TOKEN`, `SECRET` or `PASSWORD` (in any case) are refused in `${…}` and in `variables`: a
  secret is named in `secrets` and never becomes a value. Plans, logs and generated files therefore contain no secrets.
- The hashes of a configuration do not depend on the division into files and variables.
- All files of one manifest have the same `apiVersion`, and at least one must have it. Omit it in files that are not
  complete manifests, such as `base.yaml` above, so that editors report no missing keys.
"""

VARIABLES_HEAD = """\
## Environment variables

`SLIPWAY__SECTION__KEY` sets a key: `SLIPWAY__ENDPOINTS__PORT=9000`. In addition to these and to the variables named in
`secrets`, Slipway reads:
"""

NAMES_HEAD = """\
## Names in other servers

Slipway reads none of these names. `slipway check` suggests the key for such a name in a manifest, `--fix` renames it,
and `slipway explain NAME` explains the key.
"""
