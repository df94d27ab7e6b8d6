"""Hardware profiles: values for machines of a kind. The first that matches gives what no other layer does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from appliance.config.composition.fix import mended_where_written
from appliance.config.composition.interpolate import Names, interpolate
from appliance.config.manifest import Section
from appliance.config.manifest_file import Match, Profiled
from appliance.config.merge import at, below, place_of, without
from appliance.config.problems import Problem, from_fault, from_validation
from appliance.config.yaml_loader import Fault, Path, Place, Tree

WHERE: Path = ("hardware", "profiles")
# What a profile cannot set: it is chosen when these are settled.
FIXED: tuple[Path, ...] = (("extends",), ("overlays",), ("variables",), WHERE)


@dataclass(frozen=True)
class Profile:
    """One of hardware.profiles. `values` is a tree of the manifest's keys whose places name the profile."""

    name: str
    match: Match
    values: Tree
    place: Place


# What hardware.device says without a profile, and the profiles → for each that was looked at why it does not match; ""
# for the last one if it does.
Choose = Callable[[str, tuple[Profile, ...]], tuple[str, ...]]


@dataclass(frozen=True)
class Found:
    """The profiles of a manifest. With problems in what they match and how they are called there are none, but
    `values` has what each of them sets, as far as it can be read."""

    profiles: tuple[Profile, ...] = ()
    values: tuple[Tree, ...] = ()
    problems: tuple[Problem, ...] = ()


class _Hardware(Section):
    hardware: Profiled


def split(tree: Tree) -> tuple[Tree, Tree]:
    """The tree without its profiles, and one that has nothing else."""
    if WHERE not in tree.keys:
        return tree, Tree(value={})
    alone = Tree(value={"hardware": {"profiles": at(tree, WHERE)}}, values={(): place_of(tree, ())})
    for mine, theirs in ((alone.keys, tree.keys), (alone.values, tree.values)):
        mine |= {path: place for path, place in theirs.items() if path[:2] == WHERE or path == WHERE[:1]}
    alone.dollars = {path: places for path, places in tree.dollars.items() if path[:2] == WHERE}
    alone.faults = [fault for fault in tree.faults if fault.path[:2] == WHERE]
    return without(tree, WHERE), alone


def read(alone: Tree, names: Names) -> Found:
    """The profiles of the second tree of `split`. Their values are interpolated when they are merged, not here."""
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
    problems = [mended_where_written(problem, texts) for fault in texts.faults if (problem := from_fault(fault))]
    given = texts.value["hardware"]["profiles"]
    values = {index: _values(alone, index, one) for index, one in enumerate(given if isinstance(given, list) else ())}
    sets = tuple(tree for tree in values.values() if tree)
    try:
        hardware = _Hardware.model_validate(texts.value).hardware
    except ValidationError as error:
        wrong = (mended_where_written(problem, texts) for problem in from_validation(error, texts))
        return Found((), sets, (*problems, *wrong))
    found: list[Profile] = []
    for index, profile in enumerate(hardware.profiles):
        path: Path = (*WHERE, index)
        if profile.name in (one.name for one in found):
            what = f"a second profile is called {profile.name}"
            at_name = place_of(alone, (*path, "name"))
            problems.append(Problem(at_name, f"hardware.profiles[{index}].name", what, code="wrong-layer"))
        tree = values[index]
        assert tree is not None, "a valid profile has a mapping"
        found.append(Profile(profile.name, profile.match, tree, place_of(alone, path)))
    return Found(() if problems else tuple(found), sets, tuple(problems))


def _values(alone: Tree, index: int, profile: Any) -> Tree | None:
    """What one profile sets, if that is a mapping, without what it cannot set."""
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
