"""Random trees split over layers. Oracles: a merge written here, and the texts themselves, read back at each place."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from appliance.config.composition.files import Reading, read_file
from appliance.config.merge import below, merged, without, without_notes
from appliance.config.yaml_loader import Place, Tree, read_yaml

NAMES = ("a", "b", "c", "d")


def random_value(source: random.Random, depth: int, mark: str) -> Any:
    """Return a value whose scalars are all different, so that they cannot be confused."""
    kind = source.randrange(6) if depth else source.randrange(3)
    if kind >= 3:
        names = source.sample(NAMES, source.randrange(len(NAMES) + 1))
        return {name: random_value(source, depth - 1, mark) for name in names}
    if kind == 2:
        return [f"{mark} {source.random()}" for _ in range(source.randrange(3))]
    return source.randrange(10**9) if kind else f"{mark} {source.random()}"


def random_mapping(source: random.Random, mark: str) -> dict[str, Any]:
    return {name: random_value(source, 3, mark) for name in source.sample(NAMES, source.randrange(5))}


def reference(low: Any, high: Any) -> Any:
    if not (isinstance(low, dict) and isinstance(high, dict)):
        return high
    both = {name: reference(low[name], high[name]) for name in low if name in high}
    return low | high | both


def written(source: random.Random, value: dict[str, Any]) -> str:
    """The value as JSON, which is YAML, in one of its layouts."""
    text = json.dumps(value, indent=source.choice((None, 1, 4)))
    return "# a comment\n" * source.randrange(3) + text + "\n"


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def read_back(text: str, place: Place) -> Any:
    """Return the JSON value at a place."""
    lines = text.split("\n")
    rest = "\n".join([lines[place.line - 1][place.column - 1 :], *lines[place.line :]])
    return json.JSONDecoder().raw_decode(rest)[0]


def check_places(tree: Tree, texts: dict[str, str]) -> int:
    """Check that every value and key of the tree is at its recorded place; return the number of checked places."""

    def walk(value: Any, path: tuple[Any, ...]) -> int:
        if path and not isinstance(path[-1], int):
            key = tree.keys[path]
            assert read_back(texts[key.source], key) == path[-1], path
        there = read_back(texts[tree.values[path].source], tree.values[path])
        if isinstance(value, dict):
            assert isinstance(there, dict), path
            return 1 + sum(walk(inner, (*path, name)) for name, inner in value.items())
        assert there == value, path
        items = value if isinstance(value, list) else []
        return 1 + sum(walk(inner, (*path, index)) for index, inner in enumerate(items))

    for path in (*tree.keys, *tree.values):
        at(tree.value, path)  # raises if a place of a replaced value is left
    return walk(tree.value, ())


@pytest.mark.parametrize("seed", range(60))
def test_merged_trees_match_merged_mappings_with_correct_places(seed: int) -> None:
    source = random.Random(seed)
    values = [random_mapping(source, f"layer {number}") for number in range(source.randrange(1, 5))]
    texts = {f"f{number}": written(source, value) for number, value in enumerate(values)}
    trees = [read_yaml(text.encode(), name) for name, text in texts.items()]
    copies = [json.dumps(tree.value) for tree in trees]
    want: Any = {}
    for value in values:
        want = reference(want, value)
    found = merged(*trees)
    assert found.value == want
    assert check_places(found, texts) >= 1
    assert [json.dumps(tree.value) for tree in trees] == copies, "merging changes no layer"


@pytest.mark.parametrize("seed", range(40))
def test_files_that_extend_one_another_are_merged_left_to_right_and_the_file_wins(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    texts: dict[str, str] = {}

    def write(name: str, depth: int) -> dict[str, Any]:
        """Write a file and the files that it extends, in separate folders; return their merged value."""
        own, folder = {**random_mapping(source, name), "limits": {name: 1}}, tmp_path / name
        folder.mkdir()
        bases = [f"{name}{number}" for number in range(source.randrange(3 if depth else 1))]
        want: dict[str, Any] = {}
        for base in bases:
            want = reference(want, write(base, depth - 1))
        files = [f"../{base}/m.yaml" for base in bases]
        extends = {"extends": files[0] if len(files) == 1 and source.random() < 0.5 else files} if files else {}
        text = written(source, {**extends, **own} if source.random() < 0.5 else {**own, **extends})
        path = folder / "m.yaml"
        path.write_text(text)
        texts[str(path)] = text
        return reference(want, own)

    want = write("f", 2)
    tree = read_file(Reading({}), tmp_path / "f/m.yaml")
    assert tree.value == want and not tree.faults
    check_places(tree, texts)
    for place in (*tree.keys.values(), *tree.values.values()):
        assert len(place.via) == len(Path(place.source).parent.name) - 1, "one hop for each letter of the folder"


def test_places_of_replaced_values_are_removed() -> None:
    low = read_yaml(b"a: {b: {c: 1, d: $x}, e: [1, 2]}\n", "low")
    for high in (b"a: 5\n", b"a: {b: 5, e: []}\n", b"a: {b: , e: x}\n"):
        tree = merged(low, read_yaml(high, "high"))
        for table in (tree.keys, tree.values, tree.dollars):
            assert {place.source for path, place in table.items() if len(path) > 2} == set()


def test_a_part_of_a_tree_keeps_its_places_and_names_its_layer() -> None:
    tree = read_yaml(b"a: {b: 1}\no:\n  dev: {a: {b: no}, c: $$}\n", "m")
    part = below(tree, ("o", "dev"), "overlay dev")
    assert part.value == {"a": {"b": "no"}, "c": "$$"}
    assert part.values[("a", "b")] == Place("m", 3, 16, "overlay dev", base=("o", "dev"))
    assert [(fault.path, fault.place.layer) for fault in part.faults] == [(("a", "b"), "overlay dev")]
    assert [(place.column, place.base) for place in part.dollars[("c",)]] == [(24, ("o", "dev")), (25, ("o", "dev"))]
    rest = without(tree, ("o",))
    assert (rest.value, rest.faults, set(rest.values)) == ({"a": {"b": 1}}, [], {(), ("a",), ("a", "b")})


def test_notes_are_ignored_everywhere_but_user_names_are_not_notes() -> None:
    text = b"x-a: [no, &b 1]\nlimits: {x-why: 010, max_stop: 1}\nl: [{x-c: 1, d: 2}]\n"
    text += b"secrets: {x-key: {env: A}}\noverlays: {x-large: {x-d: 1, secrets: {x-e: {env: B}}}}\n"
    tree = without_notes(read_yaml(text, "m"))
    assert tree.value == {
        "limits": {"max_stop": 1},
        "l": [{"d": 2}],
        "secrets": {"x-key": {"env": "A"}},
        "overlays": {"x-large": {"secrets": {"x-e": {"env": "B"}}}},
    }
    assert not tree.faults
