"""Keys of a manifest file in addition to the manifest: its composition from layers.

``appliance.config.composition`` removes these keys when it merges the layers; the effective manifest has none of them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from appliance.config.key import NO_EFFECT, declare
from appliance.config.manifest import Manifest
from appliance.config.sections.hardware import Hardware
from appliance.config.sections.values import SIZES, Section


def _range(quantity: str, form: str, bare: str = "") -> tuple[Any, Any]:
    """Return the type of a range: any, or comparisons with a quantity, such as ">=2 <8".

    bare: JSON type of a plain number, if one is permitted.
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


_EXAMPLE = {"name": "h200", "match": {"gpu": "H200"}, "set": {"engine": {"scheduling": {"max_running": 512}}}}


class Match(Section):
    device: Literal["any", "cpu", "cuda"] = "any"
    """Value of hardware.device; auto matches cuda if there is a GPU."""
    gpu: str = Field("any", min_length=1, examples=["H200"])
    """Part of the name of every GPU, such as H200; case-insensitive."""
    count: CountRange = Field("any", examples=[2, ">=2"])
    """Number of GPUs."""
    memory: SizeRange = Field("any", examples=[">=75GB"])
    """Memory of every GPU. A GPU with 80 GB has slightly less than 80GiB: write ">=80GB"."""
    compute_capability: VersionRange = Field("any", examples=[">=9.0"])
    """Compute capability of every GPU."""
    kernels: Literal["any", "base", "neon", "avx2", "avxvnni", "avx512", "avx512bf16", "amx"] = "any"
    """Compiled kernels that the CPU can run."""
    cores: CountRange = Field("any", examples=[">=16"])
    """CPU cores that affinity and cgroups permit."""


class Profile(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", examples=["h200"])
    """Name of the profile in `slipway plan`."""
    match: Match
    """Required properties of the machine. All keys must match; {} matches every machine."""
    set: dict[str, Any] = Field(examples=[{"model": {"max_context": 32768}}])
    """Manifest keys for such a machine, except extends, overlays, variables and hardware.profiles."""


class Profiled(Section):
    profiles: tuple[Profile, ...] = declare((), effect=NO_EFFECT, example=[_EXAMPLE], strict=False)
    """Values that depend on the machine, from the first profile that matches. They override only the defaults."""


class HardwareFile(Profiled, Hardware):
    """The section with the keys of a file."""


class ManifestFile(Manifest):
    """Content of a file: a manifest and its composition."""

    # Composition keys take effect through the keys that they set: compare the resolved values of those.

    hardware: HardwareFile = HardwareFile()
    """Device, and the share of it that the service uses."""
    extends: str | Annotated[tuple[str, ...], Field(strict=False)] = declare(
        (), effect=NO_EFFECT, example="parts/service.yaml"
    )
    """Manifest that this one extends, or a list: later ones override earlier ones, and this file overrides all.
    Relative paths start at this file's folder."""
    overlays: dict[OverlayName, dict[str, Any]] = declare(
        {}, effect=NO_EFFECT, example={"dev": {"observability": {"log_level": "debug"}}}
    )
    """Manifest keys by the name of an environment, such as dev; `--overlay dev` or SLIPWAY_OVERLAY=dev applies them
    over the file."""
    variables: dict[VariableName, str | int | float | bool] = Field({}, examples=[{"context": 8192}])
    """Values for `${var.name}` in strings of the manifest."""
