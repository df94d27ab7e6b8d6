"""Manifest of `slipway serve` without a MANIFEST argument.

The first of these that exists: /manifest.yaml, the model of the hosting platform
(`appliance/config/hosting_platform.py`), the packaged demo. The platform's port applies unless the manifest, a variable
or an option sets another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from appliance.config.hosting_platform import Detected, detect, manifest_of
from appliance.config.settings import Given, Option, load

MOUNTED = Path("manifest.yaml")
PORT = ("endpoints", "port")


@dataclass(frozen=True)
class Found:
    """The manifest to serve, and the lines that explain the choice."""

    given: Given
    notes: tuple[str, ...]


def demo() -> Path:
    """Return the demo's manifest, from the installed package or from the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "demo" / "demo.yaml"
    return installed if installed.is_file() else package.parent / "manifests" / "demo.yaml"


def find(environ: Mapping[str, str], options: tuple[Option, ...], overlays: tuple[str, ...], root: Path) -> Found:
    """Return the manifest to serve. `root` is the root folder of the file system. Raise Refused."""
    mounted, platform = root / MOUNTED, detect(environ, root)
    if mounted.exists():
        given = _with_port(Given(mounted, options, environ, overlays), platform)
        return Found(given, _notes(platform, f"serving {mounted}", given))
    if platform is not None and platform.source is not None:
        text = yaml.safe_dump(manifest_of(platform.source, platform.port), sort_keys=False)
        given = Given(root / MOUNTED, options, environ, overlays, text=text)
        notes = _notes(
            platform, f"there is no {mounted}; serving the default manifest below. Mount your own to change it:", given
        )
        return Found(given, (*notes, *(f"  {line}" for line in text.splitlines())))
    given = _with_port(Given(demo(), options, environ, overlays), platform)
    why = (
        f"serving the demo, {given.manifest}: no MANIFEST argument, no {mounted}, and no model from a hosting platform"
    )
    return Found(given, _notes(platform, why, given))


def _with_port(given: Given, platform: Detected | None) -> Given:
    """Add the platform's port as an option, unless the port is already set."""
    if platform is None or platform.port is None or load(given).origin(PORT) != "default":
        return given
    port = Option(platform.port.origin, ".".join(PORT), str(platform.port.number))
    return replace(given, options=(port, *given.options))


def _notes(platform: Detected | None, what: str, given: Given) -> tuple[str, ...]:
    if platform is None:
        return (what,)
    return (f"{platform.name} detected by {platform.reason}; port {load(given).manifest.endpoints.port}", what)
