"""Lock file of a manifest, next to it, with the suffix .lock.

It contains the SHA-256 of every file that a start reads, and the plan on the machine that wrote it. A file that differs
is refused. The plan is only informative: it may differ on another machine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from appliance.checkpoints.digest import Digest, Sha256
from appliance.config import exits
from appliance.config.effects import effects
from appliance.config.problems import Problem, Refused
from appliance.config.yaml_loader import Place
from engine.api.files import CONFIG_BYTES, read_file
from engine.api.golden import Recorded

CODE = "not-as-locked"
LOCK_BYTES = CONFIG_BYTES


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Source of the chat template, and the digest of its text (of all templates if there are several)."""

    file: str
    sha256: Sha256


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The checkpoint: its folder according to the plan, the revision of its source if known, and its files."""

    path: str
    architecture: str
    revision: str | None = None
    files: dict[str, Digest]


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of a lock file."""

    lock: Literal[1] = 1
    slipway: str
    manifest: Sha256  # fingerprint of the effective manifest
    outputs_sha256: Sha256  # hash of the parts of the plan that may change a reply
    graphs_sha256: Sha256  # hash of the parts of the plan for which kernels and graphs are compiled
    machine: str  # machine of the plan
    model: Model
    adapters: dict[str, Digest] = {}  # files of the LoRA adapters, as NAME/FILE
    draft: dict[str, Digest] = {}  # files of the draft model or EAGLE head
    template: Template | None = None
    plan: dict[str, Any]  # every key as resolved, and the derived numbers
    golden: Recorded | None = None  # outputs for the self-test prompts, if an engine could compute them


def lock_path(manifest: Path) -> Path:
    """Return the path of the lock file: `service.yaml` → `service.lock`."""
    return manifest.with_suffix(".lock")


def as_yaml(lock: Lock, manifest: str) -> str:
    """Return the text of the file, in a stable order with one line per file, so that a diff of two locks shows the
    files that differ."""
    model = lock.model
    lines = [
        f"# Written by `slipway lock {manifest}`. `slipway serve` refuses a checkpoint whose files differ.",
        f"lock: {lock.lock}",
        f"slipway: {_scalar(lock.slipway)}",
        f"manifest: {_scalar(lock.manifest)}",
        f"outputs_sha256: {_scalar(lock.outputs_sha256)}",
        f"graphs_sha256: {_scalar(lock.graphs_sha256)}",
        f"machine: {_scalar(lock.machine)}",
        "model:",
        f"  path: {_scalar(model.path)}",
        f"  architecture: {_scalar(model.architecture)}",
        f"  revision: {_scalar(model.revision)}",
        "  files:",
        *(f"    {_scalar(name)}: {_digest(model.files[name])}" for name in sorted(model.files)),
    ]
    for title, files in (("adapters", lock.adapters), ("draft", lock.draft)):
        if files:
            lines += [f"{title}:", *(f"  {_scalar(name)}: {_digest(found)}" for name, found in sorted(files.items()))]
    if lock.template:
        lines += ["template:", f"  file: {_scalar(lock.template.file)}", f"  sha256: {_scalar(lock.template.sha256)}"]
    lines += ["plan:", *(f"  {key}: {_scalar(value)}" for key, value in lock.plan.items())]
    if lock.golden:
        lines += _golden(lock.golden)
    return "\n".join(lines) + "\n"


def _golden(recorded: Recorded) -> list[str]:
    """Return a block of JSON text with one prompt per line. YAML 1.1 would read a number such as 1e-7 as a string."""
    goldens = ",\n  ".join(_scalar(golden) for golden in recorded.goldens)
    text = f'{{"arithmetic": {_scalar(recorded.arithmetic)}, "goldens": [\n  {goldens}]}}'
    return ["golden: |-", f"  {text}"]


def _scalar(value: Any) -> str:
    """Return JSON, which is also YAML."""
    return msgspec.json.encode(value).decode()


def _digest(found: Digest) -> str:
    return f"{{size: {found.size}, sha256: {_scalar(found.sha256)}}}"


class _Loader(yaml.SafeLoader):
    """Loader that refuses aliases, because a few lines of them expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


def read_lock(path: Path) -> Lock:
    """Read a lock file. Raise Refused if it is invalid, FileNotFoundError if it does not exist."""
    try:
        read = _Loader(read_file(path, LOCK_BYTES)).get_single_data()
        if isinstance(read, dict) and isinstance(read.get("golden"), str):
            read["golden"] = msgspec.json.decode(read["golden"], type=Recorded)
        return msgspec.convert(read, Lock)
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.DecodeError, RecursionError) as error:
        what = " ".join(str(error).split())
        message = f"is not a lock file of this version of slipway: {what}; create it again with `slipway lock`"
        raise Refused([Problem(Place(str(path)), "", message, code=CODE)], exits.INTEGRITY) from error


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A file that differs from the lock."""

    name: str
    message: str


def compare(locked: Mapping[str, Digest], found: Mapping[str, Digest | None]) -> Iterator[Difference]:
    """Yield the differences by name. `found` has the files that would be read; None is a missing file."""
    for name in sorted({*locked, *found}):
        old, new = locked.get(name), found.get(name)
        if old is None and new is not None:
            yield Difference(name, f"is read at a start and is not in the lock; found sha256 {new.sha256}")
        elif old is not None and new is None:
            yield Difference(name, f"missing; expected {old.size:,} bytes with sha256 {old.sha256}")
        elif old is not None and new is not None and old != new:
            sizes = "" if old.size == new.size else f" (locked: {old.size:,} bytes, found: {new.size:,})"
            yield Difference(name, f"changed{sizes}; expected sha256 {old.sha256}, found {new.sha256}")


DRIFT_TOLERANCE = 0.05  # free memory varies between starts: smaller changes of derived numbers are ignored


def drift(locked: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for every planned value that differs from the lock, with whether it may change replies."""
    for key, new in found.items():
        old = locked.get(key)
        if old != new and not (key in MEASURED and _is_close(old, new)):
            replies = key in effects() and effects()[key].outputs == "yes"
            yield f"{key} is {_short(new)}, locked as {_short(old)}{'; replies may differ' if replies else ''}"


MEASURED = frozenset({"hardware.kv_cache_memory", "workspace_bytes", "kv_blocks", "cache_tokens", "model.max_context"})


def _is_close(old: Any, new: Any) -> bool:
    numbers = isinstance(old, int | float) and isinstance(new, int | float)
    return numbers and abs(old - new) <= DRIFT_TOLERANCE * max(abs(old), abs(new))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else _scalar(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
