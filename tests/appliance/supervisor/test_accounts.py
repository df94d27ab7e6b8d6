"""Reaper and gateway report one crash at the same moment, and either of them may fail to write its report."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from appliance.runtime.inflight import OpenRequest, open_file, read_open, write_open
from appliance.supervisor.death import Death
from appliance.supervisor.reaper import Keeper, Kept, take_death

ROUNDS = 300
REQUESTS = [OpenRequest(f"r{number}", 3, 5) for number in range(40)]


def test_the_keeper_and_the_gateway_do_not_write_into_one_file(tmp_path: Path) -> None:
    keeper = Keeper(Kept(program="engine-0", argv=("true",), directory=str(tmp_path)))
    failed: list[BaseException] = []

    def tell(one: object) -> None:
        try:
            for number in range(ROUNDS):
                if one is keeper:
                    keeper._tell(Death(pid=number, lived_s=1.0))
                else:
                    write_open(str(tmp_path), "engine-0", REQUESTS)
                    assert read_open(tmp_path, "engine-0") == tuple(REQUESTS)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=tell, args=(one,)) for one in (keeper, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    death = take_death(tmp_path, "engine-0")
    assert death is not None and death.pid == ROUNDS - 1
    assert [path.name for path in tmp_path.iterdir()] == ["engine-0.open"]


def test_a_gateway_that_cannot_say_what_was_open_goes_on(tmp_path: Path) -> None:
    write_open(str(tmp_path / "nowhere"), "engine-0", REQUESTS)
    assert not open_file(tmp_path / "nowhere", "engine-0").exists()


def test_a_keeper_without_a_disk_ends_as_its_engine_did(tmp_path: Path) -> None:
    kept = Kept(program="engine-0", argv=("/bin/sh", "-c", "exit 7"), directory=str(tmp_path))
    (tmp_path / "kept").write_bytes(msgspec.json.encode(kept))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "appliance.supervisor.reaper", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
    )
    assert done.returncode == 7
    assert "how the program ended is not told" in done.stderr and "Traceback" not in done.stderr
    assert take_death(tmp_path, "engine-0") is None
