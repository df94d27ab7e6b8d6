"""Real keys distributed at random over all sources. Oracle: the order of precedence in docs/manifest.md."""

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.config.settings import Given, Option, load, variable
from appliance.config.yaml_loader import Place

# The highest first.
SOURCES = ("option", "environment", "late overlay", "early overlay", "manifest", "late base", "early base", "profile")

WORDS: dict[str, Callable[[random.Random], Any]] = {
    "limits.max_stop": lambda r: r.randrange(1, 10**6),
    "limits.max_choices": lambda r: r.randrange(1, 10**6),
    "limits.max_prompts": lambda r: r.randrange(1, 10**6),
    "limits.max_output_tokens": lambda r: r.randrange(1, 10**6),
    "model.names": lambda r: [f"n{r.randrange(10**6)}", f"m{r.randrange(10**6)}"],
    "model.max_context": lambda r: r.randrange(2, 10**6),
    "endpoints.host": lambda r: f"h{r.randrange(10**6)}",
    "engine.cache.block_tokens": lambda r: r.randrange(1, 1025),
    "engine.scheduling.max_running": lambda r: r.randrange(1, 4097),
    "engine.sampling.temperature": lambda r: r.randrange(1, 2000) / 1000,
    "hardware.memory_share": lambda r: r.randrange(1, 1000) / 1000,
    "observability.log_level": lambda r: r.choice(("debug", "info", "warning", "error")),
    "endpoints.docs": lambda r: r.random() < 0.5,
}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        within = tree
        for part in above:
            within = within.setdefault(part, {})
        within[last] = value
    return tree


def at(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = getattr(value, part)
    return value


def first(*_: Any) -> tuple[str, ...]:
    return ("",)


def flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


@pytest.mark.parametrize("seed", range(40))
def test_the_higher_of_two_sources_of_a_key_wins_and_is_named(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    dealt: dict[str, dict[str, Any]] = {name: {} for name in SOURCES}
    for key, make in WORDS.items():
        for name in source.sample(SOURCES, source.randrange(len(SOURCES) + 1)):
            dealt[name][key] = make(source)
    trees = {name: nested(values) for name, values in dealt.items()}
    main = {"apiVersion": "slipway/v2", "extends": ["early.yaml", "sub/late.yaml"], **trees["manifest"]}
    main["model"] = {"source": {"path": "/m"}, **main.get("model", {})}
    profile = {"name": "here", "match": {}, "set": trees["profile"]}
    main["hardware"] = {**main.get("hardware", {}), "profiles": [profile]}
    main["overlays"] = {"late": trees["late overlay"], "spare": {"limits": {"max_stop": 1}}}
    files = {"m.yaml": main, "early.yaml": trees["early base"], "sub/late.yaml": trees["late base"]}
    files |= {"over.yaml": trees["early overlay"]}
    (tmp_path / "sub").mkdir()
    for file, value in files.items():
        (tmp_path / file).write_text(yaml.safe_dump(value, default_flow_style=source.choice((None, False, True))))
    options = tuple(Option(f"--set {key}", key, flow(value)) for key, value in dealt["option"].items())
    environ = {variable(tuple(key.split("."))): flow(value) for key, value in dealt["environment"].items()}
    overlays = (str(tmp_path / "over.yaml"), "late")
    found = load(Given(tmp_path / "m.yaml", options, environ, overlays), first)

    for key in WORDS:
        winner = next((name for name in SOURCES if key in dealt[name]), None)
        origin = found.origin(tuple(key.split(".")))
        if winner is None:
            assert origin == "default"
            continue
        want = dealt[winner][key]
        assert at(found.manifest, key) == (tuple(want) if isinstance(want, list) else want), (key, winner)
        where = {
            "option": f"--set {key}",
            "environment": variable(tuple(key.split("."))),
            "late overlay": "m.yaml (overlay late)",
            "early overlay": "over.yaml",
            "manifest": "m.yaml",
            "late base": "sub/late.yaml",
            "early base": "early.yaml",
            "profile": "m.yaml (profile here)",
        }[winner]
        short = re.sub(r":\d+:\d+", "", origin).removeprefix(f"{tmp_path}/")
        assert short == where, (key, winner)
        place = found.place(tuple(key.split(".")))
        if place.line:
            assert read_back(Path(place.source).read_text().split("\n"), place) == want, (key, winner)


def read_back(lines: list[str], place: Place) -> Any:
    """Return the scalar or list of scalars at a place."""
    rest = lines[place.line - 1][place.column - 1 :]
    if rest.startswith("["):
        return yaml.safe_load("\n".join([rest, *lines[place.line :]]).partition("]")[0] + "]")
    if rest.startswith("- "):
        start = " " * (place.column - 1) + "- "
        items = itertools.takewhile(lambda line: line.startswith(start), lines[place.line - 1 :])
        return yaml.safe_load("\n".join(items).replace(start, "- "))
    return yaml.safe_load(re.split("[,}]", rest)[0])
