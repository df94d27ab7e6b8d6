"""Keys of a manifest file that compose a manifest from layers, in addition to the manifest's own keys.

``appliance.config.composition`` removes these keys when it merges the layers; the effective manifest has none of them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from appliance.config.manifest import SIZES, Hardware, Manifest, Section


def _range(quantity: str, form: str, bare: str = "") -> tuple[Any, Any]:
    """Return the field and its schema for "any" or comparisons such as ">=2 <8".

    `bare` is the JSON type of a single number, if one is allowed.
    """
    pattern = rf"^\s*((>=|<=|>|<)\s*{quantity}\s*)+$"
    options: list[dict[str, Any]] = [{"const": "any", "type": "string"}, {"type": "string", "pattern": pattern}]
    options += [{"type": bare, "minimum": 1}] if bare else []
    return Field(pattern=pattern), WithJsonSchema({"anyOf": options, "format": form}, mode="validation")


_COUNT = _range(r"\d+", "count range", "integer")
_SIZE = _range(rf"\d+(\.\d+)?\s*({'|'.join(SIZES)})", "size range")
_VERSION = _range(r"\d+(\.\d+)?", "version range", "number")
AnyOne = Literal["any"]
CountRange = Annotated[Annotated[int, Field(ge=1)] | AnyOne | Annotated[str, _COUNT[0]], _COUNT[1]]
SizeRange = Annotated[AnyOne | Annotated[str, _SIZE[0]], _SIZE[1]]
VersionRange = Annotated[Annotated[float, Field(ge=1)] | AnyOne | Annotated[str, _VERSION[0]], _VERSION[1]]
OverlayName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
VariableName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class Match(Section):
    device: Literal["any", "cpu", "cuda"] = "any"
    """Device that hardware.device selects; if that is auto, cuda if there is a GPU."""
    gpu: Annotated[str, Field(min_length=1)] = "any"
    """Part of the name of every GPU, such as H200; case is ignored."""
    count: CountRange = "any"
    """Number of GPUs."""
    memory: SizeRange = "any"
    """Memory of every GPU. GPUs sold as 80 GB have slightly less than 80GiB, so write ">=80GB"."""
    compute_capability: VersionRange = "any"
    """Compute capability of every GPU."""
    kernels: Literal["any", "base", "neon", "avx2", "avxvnni", "avx512", "amx"] = "any"
    """Compiled kernels that the CPU can run."""
    cores: CountRange = "any"
    """CPU cores that affinity and cgroups allow for this process."""


class Profile(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the profile in the output of `slipway plan`."""
    match: Match
    """Conditions on the machine. All keys must match; {} matches every machine."""
    set: dict[str, Any]
    """Manifest keys for such a machine; all except extends, overlays, variables and hardware.profiles."""


class Profiled(Section):
    profiles: Annotated[tuple[Profile, ...], Field(strict=False)] = ()
    """Values that depend on the machine. The first matching profile applies; its values override only the defaults."""


class HardwareFile(Profiled, Hardware):
    """The `hardware` section in a file."""


class ManifestFile(Manifest):
    """A manifest file: the manifest's keys, and those that compose it."""

    hardware: HardwareFile = HardwareFile()
    """Device, and the part of it that the service may use."""
    extends: str | Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Base manifest, or a list of them; the later one overrides the earlier, and this file overrides all. Relative
    paths start at this file's folder.
    """
    overlays: dict[OverlayName, dict[str, Any]] = {}
    """Sets of manifest keys by name, such as dev; `--overlay dev` or SLIPWAY_OVERLAY=dev applies one to the file."""
    variables: dict[VariableName, str | int | float | bool] = {}
    """Values that texts of the manifest refer to as `${var.name}`."""
