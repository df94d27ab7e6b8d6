"""Hardware profiles: values for a kind of machine.

The first matching profile supplies the values that no other layer sets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from appliance.config.composition.fix import fix_at_definition
from appliance.config.composition.interpolate import Names, interpolate
from appliance.config.manifest_file import Match, Profiled
from appliance.config.merge import at, below, place_of, without
from appliance.config.problems import Problem, from_fault, from_validation
from appliance.config.sections.values import Section
from appliance.config.yaml_loader import Fault, Path, Place, Tree

WHERE: Path = ("hardware", "profiles")
# Keys that a profile cannot set, because they are resolved before a profile is selected.
FIXED: tuple[Path, ...] = (("extends",), ("overlays",), ("variables",), WHERE)


@dataclass(frozen=True)
class Profile:
    """One entry of hardware.profiles."""

    name: str
    match: Match
    values: Tree  # tree of manifest keys whose places name the profile
    place: Place


# Function of hardware.device without a profile, and the profiles. Returns why each examined profile does not match,
# with "" as the last item if that profile matches.
Choose = Callable[[str, tuple[Profile, ...]], tuple[str, ...]]


@dataclass(frozen=True)
class Found:
    """The profiles of a manifest."""

    profiles: tuple[Profile, ...] = ()  # empty if there are problems in their names or conditions
    values: tuple[Tree, ...] = ()  # values of each profile, as far as they are readable
    problems: tuple[Problem, ...] = ()


class _Hardware(Section):
    hardware: Profiled


def split(tree: Tree) -> tuple[Tree, Tree]:
    """Return the tree without its profiles, and a tree with only the profiles."""
    if WHERE not in tree.keys:
        return tree, Tree(value={})
    alone = Tree(value={"hardware": {"profiles": at(tree, WHERE)}}, values={(): place_of(tree, ())})
    for mine, theirs in ((alone.keys, tree.keys), (alone.values, tree.values)):
        mine |= {path: place for path, place in theirs.items() if path[:2] == WHERE or path == WHERE[:1]}
    alone.dollars = {path: places for path, places in tree.dollars.items() if path[:2] == WHERE}
    alone.faults = [fault for fault in tree.faults if fault.path[:2] == WHERE]
    return without(tree, WHERE), alone


def read(alone: Tree, names: Names) -> Found:
    """Return the profiles of the second tree of `split`. Their values are interpolated later, when they are merged."""
    if not alone.value:
        return Found()
    texts = interpolate(
        Tree(
            alone.value,
            alone.keys,
            alone.values,
            [fault for fault in alone.faults if fault.path[3:4] != ("set",)],
            {path: places for path, places in alone.dollars.items() if path[3:4] != ("set",)},
        ),
        names,
    )
    problems = [fix_at_definition(problem, texts) for fault in texts.faults if (problem := from_fault(fault))]
    given = texts.value["hardware"]["profiles"]
    values = {index: _values(alone, index, one) for index, one in enumerate(given if isinstance(given, list) else ())}
    sets = tuple(tree for tree in values.values() if tree)
    try:
        hardware = _Hardware.model_validate(texts.value).hardware
    except ValidationError as error:
        wrong = (fix_at_definition(problem, texts) for problem in from_validation(error, texts))
        return Found((), sets, (*problems, *wrong))
    found: list[Profile] = []
    for index, profile in enumerate(hardware.profiles):
        path: Path = (*WHERE, index)
        if profile.name in (one.name for one in found):
            what = f"duplicate profile name {profile.name}"
            at_name = place_of(alone, (*path, "name"))
            problems.append(Problem(at_name, f"hardware.profiles[{index}].name", what, code="wrong-layer"))
        tree = values[index]
        assert tree is not None, "a valid profile has a mapping"
        found.append(Profile(profile.name, profile.match, tree, place_of(alone, path)))
    return Found(() if problems else tuple(found), sets, tuple(problems))


def _values(alone: Tree, index: int, profile: Any) -> Tree | None:
    """Return the values of one profile without forbidden keys, or None if they are not a mapping."""
    path: Path = (*WHERE, index, "set")
    if not isinstance(at(alone, path), dict):
        return None
    values = below(alone, path, f"profile {profile.get('name', index)}")
    for fixed in FIXED:
        if fixed in values.keys:
            fault = Fault(fixed, values.keys[fixed], "a profile cannot set it", code="wrong-layer")
            values = without(values, fixed)
            values.faults.append(fault)
    return values
