"""Manifests and deployments for tests of rendered files."""

import shutil
from pathlib import Path

from appliance.config.settings import Given, load
from appliance.deployment.service import CONTAINER, Deployment, Layout, deployment
from appliance.hardware.described import hardware
from appliance.planning.validate import validate

DEMO = Path(__file__).resolve().parents[3] / "manifests" / "demo"
CPU = """
apiVersion: slipway/v2
model: {source: {path: demo}, names: ["a $${x} $1"], max_context: 64, chat_template: chat.jinja}
hardware: {kv_cache_memory: 4MiB, threads: 2}
endpoints: {api_keys: clients, port: 8100}
lifecycle: {drain: 25s, journal: {folder: journal, size: 1GiB}}
health: {startup_budget: 61s}
secrets: {clients: {file: keys}, hub: {env: HUB_TOKEN}}
"""
PLATFORM = """
apiVersion: slipway/v2
model: {source: {path: demo}, names: ["a $${x} $1"], max_context: 64}
hardware: {kv_cache_memory: 4MiB, threads: 2}
lifecycle: {drain: 25s, journal: {folder: journal, size: 1GiB}}
health: {startup_budget: 61s}
"""
"""A manifest without files and secrets, which hosting platforms do not mount."""
GPU = "apiVersion: slipway/v2\nmodel: {source: {path: llama}, max_context: 8192}\nparallelism: {tensor: 2}\n"


def write_manifest(folder: Path, text: str) -> Path:
    (folder / "m.yaml").write_text(text)
    (folder / "chat.jinja").write_text("{{ messages[0].content }}")
    (folder / "keys").write_text("sk-not-rendered\n")
    return folder / "m.yaml"


def write_demo(folder: Path, text: str) -> Path:
    """Write a manifest and the demo's checkpoint."""
    shutil.copytree(DEMO, folder / "demo")
    return write_manifest(folder, text)


def deployed(path: Path, words: str, layout: Layout = CONTAINER) -> Deployment:
    given = Given(path, (), {"HUB_TOKEN": "x"})
    plan = validate(given, hardware(words), assume=True)
    return deployment(load(given), plan, name="", image="slipway:1", layout=layout)
