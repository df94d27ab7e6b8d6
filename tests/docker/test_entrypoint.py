import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def called(tmp_path):
    """Runs the entry point with a `slipway` that only shows its arguments and its process id."""
    shown = tmp_path / "slipway"
    shown.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:]]))\nsys.exit(7)\n"
    )
    shown.chmod(0o755)

    def call(*arguments: str) -> list[str]:
        entry = subprocess.Popen(
            ["/bin/sh", str(ROOT / "entrypoint.sh"), *arguments],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
        )
        out, _ = entry.communicate(timeout=60)
        pid, words = json.loads(out)
        assert pid == entry.pid, "slipway is not the process that the container started"
        assert entry.returncode == 7
        return list(words)

    return call


def test_kernels_compiled_with_the_image_are_in_tritons_cache(tmp_path):
    """The entry point links them, because Triton also writes to the cache, and it runs again when
    the container restarts."""
    (tmp_path / "entrypoint.sh").write_text((ROOT / "entrypoint.sh").read_text())
    (tmp_path / "slipway").write_text('#!/bin/sh\necho "$TRITON_LIBCUDA_PATH"\n')
    (tmp_path / "slipway").chmod(0o755)
    compiled, cache = tmp_path / "compiled", tmp_path / "some" / "cache"
    for name in ("KEY1", "KEY2", "libcuda"):
        (compiled / name).mkdir(parents=True)
    (compiled / "KEY1" / "kernel.cubin").write_text("code")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TRITON_CACHE_DIR": str(cache)}
    for _ in range(2):
        command = ["/bin/sh", str(tmp_path / "entrypoint.sh"), "version"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(compiled / "libcuda") and not done.stderr
        (cache / "KEY3").mkdir(exist_ok=True)
    assert sorted(path.name for path in cache.iterdir()) == ["KEY1", "KEY2", "KEY3", "libcuda"]
    assert (cache / "KEY1" / "kernel.cubin").read_text() == "code"
    assert sorted(path.name for path in (compiled / "KEY1").iterdir()) == ["kernel.cubin"]


@pytest.mark.parametrize("given", [[], ["serve"]], ids=["nothing", "serve"])
def test_without_arguments_slipway_serves_what_it_finds(called, given):
    assert called(*given) == ["serve"]


@pytest.mark.parametrize("first", [[], ["serve"]], ids=["bare", "serve"])
def test_options_go_to_serve_byte_for_byte(called, first):
    awkward = ["--set", 'a={"b": "c d"}', "%", ";", "'", '"', "$HOME", "*", "", " x ", "\\n", "é\n"]
    assert called(*first, *awkward) == ["serve", *awkward]


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_help_and_version_are_those_of_slipway(called, option):
    assert called(option) == [option]


def test_a_manifest_is_passed_on_for_slipway_to_recognise(called):
    assert called("/m y.yaml", "--port", "9") == ["/m y.yaml", "--port", "9"]
    assert called("serve", "/m y.yaml", "--port", "9") == ["serve", "/m y.yaml", "--port", "9"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_is_itself(called, name):
    assert called(name, "/manifest.yaml", "--x y") == [name, "/manifest.yaml", "--x y"]


def test_a_subcommand_runs_and_a_manifest_is_served_through_the_entry_point(tmp_path):
    """With the real slipway: a command that the entry point did not know is not taken for a manifest."""
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["/bin/sh", str(ROOT / "entrypoint.sh"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    made = run("init", str(ROOT / "manifests" / "demo"), "-o", "-")
    assert made.returncode == 0 and "apiVersion: slipway/" in made.stdout
    missing = run(os.path.join(tmp_path, "absent.yaml"))
    assert missing.returncode == 2 and "absent.yaml" in missing.stderr and "no such file" in missing.stderr
