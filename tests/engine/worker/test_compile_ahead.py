"""Tests of the compilation of kernels while weights are loaded."""

import json
from pathlib import Path

import pytest
import torch

from engine.api.config import read_config, write_config
from engine.arguments import engine_config
from engine.worker import compile_ahead
from engine.worker.compile_ahead import CompileAhead, command, configuration_hash
from engine.worker.precompile import configs, parsed
from kernels.jit import installed
from tests.engine.configs import with_arguments

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
CUDA = torch.device("cuda")


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return engine_config(model=str(tmp_path), kernels="triton", device="cuda", kv_bytes=1 << 20, max_context=64)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Let a device be there whose compilations are recorded and end with the code in `codes`."""
    calls, codes = [], [0]

    class Process:
        def __init__(self, command, **options):
            calls.append((command, read_config(Path(command[command.index("--config") + 1]))))

        def wait(self, limit_s=None):
            return codes[0]

        def kill(self):
            pass

    monkeypatch.setattr(compile_ahead.subprocess, "Popen", Process)
    monkeypatch.setattr(compile_ahead, "interpreted", lambda: False)
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: set(range(5)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compile_ahead.triton.knobs.cache, "dir", str(tmp_path / "cache"))
    return calls, codes


def test_a_first_start_compiles_and_a_second_one_does_not(config, started):
    calls, _ = started
    with CompileAhead(config, CUDA) as ahead:
        assert ahead.wait()
    (wanted, given) = calls[0]
    assert given == config and wanted[-6:] == ["--target", "sm_90", "--device", "NVIDIA H200", "--processes", "4"]
    with CompileAhead(config, CUDA) as ahead:
        assert not ahead.wait()
    assert len(calls) == 1
    with CompileAhead(with_arguments(config, weights="fp8"), CUDA):
        assert len(calls) == 2


def test_a_failed_compilation_is_tried_again(config, started):
    calls, codes = started
    codes[0] = 1
    for _ in range(2):
        with CompileAhead(config, CUDA) as ahead:
            assert not ahead.wait()
    assert len(calls) == 2


@pytest.mark.parametrize("changed", [{"kernels": "torch"}, {"tensor": 2}], ids=str)
def test_nothing_is_compiled_that_the_configuration_does_not_determine(config, started, changed):
    with CompileAhead(with_arguments(config, **changed), CUDA) as ahead:
        assert not ahead.wait() and not started[0]


def test_hash_depends_on_all_that_kernels_depend_on(config, tmp_path):
    known = {configuration_hash(config, "a"), configuration_hash(config, "b")}
    for changed in ({"dtype": "bfloat16"}, {"invariant": True}, {"kv_dtype": "fp8"}, {"block_tokens": 32}):
        known.add(configuration_hash(with_arguments(config, **changed), "a"))
    (tmp_path / "config.json").write_text("{}")
    known.add(configuration_hash(config, "a"))
    assert len(known) == 7


def test_the_command_compiles_for_the_configuration_in_the_file(config, tmp_path):
    write_config(config, tmp_path / "engine.json")
    options = parsed(command(tmp_path / "engine.json", (9, 0), "NVIDIA H200", 3)[3:])
    assert configs(options) == [config] and options.target == ["sm_90"] and options.processes == 3


def test_the_command_takes_either_checkpoints_or_a_configuration(capsys):
    for arguments in ([], ["model", "--config", "engine.json"]):
        with pytest.raises(SystemExit):
            parsed(arguments)
        assert "name checkpoints, or --config with one file" in capsys.readouterr().err
