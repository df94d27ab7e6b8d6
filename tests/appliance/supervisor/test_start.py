"""The start of the appliance: its output, and what each program gets."""

import json
import os
import re
import resource
import shlex
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api.config import MAX_RUNNING
from tests.appliance.supervisor.conftest import Appliance, launching

KEYS = "canary-4711\n  canary 'two'; $HOME\n\n"
QUOTED = '%(x)s ; "quoted" \'% 100%%'
AWKWARD = [
    *("", " ", "a b", "100%", "%(ENV_HOME)s", "a ;b", ";", "'", '"', '{"k": "v"}'),
    *("$HOME", "`id`", "\\", "é\n*", "#"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Appliance]:
    """An appliance with two engines and a secret. Its folder, arguments and variables have awkward characters."""
    environment = {"THE_KEYS": KEYS, "LC_ODD": QUOTED}
    with launching(tmp_path_factory.mktemp("start")) as start:
        appliance = start(
            folder="odd %s ;x'\"$ folder",
            secrets=["THE_KEYS"],
            engines=[["show", *AWKWARD], ["run"]],
            environment=environment,
        )
        for name in ("engine-0", "engine-1", "gateway"):
            appliance.started(name)
        assert b"curl" not in appliance.out()
        appliance.ready()
        yield appliance


def test_start_prints_one_curl_line_for_the_served_model_with_a_placeholder_for_the_key(service):
    (line,) = [line for line in service.out().decode().splitlines() if line.startswith("curl")]
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", f"http://127.0.0.1:{service.port}/v1/chat/completions"]
    assert json.loads(words[-1]) == {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "stream": True,
    }
    assert "Authorization: Bearer YOUR_KEY" in words
    assert "canary" not in service.output()
    assert sum("supervisor.supervisord" in command for command in service.alive().values()) == 1


def test_only_the_gateway_gets_the_variable_of_a_secret(service):
    (gateway,) = service.pids("gateway")
    holders = {gateway, service.process.pid}
    alive = service.alive()
    assert len(alive) == 8  # launcher, supervisord, gateway, two reapers, two engines, restart monitor
    for pid, command in alive.items():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert (b"THE_KEYS" in environment, b"canary" in environment) == (pid in holders,) * 2, command
        assert "canary" not in command
        descriptors = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert any("memfd" in target for target in descriptors) == (pid == service.process.pid), command
    assert f"THE_KEYS={KEYS}\0".encode() in Path(f"/proc/{gateway}/environ").read_bytes()
    (directory,) = service.runs.iterdir()
    files = [file for file in directory.iterdir() if file.is_file()]
    assert len(files) > 5 and not any(b"canary" in file.read_bytes() for file in files)


def test_arguments_and_environment_arrive_byte_for_byte(service):
    shown = json.loads((service.directory / "engine-0.show").read_text())
    assert shown["argv"] == AWKWARD
    assert shown["environment"]["LC_ODD"] == QUOTED
    assert shown["directory"] == str(Path.cwd())


def test_an_engine_receives_its_number_of_threads(service):
    environment = json.loads((service.directory / "engine-0.show").read_text())["environment"]
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}


def test_restarted_gateway_gets_its_secrets(service):
    os.kill(service.started("gateway"), signal.SIGKILL)
    again = service.started("gateway", times=2)
    assert f"THE_KEYS={KEYS}\0".encode() in Path(f"/proc/{again}/environ").read_bytes()


# The last test of this appliance: it stops it.
def test_run_directory_is_private_and_removed_at_the_end(service):
    (directory,) = service.runs.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert service.terminate() == 0
    assert list(service.runs.iterdir()) == []


def test_start_without_keys_raises_the_limit_of_files_selects_a_port_and_prints_progress(launched):
    """The soft limit of open files is raised to the hard one; port 0 selects a free port; the progress of an engine is
    printed once per tenth without a terminal; no program is on PATH."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
    try:
        appliance = launched(port=0, environment={"PATH": "/nonexistent"})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    phase = appliance.directory / "phase"

    def loading(progress: float) -> None:
        body = {"engines": [{"name": "engine-0", "phase": "loading", "progress": progress}], "more": 1}
        phase.with_suffix(".new").write_text(json.dumps(body))
        phase.with_suffix(".new").replace(phase)

    loading(0.4)
    limits = Path(f"/proc/{appliance.started('gateway')}/limits").read_text()
    (found,) = [int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max open files")]
    assert found == (2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16))
    appliance.until(lambda: b"engine-0 loading 40 %" in appliance.out())
    loading(0.41)
    loading(0.97)
    appliance.until(lambda: b"engine-0 loading 97 %" in appliance.out())
    appliance.ready()
    assert appliance.out().count(b"loading 4") == 1 and b"Authorization" not in appliance.out()
    (line,) = [line for line in appliance.out().decode().splitlines() if line.startswith("gateway") and "up on" in line]
    port = int(line.split("127.0.0.1:")[1].split()[0])
    assert port != 0
    socket.create_connection(("127.0.0.1", port)).close()
    appliance.until(appliance.pings)  # the monitor runs
    os.kill(appliance.started("engine-0"), signal.SIGKILL)
    appliance.started("engine-0", times=2)
    assert b"not found" not in appliance.out() and appliance.out().count(b"monitor") == 0
    assert appliance.terminate() == 0


def test_low_limit_of_open_files_is_refused_with_one_message(launched):
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    appliance = launched(preexec=limited)
    assert appliance.end() == 1
    message = appliance.reason()["message"]
    need = re.search(r"is 200, and (\d+) are needed", message)
    assert need and int(need[1]) >= 256 and f"ulimit -n {need[1]}" in message and f"nofile={need[1]}" in message
    assert appliance.pids("gateway") == [] and list(appliance.runs.iterdir()) == []


def test_port_in_use_is_refused_with_one_message(launched):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        appliance = launched(port=port)
        assert appliance.end() == 12
    reason = appliance.reason()
    assert reason["exit"] == "port"
    assert str(port) in reason["message"]
    assert "endpoints.port" in reason["message"]
    assert appliance.pids("gateway") == appliance.pids("engine-0") == []
    assert list(appliance.runs.iterdir()) == []


def test_two_appliances_run_side_by_side_and_the_required_number_of_open_files_is_sufficient(launched):
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128 + 8 + MAX_RUNNING,) * 2)

    one, other = launched(folder="one", preexec=limited), launched(folder="other")
    for appliance in (one, other):
        appliance.started("engine-0")
        appliance.started("gateway")
        appliance.ready()
    assert one.terminate() == 0
    assert one.alive() == {}
    assert other.process.poll() is None
    assert len(other.alive()) == 6  # launcher, supervisord, gateway, reaper, engine, restart monitor


def test_startup_budget_ends_the_appliance_with_a_reason(launched):
    appliance = launched(startup_s=3)
    (appliance.directory / "phase").write_text(
        '{"engines": [{"name": "engine-0", "phase": "loading", "progress": 0.5}]}'
    )
    assert appliance.end() == 13
    reason = appliance.reason()
    assert reason["exit"] == "startup"
    assert "health.startup_budget" in reason["message"]
    assert appliance.alive() == {}


def test_json_log_has_one_record_per_line_with_the_fields_of_its_program(launched):
    """A line of text becomes a record under its program's name; a log record keeps its fields; other JSON is text."""
    given = {"ts": "2026-01-02T03:04:05.678Z", "level": "warning", "logger": "l", "message": "\u00e9", "b": 1}
    lines = ["about to crash", json.dumps(given), '{"b": 2}']
    appliance = launched(format="json", engines=[["permanent", "\n".join(lines)]])
    assert appliance.end() == 15
    records = [json.loads(line) for line in appliance.out().decode().splitlines()]
    assert all(list(record)[:5] == ["ts", "level", "program", "logger", "message"] for record in records)
    said = [record for record in records if record["program"] == "engine-0"]
    assert {**given, "program": "engine-0"} in said
    assert {lines[0], lines[2]} <= {record["message"] for record in said}
