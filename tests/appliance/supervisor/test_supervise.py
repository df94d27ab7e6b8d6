import configparser
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from appliance.config.gateway import GatewayConfig, SecretRef
from appliance.config.gateway import read_config as read_gateway
from appliance.config.manifest import Manifest
from appliance.config.sections.endpoints import Endpoints
from appliance.supervisor import shared_memory, supervise
from appliance.supervisor.launch import secret_names
from appliance.supervisor.monitor import Policy
from appliance.supervisor.supervise import Program, Service
from engine.api.config import read_config as read_engine
from engine.arguments import engine_config


def _service(engines: int = 2) -> Service:
    return Service(
        gateway=GatewayConfig(
            endpoints=Endpoints(host="127.0.0.1"),
            names=("demo",),
            model="/m",
            engines=(),
            max_context=7,
            vocab_size=97,
            drain_s=8.5,
            api_keys=SecretRef(env="KEYS"),
        ),
        engines=tuple(engine_config(model="/m", kv_bytes=1, max_context=7, threads=5) for _ in range(engines)),
        startup_s=1.0,
        restarts=Policy(1, 1.0),
        secrets=("KEYS",),
    )


def _parsed(text: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.read_file(io.StringIO(text))
    return parser


@pytest.mark.parametrize("engines", [1, 2, 7])
def test_gateway_has_the_socket_of_each_engine(tmp_path, engines):
    programs = supervise.programs(_service(engines), tmp_path)
    assert [program.name for program in programs] == ["gateway", *(f"engine-{index}" for index in range(engines))]
    sockets = [read_engine(tmp_path / f"engine-{index}.json").socket for index in range(engines)]
    assert list(read_gateway(tmp_path / "gateway.json").engines) == sockets
    assert len(set(sockets)) == engines


def test_commands_have_only_a_configuration_file(tmp_path):
    for program in supervise.programs(_service(), tmp_path):
        *python, module, path = program.argv
        assert python == [sys.executable, "-P", "-m"]
        assert module in ("appliance.server", "engine")
        assert Path(path).exists()


def test_additional_engine_changes_no_other_program(tmp_path):
    one, two = (supervise.configuration(supervise.programs(_service(n), tmp_path), "p", root=False) for n in (1, 2))
    before, after = _parsed(one), _parsed(two)
    assert set(after.sections()) - set(before.sections()) == {"program:engine-1"}
    assert all(before[name] == after[name] for name in before.sections() if name != "group:engines")


def test_supervisor_requires_a_password_and_kills_process_groups(tmp_path):
    parser = _parsed(supervise.configuration(supervise.programs(_service(), tmp_path), "pass", root=False))
    socket = parser["unix_http_server"]
    assert (socket["chmod"], socket["username"], socket["password"]) == ("0700", "slipway", "pass")
    kinds = ("program:", "eventlistener:")
    assert {parser[name]["killasgroup"] for name in parser.sections() if name.startswith(kinds)} == {"true"}


def test_all_secret_variables_of_a_manifest_are_found():
    secrets = {"a": {"env": "ONE"}, "b": {"file": "/f"}, "c": {"env": "TWO"}, "d": {"env": "ONE"}}
    text = {"apiVersion": "slipway/v2", "model": {"source": {"path": "/m"}}, "secrets": secrets}
    assert secret_names(Manifest.model_validate(text)) == ("ONE", "TWO")


def test_the_gateway_gets_its_drain_and_stops_first(tmp_path):
    programs = supervise.programs(_service(), tmp_path)
    parser = _parsed(supervise.configuration(programs, "p", root=False))
    assert int(parser["program:gateway"]["stopwaitsecs"]) > 8.5
    # Supervisor stops the highest priority first.
    assert int(parser["group:gateway"]["priority"]) > int(parser["group:engines"]["priority"])
    assert parser["group:engines"]["programs"] == "engine-0,engine-1"


def test_supervisor_itself_never_restarts_a_program(tmp_path):
    """Its restarts have neither delay nor limit after a program ran for startsecs; the monitor's have both."""
    parser = _parsed(supervise.configuration(supervise.programs(_service(), tmp_path), "p", root=False))
    programs = [parser[name] for name in parser.sections() if name.startswith("program:")]
    assert {(program["autorestart"], program["startsecs"]) for program in programs} == {("false", "0")}
    assert parser["eventlistener:monitor"]["autorestart"] == "true"


def test_configuration_has_no_characters_that_supervisor_interprets(tmp_path):
    odd = tmp_path / "%(x)s ;\"' dir"
    odd.mkdir()
    text = supervise.configuration(supervise.programs(_service(), odd), "p", root=True)
    assert not set("%;\"'") & set(text)
    assert odd.name not in text


def begun(folder: Path, program: Program, secret_files: dict[str, str], **environment: str):
    """Start a program as Supervisor does, with this environment alone."""
    supervise.write_script(folder, program, secret_files, "")
    command = ["/bin/sh", f"{program.name}.sh"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.nice(0)]))"


def test_program_gets_its_arguments_variables_secrets_and_priority_unchanged(tmp_path):
    """There is no PATH: nothing but system calls is used."""
    words = ("", "a b", "%", "a ;b", "'", '"', "$HOME", "`id`", "\\", "é\n*", "--", "-n", "\udcff")
    set_here = {"NEW": "it's; $1"}
    program = Program("x", (sys.executable, "-c", SHOW, *words), "g", 1, 1, set_here, ("SECRET",), nice=3)
    secret = "one; $1 `id` 'x\\n' \"é\n\ntwo\n\n"
    file = tmp_path / "odd ' $name"
    file.write_text(secret)
    done = begun(tmp_path, program, {"SECRET": str(file), "OTHER": "/nowhere"}, KEPT="a b", NEW="old")
    assert not any("one; $1" in path.read_text() for path in tmp_path.glob("x.*"))
    argv, seen, directory, nice = json.loads(done.stdout)
    assert argv == list(words)
    assert (seen["NEW"], seen["KEPT"], seen["SECRET"]) == ("it's; $1", "a b", secret)
    assert (directory, nice) == (os.getcwd(), os.nice(0) + 3)
    file.unlink()
    done = begun(tmp_path, program, {"SECRET": str(file)})
    assert done.returncode == 127 and not done.stdout and "No such file" in done.stderr


def test_engine_environment_has_no_credentials(tmp_path):
    wanted = {"PATH": "/bin", "HOME": "/h", "LANG": "C", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "1", "PYTHONPATH": "/p"}
    wanted |= {"NVIDIA_VISIBLE_DEVICES": "all", "NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": "/t"}
    wanted |= {"HIP_VISIBLE_DEVICES": "0", "HSA_OVERRIDE_GFX_VERSION": "9.4.2"}
    secret = {
        "HF_TOKEN": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "OPENAI_API_KEY": "c",
        "HTTPS_PROXY": "http://u:p@x",
        "X": "d",
    }
    engine = supervise.engine_program(_service(), "engine-0", (sys.executable, "-c", SHOW), threads=5)
    done = begun(tmp_path, replace(engine, leftovers=()), {}, **wanted, **secret)
    _, seen, _, _ = json.loads(done.stdout)
    assert wanted.items() <= seen.items() and not secret.keys() & seen.keys()
    assert seen["OMP_NUM_THREADS"] == "5"


def test_little_shared_memory_for_several_ranks_is_a_warning(monkeypatch):
    """The exact --shm-size"""
    one = _service(1)
    ranks = msgspec.structs.replace(one.engines[0].parallelism, tensor=2)
    several = replace(one, engines=(msgspec.structs.replace(one.engines[0], parallelism=ranks),))
    sizes = {"small": 64 * 2**20, "large": 2**30, "unlimited": 0}
    for name, size in sizes.items():
        found = SimpleNamespace(f_blocks=size // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path, found=found: found)
        found = shared_memory.warning(several)
        assert bool(found) == (name == "small") and shared_memory.warning(one) == ""
        assert not found or "/dev/shm has 64 MiB" in found and "docker run --shm-size 1g" in found
    monkeypatch.undo()
    assert shared_memory.warning(several, Path("/absent")) == ""


def test_start_is_announced_before_the_program_runs(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = begun(tmp_path, Program("x", ("/nowhere",), "g", 1, 1, announce=(str(pipe), "it starts")), {})
        assert done.returncode == 127 and os.read(reading, 100) == b"it starts\n"
    finally:
        os.close(reading)


def test_only_the_gateway_gets_the_secrets_and_only_engines_many_threads(tmp_path):
    gateway, engine, _ = supervise.programs(_service(), tmp_path)
    assert (gateway.secrets, engine.secrets) == (("KEYS",), ())
    assert (gateway.environment["OMP_NUM_THREADS"], engine.environment["OMP_NUM_THREADS"]) == ("1", "5")


def test_replaced_engine_keeps_its_download_token(tmp_path):
    before = Program("engine-0", ("one",), "engines", 20, 5, secrets=("HF_TOKEN",), leftovers=("engine-0.sock",))
    supervise.write_script(tmp_path, before, {"HF_TOKEN": "/proc/1/fd/7", "KEYS": "/proc/1/fd/8"}, "")
    supervise.rewrite_script(tmp_path, replace(before, argv=("two",)), "")
    told = json.loads((tmp_path / "engine-0.exec").read_text())
    assert told["secrets"] == {"HF_TOKEN": "/proc/1/fd/7"}
    assert json.loads((tmp_path / "engine-0.reaper").read_text())["argv"] == ["two"]
