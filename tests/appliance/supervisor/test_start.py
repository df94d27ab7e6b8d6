import json
import os
import re
import resource
import shlex
import signal
import socket
import stat
from pathlib import Path

from engine.api.config import MAX_RUNNING


def test_start_prints_one_curl_line_for_the_served_model(launched):
    appliance = launched(engines=[["run"], ["run"]])
    appliance.started("engine-0")
    appliance.started("engine-1")
    appliance.started("gateway")
    assert b"curl" not in appliance.out()
    appliance.ready()
    (line,) = [line for line in appliance.out().decode().splitlines() if line.startswith("curl")]
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", f"http://127.0.0.1:{appliance.port}/v1/chat/completions"]
    assert json.loads(words[-1]) == {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "stream": True,
    }
    assert "Authorization" not in line
    assert sum("supervisor.supervisord" in command for command in appliance.alive().values()) == 1


def test_curl_line_has_a_placeholder_for_the_api_key(launched):
    appliance = launched(secrets=["THE_KEYS"], environment={"THE_KEYS": "canary-4711"})
    appliance.started("gateway")
    appliance.ready()
    assert "Authorization: Bearer YOUR_KEY" in appliance.output()
    assert "canary-4711" not in appliance.output()


def test_only_the_gateway_gets_the_variable_of_a_secret(launched):
    keys = "canary-4711\n  canary 'two'; $HOME\n\n"
    appliance = launched(secrets=["THE_KEYS"], environment={"THE_KEYS": keys}, engines=[["run"]])
    appliance.started("engine-0")
    gateway = appliance.started("gateway")
    appliance.ready()
    holders = {gateway, appliance.process.pid}
    alive = appliance.alive()
    assert len(alive) == 6  # launcher, supervisord, gateway, reaper, engine, restart monitor
    for pid, command in alive.items():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert (b"THE_KEYS" in environment, b"canary" in environment) == (pid in holders,) * 2, command
        assert "canary" not in command
        descriptors = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert any("memfd" in target for target in descriptors) == (pid == appliance.process.pid), command
    assert f"THE_KEYS={keys}\0".encode() in Path(f"/proc/{gateway}/environ").read_bytes()
    (directory,) = appliance.runs.iterdir()
    files = [file for file in directory.iterdir() if file.is_file()]
    assert len(files) > 5 and not any(b"canary" in file.read_bytes() for file in files)


def test_restarted_gateway_gets_its_secrets(launched):
    appliance = launched(secrets=["THE_KEYS"], environment={"THE_KEYS": "canary-4711"})
    os.kill(appliance.started("gateway"), signal.SIGKILL)
    again = appliance.started("gateway", times=2)
    assert b"THE_KEYS=canary-4711\0" in Path(f"/proc/{again}/environ").read_bytes()


def test_arguments_and_environment_arrive_byte_for_byte(launched):
    awkward = [
        "",
        " ",
        "a b",
        "100%",
        "%(ENV_HOME)s",
        "a ;b",
        ";",
        "'",
        '"',
        '{"k": "v"}',
        "$HOME",
        "`id`",
        "\\",
        "é\n*",
        "#",
    ]
    appliance = launched(
        folder="odd %s ;x'\"$ folder",
        engines=[["show", *awkward]],
        environment={"LC_ODD": '%(x)s ; "quoted" \'% 100%%'},
    )
    appliance.started("engine-0")
    shown = json.loads((appliance.directory / "engine-0.show").read_text())
    assert shown["argv"] == awkward
    assert shown["environment"]["LC_ODD"] == '%(x)s ; "quoted" \'% 100%%'
    assert shown["directory"] == str(Path.cwd())


def test_an_engine_receives_its_number_of_threads(launched):
    appliance = launched(engines=[["show"]])
    appliance.started("engine-0")
    environment = json.loads((appliance.directory / "engine-0.show").read_text())["environment"]
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}


def test_programs_may_open_as_many_files_as_the_hard_limit_allows(launched):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
    try:
        appliance = launched()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = Path(f"/proc/{appliance.started('gateway')}/limits").read_text()
    (found,) = [int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max open files")]
    assert found == (2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16))


def test_low_limit_of_open_files_is_refused_with_one_message(launched):
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    appliance = launched(preexec=limited)
    assert appliance.end() == 1
    message = appliance.reason()["message"]
    need = re.search(r"is 200, and (\d+) are needed", message)
    assert need and int(need[1]) >= 256 and f"ulimit -n {need[1]}" in message and f"nofile={need[1]}" in message
    assert appliance.pids("gateway") == [] and list(appliance.runs.iterdir()) == []


def test_required_number_of_open_files_is_sufficient(launched):
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128 + 8 + MAX_RUNNING,) * 2)

    appliance = launched(preexec=limited)
    appliance.started("gateway")
    appliance.ready()
    assert appliance.terminate() == 0


def test_run_directory_is_private_and_removed_at_the_end(launched):
    appliance = launched()
    appliance.started("engine-0")
    (directory,) = appliance.runs.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert appliance.terminate() == 0
    assert list(appliance.runs.iterdir()) == []


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


def test_port_0_selects_a_free_port_and_prints_it(launched):
    appliance = launched(port=0)
    appliance.started("gateway")
    appliance.ready()
    (line,) = [line for line in appliance.out().decode().splitlines() if line.startswith("gateway") and "up on" in line]
    port = int(line.split("127.0.0.1:")[1].split()[0])
    assert port != 0
    socket.create_connection(("127.0.0.1", port)).close()


def test_two_appliances_run_side_by_side(launched):
    one, other = launched(folder="one"), launched(folder="other")
    for appliance in (one, other):
        appliance.started("engine-0")
        appliance.started("gateway")
        appliance.ready()
    assert one.terminate() == 0
    assert one.alive() == {}
    assert other.process.poll() is None
    assert len(other.alive()) == 6  # launcher, supervisord, gateway, reaper, engine, restart monitor


def test_progress_is_printed_once_per_tenth_without_a_terminal(launched):
    appliance = launched()
    phase = appliance.directory / "phase"

    def loading(progress: float) -> None:
        body = {"engines": [{"name": "engine-0", "phase": "loading", "progress": progress}], "more": 1}
        phase.with_suffix(".new").write_text(json.dumps(body))
        phase.with_suffix(".new").replace(phase)

    loading(0.4)
    appliance.started("gateway")
    appliance.until(lambda: b"engine-0 loading 40 %" in appliance.out())
    loading(0.41)
    loading(0.97)
    appliance.until(lambda: b"engine-0 loading 97 %" in appliance.out())
    appliance.ready()
    assert appliance.out().count(b"loading 4") == 1


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


def test_json_log_has_one_record_per_line(launched):
    appliance = launched(format="json", engines=[["crash"]], max=0)
    assert appliance.end() == 14
    records = [json.loads(line) for line in appliance.out().splitlines()]
    assert all(list(record)[:5] == ["ts", "level", "program", "logger", "message"] for record in records)
    said = [record["message"] for record in records if record["program"] == "engine-0"]
    assert "engine-0: about to crash" in said  # a line of text becomes a record under its program's name


def test_a_log_record_of_a_program_keeps_its_fields_and_other_json_is_text(launched):
    given = {"ts": "2026-01-02T03:04:05.678Z", "level": "warning", "logger": "l", "message": "\u00e9", "b": 1}
    for line in (json.dumps(given), '{"b": 2}'):
        appliance = launched(format="json", engines=[["permanent", line]])
        assert appliance.end() == 15
        records = [json.loads(line) for line in appliance.out().decode().splitlines()]
        said = [record for record in records if record["program"] == "engine-0"]
        if "ts" in line:
            assert {**given, "program": "engine-0"} in said
        else:
            assert line in [record["message"] for record in said]
