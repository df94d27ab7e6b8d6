"""`slipway diff A B`: show what changes when manifest B replaces A."""

import argparse
import sys
from pathlib import Path

from appliance.config import exits
from appliance.config.environment import environment
from appliance.config.settings import Given
from appliance.hardware.machine import Machine, read_machine
from appliance.planning.diff.config_snapshot import ConfigSnapshot, read_snapshot
from appliance.planning.diff.diff import compare
from appliance.planning.diff.text import as_json, as_text

DIFFERENT = 1  # exit code, as of diff(1)
FORMATS = {"text": as_text, "json": as_json}


def diff(options: argparse.Namespace, machine: Machine | None) -> int:
    """Compare two manifests for this machine, or for a described one. The exit code says whether they differ. Raise
    Refused if one of them is invalid."""
    overlays = tuple(options.overlays)
    if options.other is None and not options.options and not overlays:
        message = "pass a second manifest or a change: A B, A --set KEY=VALUE, or A --overlay NAME"
        print(f"slipway diff: {message}", file=sys.stderr)
        return exits.MANIFEST.number
    environ = environment()
    machine = machine or read_machine()
    before = _snapshot(options, Given(options.manifest, (), environ), machine)
    after = _snapshot(
        options, Given(options.other or before.given.manifest, options.options, environ, overlays), machine
    )
    found = compare(before, after)
    print(FORMATS[options.format](found))
    return DIFFERENT if found.changes else exits.OK.number


def _snapshot(options: argparse.Namespace, given: Given, machine: Machine) -> ConfigSnapshot:
    options.manifest = Path(given.manifest)  # so that problems are reported for this manifest
    return read_snapshot(given, machine)
