import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.launch import rundir
from appliance.launch.rundir import Address


def test_a_place_too_long_for_sockets_is_passed_over_and_left_clean(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 80)
    place.mkdir()
    with rundir.run_directory({"XDG_RUNTIME_DIR": str(place)}) as directory:
        assert len(os.fsencode(directory / "supervisor.sock.4194304")) <= 107  # sun_path without its final zero
        assert place not in directory.parents
    assert list(place.iterdir()) == [] and not directory.exists()


def test_without_any_place_the_message_names_all_and_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / ("x" * 80)
    place.mkdir()
    monkeypatch.setattr(rundir, "places", lambda environment: [place, tmp_path / "none"])
    with pytest.raises(rundir.NoRunDirectory) as caught, rundir.run_directory({}):
        pass
    for words in (f"{place}: path too long", f"{tmp_path / 'none'}: No such file", "set XDG_RUNTIME_DIR"):
        assert words in str(caught.value)


def test_appliances_whose_launcher_is_gone_do_not_run(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name, address in (
        ("slipway-alive", Address(os.getpid(), "alive", 1)),
        ("slipway-dead", Address(ended.pid, "dead", 2)),
        ("other-alive", Address(os.getpid(), "other", 3)),
    ):
        (tmp_path / name).mkdir()
        rundir.write_address(tmp_path / name, address)
    (tmp_path / "slipway-damaged").mkdir()
    (tmp_path / "slipway-damaged" / "address.json").write_text("{")
    found = {address.host for address in rundir.running({"XDG_RUNTIME_DIR": str(tmp_path)})}
    assert found & {"alive", "dead", "other"} == {"alive"}
