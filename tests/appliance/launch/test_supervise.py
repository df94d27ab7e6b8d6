import configparser
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.gateway.config import GatewayConfig, SecretRef
from appliance.gateway.config import read_config as read_gateway
from appliance.launch import supervise
from appliance.launch.launch import secret_names
from appliance.launch.sentinel import Policy
from appliance.launch.supervise import Program, Service
from appliance.manifest import Manifest
from engine.api.config import EngineConfig
from engine.api.config import read_config as read_engine


def _service(engines: int = 2) -> Service:
    return Service(
        gateway=GatewayConfig(
            host="127.0.0.1",
            port=8000,
            names=("demo",),
            model="/m",
            engines=(),
            max_context=7,
            vocab_size=97,
            drain_s=8.5,
            api_keys=SecretRef(env="KEYS"),
        ),
        engines=tuple(EngineConfig(model="/m", kv_bytes=1, max_context=7, threads=5) for _ in range(engines)),
        startup_s=1.0,
        restarts=Policy(1, 1.0),
        secrets=("KEYS",),
    )


def _parsed(text: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.read_file(io.StringIO(text))
    return parser


@pytest.mark.parametrize("engines", [1, 2, 7])
def test_each_engine_listens_where_the_gateway_looks_for_it(tmp_path, engines):
    programs = supervise.programs(_service(engines), tmp_path)
    assert [program.name for program in programs] == ["gateway", *(f"engine-{index}" for index in range(engines))]
    sockets = [read_engine(tmp_path / f"engine-{index}.json").socket for index in range(engines)]
    assert list(read_gateway(tmp_path / "gateway.json").engines) == sockets
    assert len(set(sockets)) == engines


def test_commands_carry_a_configuration_file_and_nothing_else(tmp_path):
    for program in supervise.programs(_service(), tmp_path):
        *python, module, path = program.argv
        assert python == [sys.executable, "-P", "-m"]
        assert module in ("appliance.gateway", "engine")
        assert Path(path).exists()


def test_a_replica_changes_nothing_for_the_programs_before_it(tmp_path):
    one, two = (supervise.configuration(supervise.programs(_service(n), tmp_path), "p", root=False) for n in (1, 2))
    before, after = _parsed(one), _parsed(two)
    assert set(after.sections()) - set(before.sections()) == {"program:engine-1"}
    assert all(before[name] == after[name] for name in before.sections() if name != "group:engines")


def test_supervisor_wants_a_password_of_everybody_and_kills_whole_groups(tmp_path):
    parser = _parsed(supervise.configuration(supervise.programs(_service(), tmp_path), "pass", root=False))
    socket = parser["unix_http_server"]
    assert (socket["chmod"], socket["username"], socket["password"]) == ("0700", "slipway", "pass")
    kinds = ("program:", "eventlistener:")
    assert {parser[name]["killasgroup"] for name in parser.sections() if name.startswith(kinds)} == {"true"}


def test_every_variable_that_a_manifest_calls_a_secret_is_one_used_or_not():
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
    """Its restarts have neither delay nor limit once a program ran for startsecs; the sentinel's have both."""
    parser = _parsed(supervise.configuration(supervise.programs(_service(), tmp_path), "p", root=False))
    programs = [parser[name] for name in parser.sections() if name.startswith("program:")]
    assert {(program["autorestart"], program["startsecs"]) for program in programs} == {("false", "0")}
    assert parser["eventlistener:sentinel"]["autorestart"] == "true"


def test_the_configuration_holds_nothing_that_supervisor_would_expand_or_cut(tmp_path):
    odd = tmp_path / "%(x)s ;\"' dir"
    odd.mkdir()
    text = supervise.configuration(supervise.programs(_service(), odd), "p", root=True)
    assert not set("%;\"'") & set(text)
    assert odd.name not in text


def test_a_script_passes_words_and_secrets_on_as_they_are(tmp_path):
    words = ("", "a b", "%", "a ;b", "'", '"', "$HOME", "`id`", "\\", "é\n*", "--", "-n")
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    program = Program("x", (sys.executable, "-c", show, *words), "g", 1, 1, {"NEW": "it's; $1"}, ("SECRET",))
    path = tmp_path / "x.sh"
    secret = "one; $1 `id` 'x\\n' \"é\n\ntwo\n\n"
    file = tmp_path / "odd ' $name"
    file.write_text(secret)
    path.write_text(supervise.script(program, {"SECRET": str(file), "OTHER": "/nowhere"}))
    assert "one; $1" not in path.read_text()
    environment = {"KEPT": "a b", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh", str(path)], env=environment, capture_output=True, text=True, check=True)
    argv, seen = json.loads(done.stdout)
    assert argv == list(words)
    assert (seen["NEW"], seen["KEPT"], seen["SECRET"]) == ("it's; $1", "a b", secret)
    file.unlink()
    done = subprocess.run(["/bin/sh", str(path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout and "No such file" in done.stderr


def test_only_the_gateway_gets_the_secrets_and_only_engines_many_threads(tmp_path):
    gateway, engine, _ = supervise.programs(_service(), tmp_path)
    assert (gateway.secrets, engine.secrets) == (("KEYS",), ())
    assert (gateway.environment["OMP_NUM_THREADS"], engine.environment["OMP_NUM_THREADS"]) == ("1", "5")
