"""Old names of keys in files that are extended, in overlays and in profiles, with a table given here."""

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.cli.fix import fix
from appliance.config import deprecated
from appliance.config.deprecated import Deprecated
from appliance.config.findings import findings
from appliance.config.settings import Given, Settings, load

Load = Callable[..., Settings]
Refuse = Callable[..., list[str]]
TABLE = (
    Deprecated("server.tcp_port", "endpoints.port", "0.2", "0.4"),
    Deprecated("engine.batch", "engine.scheduling.max_running", "0.3", "1.0"),
    Deprecated("restarts", "lifecycle.restart", "0.3", "1.0"),
)
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n"


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecated, "DEPRECATED", TABLE)


def notices(found: Settings) -> list[str]:
    return [str(notice).partition("deprecated")[0] for notice in found.notices]


def test_a_base_may_have_the_old_name_and_the_manifest_the_new_one(loaded: Load) -> None:
    base = "server: {tcp_port: 81}\nrestarts: {max: 3, window: 9s}\n"
    text = HEAD + "extends: base.yaml\nlifecycle: {restart: {max: 4}}\n"
    found = loaded(text, files={"base.yaml": base})
    assert (found.manifest.endpoints.port, found.manifest.lifecycle.restart.max) == (81, 4)
    assert found.manifest.lifecycle.restart.window == 9
    assert found.origin(("endpoints", "port")) == "base.yaml:1:20"
    assert notices(found) == ["base.yaml:1:10: server.tcp_port: ", "base.yaml:2:1: restarts: "]


def test_a_base_that_two_files_extend_warns_once(loaded: Load) -> None:
    files = {"a.yaml": "extends: base.yaml\n", "b.yaml": "extends: base.yaml\n", "base.yaml": "engine: {batch: 3}\n"}
    found = loaded(HEAD + "extends: [a.yaml, b.yaml]\n", files=files)
    assert found.manifest.engine.scheduling.max_running == 3 and len(found.notices) == 1


@pytest.mark.parametrize("words", [(), ("--overlay dev",)])
def test_an_overlay_is_read_under_its_old_names_and_warned_of_chosen_or_not(loaded: Load, words: tuple[str]) -> None:
    text = HEAD + "engine: {batch: 2}\noverlays: {dev: {engine: {batch: 3}, server: {tcp_port: 81}}}\n"
    found = loaded(text, *words)
    assert found.manifest.engine.scheduling.max_running == (3 if words else 2)
    assert found.manifest.endpoints.port == (81 if words else 8000)
    assert notices(found) == [
        "m.yaml:3:10: engine.batch: ", "m.yaml:4:47: server.tcp_port: ", "m.yaml:4:27: engine.batch: "
    ]  # fmt: skip
    assert str(found.notices[1]).endswith("in overlay dev")


def test_old_names_in_profiles_of_files_and_overlays_act_too(loaded: Load) -> None:
    text = HEAD + "hardware:\n  profiles:\n    - {name: p, match: {}, set: {engine: {batch: '${N:-5}'}}}\n"
    found = loaded(text, choose=lambda device, profiles: ("",))
    assert found.manifest.engine.scheduling.max_running == 5
    assert notices(found) == ["m.yaml:5:43: engine.batch: "] and "in profile p" in str(found.notices[0])
    text = HEAD + "overlays:\n  dev:\n    hardware:\n      profiles:\n"
    text += "        - {name: p, match: {}, set: {engine: {batch: 6}}}\n"
    found = loaded(text, "--overlay dev", choose=lambda device, profiles: ("",))
    assert found.manifest.engine.scheduling.max_running == 6
    assert str(found.notices[0]).endswith("in profile p of overlay dev")


def test_interpolation_works_under_an_old_name(loaded: Load, refused: Refuse) -> None:
    text = HEAD + "server:\n  tcp_port: ${PORT}\n"
    assert loaded(text, PORT="81").manifest.endpoints.port == 81
    assert refused(text) == ["m.yaml:4:13: endpoints.port: ${PORT} is not set; set it, or write ${PORT:-default}"]
    (problem,) = refused(HEAD + "server: {tcp_port: 081}\n")
    assert problem.startswith("m.yaml:3:20: endpoints.port: 081: ") and problem.endswith("write 81")


def test_both_names_in_one_overlay_are_refused_at_the_old_one(refused: Refuse) -> None:
    text = HEAD + "overlays: {dev: {endpoints: {port: 80}, server: {tcp_port: 81}}}\n"
    assert refused(text) == [
        "m.yaml:3:50: server.tcp_port: is set together with endpoints.port, its name since 0.2; "
        "remove the old one; in overlay dev"
    ]


def test_fix_renames_them_in_their_files(loaded: Load) -> None:
    text = HEAD + "extends: base.yaml\noverlays:\n  dev: {server: {tcp_port: 81}}\n"
    text += "hardware:\n  profiles:\n    - name: p\n      match: {}\n      set:\n        server: {tcp_port: 82}\n"
    base = "engine:\n  batch: 3\n"
    found = loaded(text, files={"base.yaml": base})
    assert len(fix(findings(found.notices))) == 3
    assert Path("base.yaml").read_text() == "engine:\n  scheduling: {max_running: 3}\n"
    assert Path("m.yaml").read_text() == text.replace("server: {tcp_port: 81}", "endpoints: {port: 81}").replace(
        "server: {tcp_port: 82}", "endpoints: {port: 82}"
    )
    assert load(Given(Path("m.yaml"))).notices == ()
