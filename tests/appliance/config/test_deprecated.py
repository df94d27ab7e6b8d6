"""Old names of keys, with a table given here, because no key is deprecated yet."""

import json
from pathlib import Path

import pytest

from appliance.cli.main import main
from appliance.config import deprecated
from appliance.config.deprecated import DEPRECATED, Deprecated
from appliance.config.keys import find
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, Settings, load
from tests.appliance.cli.test_cli import manifest  # noqa: F401  (a fixture)

TABLE = (
    Deprecated("server.tcp_port", "endpoints.port", "0.2", "0.4"),
    Deprecated("engine.batch", "engine.scheduling.max_running", "0.3", "1.0"),
    Deprecated("restarts", "lifecycle.restart", "0.3", "1.0"),
)
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\n"


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecated, "DEPRECATED", TABLE)


def loaded(folder: Path, text: str, *options: tuple[str, str], **environ: str) -> Settings:
    path = folder / "m.yaml"
    path.write_text(HEAD + text)
    return load(Given(path, tuple(Option(f"--set {key}", key, value) for key, value in options), environ))


def test_the_old_name_of_a_halted_appliance_is_accepted(tmp_path: Path) -> None:
    found = loaded(tmp_path, "lifecycle: {restart: {exhausted: park}}\n")
    assert found.manifest.lifecycle.restart.exhausted == "halt"


def test_the_real_table_names_keys_that_are_not_there_and_keys_that_are() -> None:
    for row in DEPRECATED:
        assert find(row.old_path) is None and find(row.new_path) is not None
        assert [int(part) for part in row.since.split(".")] < [int(part) for part in row.removed.split(".")]


def test_an_old_name_works_and_warns_once_with_place_replacement_and_version(tmp_path: Path) -> None:
    found = loaded(tmp_path, "server:\n  tcp_port: 81\n")
    assert found.manifest.endpoints.port == 81
    (notice,) = found.notices
    assert str(notice) == (
        f"{tmp_path / 'm.yaml'}:4:3: server.tcp_port: deprecated since 0.2: renamed to endpoints.port; "
        "0.4 no longer accepts server.tcp_port"
    )
    assert found.origin(("endpoints", "port")) == f"{tmp_path / 'm.yaml'}:4:13"


def test_a_whole_section_moves_with_the_places_of_its_keys(tmp_path: Path) -> None:
    found = loaded(tmp_path, "restarts:\n  max: 3\n  window: 9s\n")
    assert (found.manifest.lifecycle.restart.max, found.manifest.lifecycle.restart.window) == (3, 9)
    assert found.origin(("lifecycle", "restart", "window")) == f"{tmp_path / 'm.yaml'}:5:11" and len(found.notices) == 1


def test_options_and_variables_with_an_old_name_work_too(tmp_path: Path) -> None:
    found = loaded(tmp_path, "", ("engine.batch", "3"), SLIPWAY__SERVER__TCP_PORT="82")
    assert (found.manifest.engine.scheduling.max_running, found.manifest.endpoints.port) == (3, 82)
    assert sorted(str(notice).partition(":")[0] for notice in found.notices) == [
        "--set engine.batch",
        "SLIPWAY__SERVER__TCP_PORT",
    ]


def test_precedence_follows_the_layer_not_the_name(tmp_path: Path) -> None:
    assert loaded(tmp_path, "endpoints: {port: 80}\n", SLIPWAY__SERVER__TCP_PORT="82").manifest.endpoints.port == 82
    assert loaded(tmp_path, "server: {tcp_port: 80}\n", ("endpoints.port", "83")).manifest.endpoints.port == 83


def test_both_names_in_one_file_are_refused_at_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"m\.yaml:4:10: server\.tcp_port: is set together with endpoints\.port"):
        loaded(tmp_path, "endpoints: {port: 80}\nserver: {tcp_port: 81}\n")


def test_a_wrong_value_under_an_old_name_is_refused_at_its_position(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"m\.yaml:3:20: endpoints\.port: 99999; "):
        loaded(tmp_path, "server: {tcp_port: 99999}\n")


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_check_warns_once_and_succeeds(
    manifest: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    form: str,
) -> None:
    manifest.write_text(manifest.read_text() + "server: {tcp_port: 81}\n")
    assert main(["check", "--format", form, str(manifest)]) == 0
    out, err = capsys.readouterr()
    assert (out + err).count("0.4 no longer accepts server.tcp_port") == 1
    if form == "json":
        (one,) = json.loads(out)
        assert one["level"] == "warning" and one["edits"]
    if form == "github":
        assert out.startswith("::warning file=")
    if form == "sarif":
        assert json.loads(out)["runs"][0]["results"][0]["level"] == "warning"


def test_fix_writes_the_new_name(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    before = manifest.read_text()
    manifest.write_text(before + "server: {tcp_port: 81}\nengine:\n  batch: 3\n")
    assert main(["check", "--fix", str(manifest)]) == 0
    after = manifest.read_text()
    assert "tcp_port" not in after and "batch" not in after
    assert "endpoints: {port: 81}\n" in after and "  scheduling: {max_running: 3}\n" in after
    capsys.readouterr()
    assert main(["check", str(manifest)]) == 0
    out, err = capsys.readouterr()
    assert not err and ": ok, " in out and "no longer accepts" not in out
