import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = "/opt/slipway/manifests/demo.yaml"


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
    """As links, for the cache is written to as well; again when the container starts anew."""
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
def test_without_a_manifest_the_demo_is_served(called, given):
    assert called(*given) == ["serve", DEMO]


@pytest.mark.parametrize("first", [[], ["serve"]], ids=["bare", "serve"])
def test_options_go_to_serve_byte_for_byte(called, first):
    awkward = ["--set", 'a={"b": "c d"}', "%", ";", "'", '"', "$HOME", "*", "", " x ", "\\n", "é\n"]
    assert called(*first, *awkward) == ["serve", DEMO, *awkward]


@pytest.mark.parametrize("first", [[], ["serve"]], ids=["bare", "serve"])
def test_a_named_manifest_is_served(called, first):
    assert called(*first, "/m y.yaml", "--port", "9") == ["serve", "/m y.yaml", "--port", "9"]


@pytest.mark.parametrize("name", ["check", "plan", "chat", "schema", "healthcheck"])
def test_other_subcommands_are_themselves(called, name):
    assert called(name, "/manifest.yaml", "--x y") == [name, "/manifest.yaml", "--x y"]
