"""A bundle serves in a network namespace without routes."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from appliance.cli.main import main
from tests.documented import command_with
from tests.e2e.conftest import ROOT, free_port

NAMESPACE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def permitted() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not permitted(), reason="unshare --net is not permitted here")


def inside(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run([*NAMESPACE, *command], env=env, capture_output=True, text=True, timeout=240, check=False)


def test_a_bundle_serves_without_a_network(tmp_path):
    bundle = tmp_path / "demo.bundle.tar"
    assert main(["bundle", str(ROOT / "manifests" / "demo.yaml"), "-o", str(bundle)]) == 0
    driver = str(ROOT / "tests" / "e2e" / "offline_driver.py")
    _, *words = shlex.split(command_with("docs/bundle.md", "--bundle").replace(bundle.name, str(bundle)))
    done = inside(sys.executable, driver, str(free_port()), *words, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["routes"] == "" and "42" in found["text"] and found["code"] == 0
    (unpacked,) = (tmp_path / "cache" / "slipway" / "bundles").iterdir()
    # A file that changes on disk is noticed at the next start.
    weights = unpacked / "model" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    command = (sys.executable, "-m", "appliance", "serve", "--bundle", str(bundle), "--port", "0")
    again = inside(*command, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert again.returncode == 17 and "model.safetensors" in again.stderr


def test_offline_refuses_a_download_at_once(tmp_path):
    command = (sys.executable, "-m", "appliance", "serve", "nobody/nothing", "--offline")
    done = inside(*command, XDG_CACHE_HOME=str(tmp_path), HF_HUB_OFFLINE="")
    assert done.returncode == 20 and "downloads are disabled" in done.stderr, (done.returncode, done.stderr)
