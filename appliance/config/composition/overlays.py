"""Overlays: named sets of manifest keys, within the file or in separate files."""

import re
from dataclasses import dataclass
from pathlib import Path as File

from appliance.config.composition.files import Reading, read_file, unreadable
from appliance.config.merge import below, fault, without
from appliance.config.suggest import suggest_name
from appliance.config.yaml_loader import Fault, Place, Tree

PATTERN = r"[a-z0-9][a-z0-9_-]{0,62}"


@dataclass(frozen=True)
class OverlayRef:
    """A requested overlay, and the option or variable that requested it."""

    name: str
    place: Place

    @property
    def is_file(self) -> bool:
        return "/" in self.name or self.name.endswith((".yaml", ".yml"))


def requested_overlays(options: tuple[str, ...], variable: str) -> tuple[OverlayRef, ...]:
    """Return the overlays in the order of application. Options replace the overlays in the environment variable."""
    if options:
        return tuple(OverlayRef(name, Place(f"--overlay {name}")) for name in options)
    names = [name.strip() for name in variable.split(",")]
    return tuple(OverlayRef(name, Place("SLIPWAY_OVERLAY")) for name in names if name)


def split(tree: Tree) -> tuple[Tree, dict[str, Tree]]:
    """Return the file without its overlays, and each overlay as a tree whose places name it."""
    given = tree.value.get("overlays", {})
    rest = without(tree, ("overlays",))
    kept = [one for one in tree.faults if one.path[:1] == ("overlays",) and len(one.path) < 3]
    rest.faults += kept
    if not isinstance(given, dict):
        rest.faults.append(fault(tree, ("overlays",), "must be a mapping of names to keys of the manifest"))
        return rest, {}
    found = {}
    for name, value in given.items():
        path = ("overlays", name)
        if not re.fullmatch(PATTERN, name):
            what = f"not a name for an overlay; must match ^{PATTERN}$"
            rest.faults.append(Fault(path, tree.keys[path], what, code="wrong-layer"))
        elif not isinstance(value, dict):
            if path not in {one.path for one in kept}:
                rest.faults.append(fault(tree, path, "must be a mapping with keys of the manifest"))
        else:
            found[name] = _alone(below(tree, path, f"overlay {name}"), "an overlay")
    return rest, found


def read(one: OverlayRef, overlays: dict[str, Tree], reading: Reading) -> Tree:
    """Return the tree of a requested overlay, with a fault if it does not exist."""
    nothing = Tree(value={})
    if not one.is_file:
        if one.name in overlays:
            return overlays[one.name]
        near = suggest_name(one.name, overlays)
        known = f"the manifest has {', '.join(overlays)}" if overlays else "the manifest has no overlays"
        hint = f"did you mean {near}?" if near else "" if overlays else "a file ends with .yaml"
        nothing.faults.append(
            Fault((), one.place, f"{_flag_text(one)}no such overlay; {known}", (), hint, "wrong-layer")
        )
        return nothing
    try:
        tree = read_file(reading, File(one.name))
    except OSError as error:
        what, near_file = unreadable(error, one.name, File())
        nothing.faults.append(Fault((), one.place, f"{_flag_text(one)}{what}", (), near_file.text, "unread"))
        return nothing
    tree.values.pop((), None)  # a key that the manifest lacks is not reported as missing in an overlay
    return _alone(tree, "an overlay file", ("overlays",))


def _flag_text(one: OverlayRef) -> str:
    return "" if one.place.source.endswith(one.name) else f"{one.name}: "


def _alone(tree: Tree, what: str, keys: tuple[str, ...] = ("extends", "overlays")) -> Tree:
    """Return the overlay without forbidden keys, each of which becomes a fault."""
    for key in keys:
        if key in tree.value:
            found = Fault((key,), tree.keys[(key,)], f"{what} cannot have {key} of its own", code="wrong-layer")
            tree = without(tree, (key,))
            tree.faults.append(found)
    return tree
