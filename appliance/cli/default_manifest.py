"""Manifest of `slipway serve` without a MANIFEST argument.

The first of these that exists: the manifest that variables contain or name, /manifest.yaml, a manifest in the model's
folder on SageMaker, the model of the hosting platform (`appliance/config/hosting_platform.py`), the packaged demo. The
platform's port and routes apply unless the manifest, a variable or an option sets others.
"""

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import yaml

from appliance.checkpoints.remote import SourceError
from appliance.checkpoints.small_file import MAX_BYTES, read_small_file
from appliance.config import exits
from appliance.config.hosting_platform import Detected, detect, manifest_of
from appliance.config.platform import SAGEMAKER_MODEL
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Given, Option, load
from appliance.config.variables import value
from appliance.config.yaml_loader import Place

MOUNTED = Path("manifest.yaml")
CHANNELS = Path("opt/ml/additional-model-data-sources")
"""Folder of SageMaker's AdditionalModelDataSources, each in a subfolder."""
PROPERTIES = "serving.properties"
PORT = "endpoints.port"
ROUTES = "endpoints.routes"
CHUNK = "SLIPWAY_MANIFEST_B64_"
"""Prefix of variables with parts of a manifest: SLIPWAY_MANIFEST_B64_00, SLIPWAY_MANIFEST_B64_01, …"""
_GZIP = b"\x1f\x8b"


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
    platform = detect(environ, root)
    environ = {**environ, **_serving_properties(root)}
    written = _written(environ, root)
    if written is not None:
        given = _with_defaults(replace(written, options=options, environ=environ, overlays=overlays), platform)
        return Found(given, _notes(platform, f"serving {given.manifest}", given))
    if platform is not None and platform.source is not None:
        text = yaml.safe_dump(manifest_of(platform.source, platform.port), sort_keys=False)
        given = _with_defaults(Given(root / MOUNTED, options, environ, overlays, text=text), platform)
        notes = _notes(
            platform,
            f"there is no {root / MOUNTED}; serving the default manifest below. Mount your own to change it:",
            given,
        )
        return Found(given, (*notes, *(f"  {line}" for line in text.splitlines())))
    given = _with_defaults(Given(demo(), options, environ, overlays), platform)
    why = (
        f"serving the demo, {given.manifest}: no MANIFEST argument, no {root / MOUNTED}, and no model from a hosting "
        "platform"
    )
    return Found(given, _notes(platform, why, given))


def _written(environ: Mapping[str, str], root: Path) -> Given | None:
    """Return the manifest that an operator wrote, or None. Raise Refused if it cannot be read."""
    location = value(environ, "SLIPWAY_MANIFEST")
    chunks = sorted(one for one in environ if one.startswith(CHUNK))
    if location and chunks:
        _refuse(chunks[0], "and SLIPWAY_MANIFEST both name a manifest; set one of them")
    if location:
        return _named(location, value(environ, "SLIPWAY_MANIFEST_SHA256"))
    if chunks:
        return Given(Path(f"{CHUNK}*"), text=_joined(environ, chunks))
    folders = [root, root / SAGEMAKER_MODEL.relative_to("/"), *sorted((root / CHANNELS).glob("*/"))]
    found = [folder / MOUNTED for folder in folders if (folder / MOUNTED).exists()]
    return Given(found[0]) if found else None


def _named(location: str, sha256: str) -> Given:
    """Return the manifest at a path, or the text of a remote one."""
    if "://" not in location and not sha256:
        return Given(Path(location))
    try:
        content = read_small_file(location, sha256)
    except SourceError as error:
        _refuse("SLIPWAY_MANIFEST", str(error))
    return Given(Path(location), text=_text(content, "SLIPWAY_MANIFEST"))


def _joined(environ: Mapping[str, str], names: list[str]) -> str:
    """Return the manifest in variables of 1,024 bytes each: base64 of the YAML text or of its gzip file."""
    wanted = [f"{CHUNK}{index:02}" for index in range(len(names))]
    if names != wanted:
        missing = next((name for name in wanted if name not in names), wanted[0])
        _refuse(missing, f"is not set, but {names[-1]} is; the parts are numbered from 00 without gaps")
    try:
        content = base64.b64decode("".join(environ[name].strip() for name in names), validate=True)
        if content.startswith(_GZIP):
            unpacking = zlib.decompressobj(wbits=31)
            content = unpacking.decompress(content, MAX_BYTES)
            if unpacking.unconsumed_tail or not unpacking.eof:
                _refuse(names[0], f"the manifest is incomplete, or larger than {MAX_BYTES:,} bytes")
    except (binascii.Error, zlib.error) as error:
        _refuse(names[0], f"the variables {CHUNK}* are not base64 of a YAML text or of its gzip file: {error}")
    return _text(content, names[0])


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        _refuse(name, f"the manifest is not UTF-8: {error.reason} at byte {error.start}")


def _serving_properties(root: Path) -> dict[str, str]:
    """Return the options of LMI's serving.properties in the model's folder as OPTION_ variables, which they precede."""
    file = root / SAGEMAKER_MODEL.relative_to("/") / PROPERTIES
    if not file.is_file():
        return {}
    try:
        return dict(_properties(file.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        _refuse(str(file), f"cannot be read: {error}")


def _properties(text: str) -> Iterator[tuple[str, str]]:
    """Yield the options in a Java properties file. Other properties configure DJL Serving itself."""
    for line in text.splitlines():
        if found := re.fullmatch(r"\s*option\.([\w.-]+)\s*[=:]\s*(.*?)\s*", line):
            yield f"OPTION_{re.sub('[.-]', '_', found[1]).upper()}", found[2]


def _refuse(name: str, message: str) -> NoReturn:
    raise Refused([Problem(Place(name), "", message, code="unread")], exits.MANIFEST)


def _with_defaults(given: Given, platform: Detected | None) -> Given:
    """Add the platform's port and routes as options, unless they are already set."""
    if platform is None:
        return given
    settings = load(given)
    wanted = [] if platform.port is None else [Option(platform.port.origin, PORT, str(platform.port.number))]
    wanted += [Option(one.origin, f"{ROUTES}.{one.kind}", json.dumps([one.path])) for one in platform.routes]
    added = (one for one in wanted if settings.origin(tuple(one.key.split("."))) == "default")
    return replace(given, options=(*added, *given.options))


def _notes(platform: Detected | None, what: str, given: Given) -> tuple[str, ...]:
    if platform is None:
        return (what,)
    return (f"{platform.name} detected by {platform.reason}; port {load(given).manifest.endpoints.port}", what)
