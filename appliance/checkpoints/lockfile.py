"""The lock file: one for each manifest, beside it, with the suffix .lock.

It holds the SHA-256 of every file that a start reads, and what the plan was on the machine that wrote it. The files are
a promise: a difference refuses. The plan is a note: another machine may rightly come to another one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from appliance.checkpoints.digest import Digest, Sha256
from appliance.config import exits
from appliance.config.effects import EFFECTS
from appliance.config.problems import Problem, Refused
from appliance.config.yaml_loader import Place
from engine.api.files import CONFIG_BYTES, read_file
from engine.api.golden import Recorded

CODE = "not-as-locked"
LOCK_BYTES = CONFIG_BYTES


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the chat template comes from, and the digest of its text (of all of them, where there are several)."""

    file: str
    sha256: Sha256


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The checkpoint: its folder as the plan found it, the revision of its source if one is known, its files."""

    path: str
    architecture: str
    revision: str | None = None
    files: dict[str, Digest]


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`manifest` is the fingerprint of the effective manifest, `machine` what it was planned on, `plan` every key as it
    was resolved and the numbers that followed. `outputs_sha256` and `graphs_sha256` are those of the plan: the first
    changes with what may change a reply, the second with what kernels and graphs are compiled for. `golden`: golden
    prompts as an engine of the plan computed them, where one could run."""

    lock: Literal[1] = 1
    slipway: str
    manifest: Sha256
    outputs_sha256: Sha256
    graphs_sha256: Sha256
    machine: str
    model: Model
    template: Template | None = None
    plan: dict[str, Any]
    golden: Recorded | None = None


def lock_path(manifest: Path) -> Path:
    """`service.yaml` → `service.lock`"""
    return manifest.with_suffix(".lock")


def as_yaml(lock: Lock, manifest: str) -> str:
    """The file's text: a stable order, one line a file, so that two locks differ where the checkpoints do."""
    model = lock.model
    lines = [
        f"# Written by `slipway lock {manifest}`. `slipway serve` refuses a checkpoint whose files are not these.",
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
    if lock.template:
        lines += ["template:", f"  file: {_scalar(lock.template.file)}", f"  sha256: {_scalar(lock.template.sha256)}"]
    lines += ["plan:", *(f"  {key}: {_scalar(value)}" for key, value in lock.plan.items())]
    if lock.golden:
        lines += _golden(lock.golden)
    return "\n".join(lines) + "\n"


def _golden(recorded: Recorded) -> list[str]:
    """JSON as a block of text, a prompt a line: to YAML 1.1 a number such as 1e-7 is a word."""
    goldens = ",\n  ".join(_scalar(golden) for golden in recorded.goldens)
    text = f'{{"arithmetic": {_scalar(recorded.arithmetic)}, "goldens": [\n  {goldens}]}}'
    return ["golden: |-", f"  {text}"]


def _scalar(value: Any) -> str:
    """JSON, which is YAML too."""
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
    """Raises Refused for what is no lock; FileNotFoundError where there is none."""
    try:
        read = _Loader(read_file(path, LOCK_BYTES)).get_single_data()
        if isinstance(read, dict) and isinstance(read.get("golden"), str):
            read["golden"] = msgspec.json.decode(read["golden"], type=Recorded)
        return msgspec.convert(read, Lock)
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.DecodeError, RecursionError) as error:
        what = " ".join(str(error).split())
        message = f"is no lock of this version of slipway: {what}; write it anew with `slipway lock`"
        raise Refused([Problem(Place(str(path)), "", message, code=CODE)], exits.INTEGRITY) from error


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One file that is not what the lock says."""

    name: str
    message: str


def compare(locked: Mapping[str, Digest], found: Mapping[str, Digest | None]) -> Iterator[Difference]:
    """What differs, by name. `found`: the files that would be read; None is one that is not there."""
    for name in sorted({*locked, *found}):
        old, new = locked.get(name), found.get(name)
        if old is None and new is not None:
            yield Difference(name, f"would be read and is not in the lock; found sha256 {new.sha256}")
        elif old is not None and new is None:
            yield Difference(name, f"missing; expected {old.size:,} bytes with sha256 {old.sha256}")
        elif old is not None and new is not None and old != new:
            sizes = "" if old.size == new.size else f" ({old.size:,} bytes were locked, {new.size:,} are there)"
            yield Difference(name, f"changed{sizes}; expected sha256 {old.sha256}, found {new.sha256}")


DRIFT_SHARE = 0.05  # free memory is never twice the same: smaller changes of numbers that follow from it are no news


def drift(locked: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """`key is now, locked as then` for every value that is planned otherwise now, and whether replies depend on it."""
    for key, new in found.items():
        old = locked.get(key)
        if old != new and not (key in MEASURED and _near(old, new)):
            replies = key in EFFECTS and EFFECTS[key].outputs == "yes"
            yield f"{key} is {_short(new)}, locked as {_short(old)}{'; replies may be others' if replies else ''}"


MEASURED = frozenset({"hardware.kv_cache_memory", "workspace_bytes", "kv_blocks", "cache_tokens", "model.max_context"})


def _near(old: Any, new: Any) -> bool:
    numbers = isinstance(old, int | float) and isinstance(new, int | float)
    return numbers and abs(old - new) <= DRIFT_SHARE * max(abs(old), abs(new))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else _scalar(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
