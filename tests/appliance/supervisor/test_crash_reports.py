"""Reaper and gateway report one crash at the same moment, and either of them may fail to write its report."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from appliance.runtime.inflight import OpenRequest, inflight_path, read_inflight, write_inflight
from appliance.supervisor.exit_status import ExitStatus
from appliance.supervisor.reaper import Reaper, ReaperConfig, take_exit_status

ROUNDS = 300
REQUESTS = [OpenRequest(f"r{number}", 3, 5) for number in range(40)]


def test_reaper_and_gateway_write_separate_files(tmp_path: Path) -> None:
    reaper = Reaper(ReaperConfig(program="engine-0", argv=("true",), directory=str(tmp_path)))
    failed: list[BaseException] = []

    def tell(one: object) -> None:
        try:
            for number in range(ROUNDS):
                if one is reaper:
                    reaper._write_exit_status(ExitStatus(pid=number, duration_s=1.0))
                else:
                    write_inflight(str(tmp_path), "engine-0", REQUESTS)
                    assert read_inflight(tmp_path, "engine-0") == tuple(REQUESTS)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=tell, args=(one,)) for one in (reaper, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    death = take_exit_status(tmp_path, "engine-0")
    assert death is not None and death.pid == ROUNDS - 1
    assert [path.name for path in tmp_path.iterdir()] == ["engine-0.open"]


def test_gateway_continues_if_the_snapshot_cannot_be_written(tmp_path: Path) -> None:
    write_inflight(str(tmp_path / "nowhere"), "engine-0", REQUESTS)
    assert not inflight_path(tmp_path / "nowhere", "engine-0").exists()


def test_reaper_on_a_full_disk_exits_with_the_status_of_its_engine(tmp_path: Path) -> None:
    config = ReaperConfig(program="engine-0", argv=("/bin/sh", "-c", "exit 7"), directory=str(tmp_path))
    (tmp_path / "kept").write_bytes(msgspec.json.encode(config))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "appliance.supervisor.reaper", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
    )
    assert done.returncode == 7
    assert "the exit status is not recorded" in done.stderr and "Traceback" not in done.stderr
    assert take_exit_status(tmp_path, "engine-0") is None
