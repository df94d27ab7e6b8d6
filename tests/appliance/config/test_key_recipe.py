"""One declaration of a key yields its flag, variable, effect, documentation, names elsewhere, notes and configuration.

The tests declare keys that no product file mentions, and check everything that is derived from them.
"""

import argparse
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import pytest
from pydantic import Field, ValidationError

from appliance.cli.explanations.keys import explain_key
from appliance.cli.flags import add_flags
from appliance.config import aliases, effects, keys, live_keys, settings, suggest
from appliance.config.gateway import GatewayConfig
from appliance.config.key import LIVE, LIVE_OUTPUTS, Effect, Limit, Switch, declare, declared
from appliance.config.manifest import API_VERSION, Manifest
from appliance.config.manifest_file import ManifestFile
from appliance.config.overrides import variable
from appliance.config.schema_file import manifest_page, manifest_schema
from appliance.config.sections.engine import Engine, Scheduling
from appliance.config.sections.limits import Limits
from appliance.config.sections.values import Auto, Bytes, Count, Section
from appliance.config.settings import Given, Option, Settings, load
from appliance.hardware.machine import Machine
from appliance.planning.choice import Choice
from appliance.planning.diff.config_snapshot import read_snapshot
from appliance.planning.diff.diff import Diff, compare
from appliance.planning.targets import passed_on
from engine.api.config import EngineConfig

ROOT = Path(__file__).resolve().parents[3]
MACHINE = Machine(cores=1, cores_from="affinity", memory_free=2**30, memory_from="MemAvailable")
ENGINE_EFFECT = Effect("engine", outputs="rounding", memory=True)
DERIVED = (
    *(keys.schema, keys.metadata, keys.keys, keys.path_keys, effects.effects, live_keys.live_fields),
    *(aliases.foreign_keys, suggest.suggest_key, suggest._by_word),
)


class WidgetLimits(Limits):
    max_widgets: Count = declare(
        7,
        effect=LIVE,
        affects="gateway.widgets.size",
        aliases={"vLLM": "widget_cap", "SGLang": ("widgetLimit", "max-gizmos"), "synonyms": "gizmos"},
        clients=Limit("more widgets get 400"),
        flags=("-w", "--widgets"),
        example=9,
    )
    """Maximum widgets of a request."""
    widgets: bool = declare(
        True, effect=LIVE_OUTPUTS, target="gateway.widgets.on", clients=Switch(off="no widgets", on="widgets")
    )
    """Permit widgets."""


class WidgetScheduling(Scheduling):
    max_gadgets: Annotated[int, Field(ge=1, le=64)] | Auto = declare(
        "auto",
        effect=ENGINE_EFFECT,
        target=("engine.max_gadgets", "gateway.gadgets"),
        examples=(8, 16),
    )
    """Maximum gadgets of a step; auto is 4."""
    gadget_file: str | None = declare(None, effect=ENGINE_EFFECT, is_path=True, example="gadgets.bin")
    """File of the gadgets."""


class WidgetEngine(Engine):
    scheduling: WidgetScheduling = WidgetScheduling()
    """Scheduling with gadgets."""


class WidgetManifest(Manifest):
    limits: WidgetLimits = WidgetLimits()
    """Limits with widgets."""
    engine: WidgetEngine = WidgetEngine()
    """Engine with gadgets."""


class WidgetFile(ManifestFile):
    limits: WidgetLimits = WidgetLimits()
    """Limits with widgets."""
    engine: WidgetEngine = WidgetEngine()
    """Engine with gadgets."""


@pytest.fixture(autouse=True)
def widgets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the manifest with the additional keys, except in tests of the real one."""
    if "real" in request.node.name:
        yield
        return
    monkeypatch.setattr(keys, "ManifestFile", WidgetFile)
    monkeypatch.setattr(settings, "Manifest", WidgetManifest)
    for derived in DERIVED:
        derived.cache_clear()
    yield
    for derived in DERIVED:
        derived.cache_clear()


def given(folder: Path, *options: Option, name: str = "m.yaml", **environ: str) -> Given:
    file = folder / name
    if not file.exists():
        file.write_text(f"apiVersion: {API_VERSION}\nmodel: {{source: {{path: absent}}}}\n")
    return Given(file, options, environ)


def parsed(*words: str) -> tuple[Option, ...]:
    parser = argparse.ArgumentParser()
    add_flags(parser, every=False)
    options: tuple[Option, ...] = parser.parse_args(words).options
    return options


def limits_of(found: Settings) -> WidgetLimits:
    assert isinstance(found.manifest.limits, WidgetLimits)
    return found.manifest.limits


def differing(folder: Path, **values: Any) -> Diff:
    options = tuple(Option("--set", key, str(value)) for key, value in values.items())
    return compare(*(read_snapshot(given(folder, *each), MACHINE) for each in ((), options)))


def test_every_form_of_the_flag_sets_the_key(tmp_path: Path) -> None:
    for words in (["--limits.max-widgets", "3"], ["-w", "3"], ["--widgets", "3"]):
        assert limits_of(load(given(tmp_path, *parsed(*words)))).max_widgets == 3


def test_help_shows_keys_with_a_short_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, every=False)
    shown = " ".join(parser.format_help().split())
    assert "-w MAX_WIDGETS, --widgets MAX_WIDGETS" in shown
    assert "Maximum widgets of a request. [a whole number of at least 1; default 7]" in shown
    assert "max-gadgets" not in shown


def test_the_environment_variable_sets_the_key(tmp_path: Path) -> None:
    name = variable(("limits", "max_widgets"))
    assert name == "SLIPWAY__LIMITS__MAX_WIDGETS"
    assert limits_of(load(given(tmp_path, **{name: "5"}))).max_widgets == 5


def test_the_default_applies_and_constraints_hold(tmp_path: Path) -> None:
    assert limits_of(load(given(tmp_path))).max_widgets == 7
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        WidgetLimits(max_widgets=0)


def test_a_required_key_with_constraints_is_required() -> None:
    class Widget(Section):
        name: str = declare(effect=LIVE, pattern="^[a-z]+$")

    assert Widget.model_json_schema()["required"] == ["name"]
    with pytest.raises(ValidationError, match="pattern"):
        Widget(name="A")


def test_the_json_schema_describes_the_key_without_its_metadata() -> None:
    node = manifest_schema()["$defs"]["WidgetLimits"]["properties"]["max_widgets"]
    assert node == {
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"\$\{"}],
        "default": 7,
        "description": "Maximum widgets of a request.",
        "examples": [9],
    }


def test_the_page_of_the_manifest_has_a_row_for_the_key_and_its_names_elsewhere() -> None:
    page = manifest_page()
    assert "| `max_widgets` | a whole number of at least 1 | 7 | `9` | reload | Maximum widgets of a request. |" in page
    assert "| `widgets` | true or false | true |  | reload; outputs | Permit widgets. |" in page
    row = "| `max_gadgets` | a whole number from 1 to 64 or auto | auto | `8`, `16` | engines; rounding, memory | "
    assert row + "Maximum gadgets of a step; auto is 4. |" in page
    assert "| `limits.max_widgets` | widget_cap (vLLM), widgetLimit (SGLang), max-gizmos (SGLang) |\n" in page


@pytest.mark.parametrize("word", ["max_widgets", "--limits.max-widgets", "widget_cap", "gizmos", "widget-limit"])
def test_explain_finds_the_key_by_every_name(word: str) -> None:
    text = explain_key(word)
    assert "Maximum widgets of a request." in text
    assert "No restart: `slipway reload` applies it." in text
    assert "flag       --limits.max-widgets 9" in text
    assert "variable   SLIPWAY__LIMITS__MAX_WIDGETS=9" in text
    assert "elsewhere  widget_cap (vLLM), widgetLimit (SGLang), max-gizmos (SGLang)" in text


@pytest.mark.parametrize("word", ["widget_cap", "max_gizmos", "Gizmos"])
def test_the_name_of_another_server_is_answered_with_the_key(word: str) -> None:
    assert suggest.suggest_key(("engine", word)) == (
        "the name here is limits.max_widgets",
        (("limits", "max_widgets"),),
    )


def test_a_live_key_names_the_fields_that_a_reload_changes() -> None:
    assert effects.effect("limits.max_widgets") == LIVE
    assert set(live_keys.live_fields()["limits.max_widgets"]) == {"limits.max_widgets", "widgets.size"}
    assert live_keys.live_fields()["limits.widgets"] == ("limits.widgets", "widgets.on")
    assert "engine.scheduling.max_gadgets" not in live_keys.live_fields()


def test_diff_lists_reload_and_note_of_a_live_key(tmp_path: Path) -> None:
    found = differing(tmp_path, **{"limits.max_widgets": 3})
    assert (found.live, found.restart, found.outputs) == (("limits.max_widgets",), (), ())
    assert found.clients == ("limits.max_widgets: 7 → 3, tighter: more widgets get 400",)
    assert differing(tmp_path, **{"limits.max_widgets": 8}).clients == ("limits.max_widgets: 7 → 8, wider",)


def test_diff_lists_the_note_of_a_switch(tmp_path: Path) -> None:
    found = differing(tmp_path, **{"limits.widgets": "false"})
    assert found.clients == ("limits.widgets: no widgets",)
    assert found.outputs == ("limits.widgets",)


def test_diff_lists_the_restart_of_an_engine_key(tmp_path: Path) -> None:
    found = differing(tmp_path, **{"engine.scheduling.max_gadgets": 8})
    assert (found.live, found.restart) == ((), ("engines",))
    assert found.rounding == ("engine.scheduling.max_gadgets",)
    assert found.clients == ()


def test_relative_paths_start_at_the_folder_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "base.yaml").write_text("engine: {scheduling: {gadget_file: gadgets.bin}}\n")
    file = tmp_path / "m.yaml"
    file.write_text(f"apiVersion: {API_VERSION}\nextends: parts/base.yaml\nmodel: {{source: {{path: absent}}}}\n")
    found = load(Given(file))
    path = ("engine", "scheduling", "gadget_file")
    assert found.paths()[path] == "parts/gadgets.bin"


def test_the_value_reaches_every_target_and_a_choice_replaces_it(tmp_path: Path) -> None:
    manifest = load(given(tmp_path, Option("--set", "engine.scheduling.max_gadgets", "3"))).manifest
    assert passed_on(manifest, "gateway")["gadgets"] == passed_on(manifest, "engine")["max_gadgets"] == 3
    assert passed_on(manifest, "gateway.widgets") == {"on": True}
    choices = {"engine.scheduling.max_gadgets": Choice(4, "the default"), "limits.widgets": Choice(False)}
    assert passed_on(manifest, "engine", choices)["max_gadgets"] == 4
    assert passed_on(manifest, "gateway", choices)["gadgets"] == 4
    assert passed_on(manifest, "gateway.widgets", choices) == {"on": False}
    assert not {"on", "widgets", "max_gadgets", "max_widgets"} & passed_on(manifest, "gateway", choices).keys()


def test_a_section_of_the_gateway_has_the_value_and_a_reload_replaces_it(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"names": ("m",), "model": "m", "engines": (), "max_context": 9, "vocab_size": 9}
    now, wanted = (
        GatewayConfig(**facts, limits=limits_of(load(given(tmp_path, Option("--set", "limits.max_stop", text)))))
        for text in ("3", "4")
    )
    assert now.limits.max_stop == 3
    assert live_keys.mixed(now, wanted, ["limits.max_stop"], version="2").limits == wanted.limits
    assert live_keys.fixed_fields(now, wanted) == ()


def test_a_key_in_a_mapping_or_a_list_is_found_below_a_star() -> None:
    class Inner(Section):
        size: Bytes = declare(1, effect=LIVE)

    class Other(Section):
        file: str = declare(effect=LIVE)

    class Outer(Section):
        named: dict[str, Inner | Other] = {}
        listed: tuple[Inner, ...] = ()
        maybe: Inner | None = None
        plain: int = 0

    found = [".".join(path) for path, _ in declared(Outer)]
    assert found == ["named.*.size", "named.*.file", "listed.*.size", "maybe.size"]


CONFIGS = {"engine": EngineConfig, "gateway": GatewayConfig}


def _check_field(target: str) -> None:
    """Raise KeyError if the process configurations have no such field."""
    root, *names = target.split(".")
    kind: Any = CONFIGS[root]
    for name in names:
        field = {one.name: one for one in msgspec.structs.fields(kind)}[name]
        options = get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
        kind = next((one for one in options if hasattr(one, "__struct_fields__")), None)


def test_targets_of_the_real_manifest_exist_and_get_one_key_each() -> None:
    targets = [target for one in keys.metadata().values() for target in one.targets]
    assert len(targets) > 20
    assert len(targets) == len(set(targets))
    for one in keys.metadata().values():
        for target in (*one.targets, *one.affects):
            _check_field(target)


def test_fields_of_the_real_engine_have_the_path_of_their_key() -> None:
    for key, one in keys.metadata().items():
        for target in one.targets:
            root, _, field = target.partition(".")
            if root == "engine" and not field.startswith("model.task."):
                assert field == key.removeprefix("engine."), key


def test_every_real_live_key_names_a_field_of_the_gateway() -> None:
    assert [name for name, found in live_keys.live_fields().items() if not found] == []


def test_real_names_of_other_servers_belong_to_one_key_each() -> None:
    owners: dict[str, str] = {}
    for name, one in keys.metadata().items():
        for words in one.aliases.values():
            for word in words:
                assert owners.setdefault(aliases.flat(word), name) == name, word
    assert len(owners) > 70


@pytest.mark.parametrize(
    ("key", "files"),
    [
        (
            "engine.record_size",  # two uses: the recorder and the size of a rendered volume
            (
                *("config/sections/engine.py", "engine/api/config.py"),
                *("engine/core/loop.py", "deployment/service.py"),
            ),
        ),
        (
            "observability.vllm_metrics",
            ("config/sections/observability.py", "observability/metrics.py"),
        ),
        (
            "endpoints.invocations_without_key",
            ("config/sections/endpoints.py", "server/http/websocket.py", "server/middleware.py"),
        ),
    ],
)
def test_a_plain_real_key_is_named_in_its_section_its_configuration_and_its_uses(
    key: str, files: tuple[str, ...]
) -> None:
    """The files are the declaration, the configuration of an engine, and the code that uses the value."""
    words = {key.rpartition(".")[2], *(target.rpartition(".")[2] for target in keys.metadata()[key].targets)}
    named = {
        path.relative_to(ROOT).as_posix().removeprefix("appliance/")
        for folder in ("appliance", "engine")
        for path in (ROOT / folder).rglob("*.py")
        if words & set(re.findall(r"\w+", path.read_text()))
    }
    assert named == set(files)
