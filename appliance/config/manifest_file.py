"""What a manifest file may hold besides the manifest's own keys: of which layers it is composed.

``appliance.config.composition`` takes these keys out when it puts the layers over each other; none is left in the
effective manifest.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from appliance.config.manifest import SIZES, Hardware, Manifest, Section


def _range(quantity: str, form: str, bare: str = "") -> tuple[Any, Any]:
    """any, or comparisons with a quantity, such as ">=2 <8"; `bare` is the JSON type of one number alone, if that may
    be."""
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
    """The device that hardware.device asks for; where that is auto, cuda if there is a GPU."""
    gpu: Annotated[str, Field(min_length=1)] = "any"
    """Part of the name of every GPU, such as H200; capital and small letters are one."""
    count: CountRange = "any"
    """How many GPUs there are."""
    memory: SizeRange = "any"
    """Memory of every GPU. What is sold as 80 GB has a little less than 80GiB: write ">=80GB"."""
    compute_capability: VersionRange = "any"
    """Compute capability of every GPU."""
    kernels: Literal["any", "base", "neon", "avx2", "avxvnni", "avx512", "amx"] = "any"
    """Compiled kernels that the CPU can run."""
    cores: CountRange = "any"
    """CPU cores that affinity and cgroups leave to this process."""


class Profile(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """What `slipway plan` calls the profile."""
    match: Match
    """What the machine must be. All keys must fit; with {} every machine does."""
    set: dict[str, Any]
    """Keys of the manifest for such a machine; all but extends, overlays, variables and hardware.profiles."""


class Profiled(Section):
    profiles: Annotated[tuple[Profile, ...], Field(strict=False)] = ()
    """Values that depend on the machine. The first profile that matches gives what nothing else does: its values go
    before the defaults only."""


class HardwareFile(Profiled, Hardware):
    """The section as a file may have it."""


class ManifestFile(Manifest):
    """What stands in a file: a manifest, and how it is composed."""

    hardware: HardwareFile = HardwareFile()
    """Which device, and how much of it."""
    extends: str | Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Manifest that this one starts from, or a list of them: of two that give one key the later wins, and this file
    over all. Relative paths start at this file's folder."""
    overlays: dict[OverlayName, dict[str, Any]] = {}
    """Keys of the manifest by the name of an occasion, such as dev; `--overlay dev` or SLIPWAY_OVERLAY=dev lays them
    over the file."""
    variables: dict[VariableName, str | int | float | bool] = {}
    """Values that the manifest's texts name as `${var.name}`."""
