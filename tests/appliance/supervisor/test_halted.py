"""`exhausted: halt`: failures of engines or of the checkpoint do not end the appliance."""

import json

import pytest

from tests.tiers import thinned

WORDS = "checkpoint: model.safetensors: the weights are damaged"


@pytest.fixture
def halted(launched, tmp_path):
    """An appliance that is halted, by an engine or by its gateway."""

    def start(by: str):
        folder = tmp_path / "a"
        folder.mkdir()
        if by == "gateway":
            (folder / "broken").write_text(WORDS)
        (folder / "termination-log").touch()
        engine = ["permanent", WORDS] if by == "engine" else ["run"]
        appliance = launched(exhausted="halt", engines=[engine, ["run"]])
        appliance.until(lambda: b"halted: " in appliance.out() or appliance.process.poll() is not None)
        assert appliance.process.poll() is None, appliance.output()
        return appliance

    return start


@pytest.mark.parametrize("by", thinned(["engine", "gateway"], kept=["gateway"]))
def test_damaged_checkpoint_halts_the_appliance(halted, by):
    appliance = halted(by)
    appliance.started("gateway", times=2 if by == "gateway" else 1)
    appliance.until(lambda: not any(" engine " in command for command in appliance.alive().values()))
    (run,) = appliance.runs.iterdir()
    told = json.loads((run / "halted").read_text())
    assert (told["exit"], told["code"]) == ("checkpoint", 10) and "damaged" in told["message"]
    assert json.loads((appliance.directory / "termination-log").read_text())["code"] == 10
    assert appliance.process.poll() is None
    assert appliance.terminate() == 10
    assert appliance.alive() == {}


def test_damaged_checkpoint_ends_the_appliance_unless_it_halts(launched, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "broken").write_text(WORDS)
    appliance = launched()
    assert appliance.end() == 10
    assert len(appliance.pids("gateway")) == 1
