"""Software bill of materials in the format SPDX 2.3 (JSON): the Python distributions and the system's packages.

Source: https://spdx.github.io/spdx-spec/v2.3/, package URLs by https://github.com/package-url/purl-spec.
"""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from appliance.config.version import __version__

NONE = "NOASSERTION"
_LICENSE = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")
_PACKAGE = "SPDXRef-Slipway"


@dataclass(frozen=True)
class Component:
    name: str
    version: str
    url: str
    """Package URL."""
    license: str = NONE


def python_components() -> Iterator[Component]:
    """Yield the installed distributions, without Slipway."""
    for one in distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name and name != "slipway-serve":
            version = one.version
            yield Component(name, version, f"pkg:pypi/{name}@{version.replace('+', '%2B')}", _license(one))
    yield Component("python", platform.python_version(), f"pkg:generic/python@{platform.python_version()}")


def _license(one: Distribution) -> str:
    """Return the license expression of the metadata. Texts of older metadata are not expressions."""
    found = one.metadata.json.get("license_expression") or ""
    return found if isinstance(found, str) and _LICENSE.fullmatch(found) else NONE


def system_components(root: Path = Path("/")) -> Iterator[Component]:
    """Yield the installed packages of a Debian system."""
    try:
        text = (root / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
        release = (root / "etc/os-release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    system = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', release, re.MULTILINE))
    distro = f"&distro={system['ID']}-{system['VERSION_ID']}" if {"ID", "VERSION_ID"} <= system.keys() else ""
    for block in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version|Architecture): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed") and {"Package", "Version", "Architecture"} <= fields.keys():
            version = fields["Version"].replace("+", "%2B").replace(":", "%3A")
            url = f"pkg:deb/{system.get('ID', 'debian')}/{fields['Package']}@{version}?arch={fields['Architecture']}"
            yield Component(fields["Package"], fields["Version"], url + distro)


def created(environ: Mapping[str, str]) -> str:
    """Return the time of creation: SOURCE_DATE_EPOCH if it is set, else now."""
    epoch = environ.get("SOURCE_DATE_EPOCH", "")
    when = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def sbom(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return the document. Its namespace is derived from the components, so equal environments have equal ones."""
    components = sorted({*python_components(), *system_components(root)}, key=lambda one: (one.url, one.version))
    mark = hashlib.sha256("\n".join(one.url for one in components).encode()).hexdigest()
    packages = [_described(_PACKAGE, Component("slipway", __version__, f"pkg:pypi/slipway-serve@{__version__}"))]
    packages[0]["licenseDeclared"] = "Apache-2.0"
    names = {one: f"SPDXRef-{number}" for number, one in enumerate(components)}
    packages += [_described(name, one) for one, name in names.items()]
    links = [_link("SPDXRef-DOCUMENT", "DESCRIBES", _PACKAGE)]
    links += [_link(_PACKAGE, "DEPENDS_ON", name) for name in names.values()]
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"slipway-{__version__}-{sys.platform}-{platform.machine()}",
        "documentNamespace": f"https://spdx.org/spdxdocs/slipway-{__version__}-{mark}",
        "creationInfo": {"created": created(environ), "creators": [f"Tool: slipway-{__version__}"]},
        "packages": packages,
        "relationships": links,
    }
    return json.dumps(document, indent=1) + "\n"


def _described(name: str, one: Component) -> dict[str, Any]:
    reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": one.url}
    return {
        "SPDXID": name,
        "name": one.name,
        "versionInfo": one.version,
        "downloadLocation": NONE,
        "filesAnalyzed": False,
        "licenseConcluded": NONE,
        "licenseDeclared": one.license,
        "copyrightText": NONE,
        "externalRefs": [reference],
    }


def _link(subject: str, kind: str, target: str) -> dict[str, str]:
    return {"spdxElementId": subject, "relationshipType": kind, "relatedSpdxElement": target}
