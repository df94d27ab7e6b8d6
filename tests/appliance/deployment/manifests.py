"""Manifests and deployments for tests of rendered files."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from appliance.config.settings import Given, load
from appliance.deployment.service import CONTAINER, Deployment, Layout, deployment
from appliance.hardware.described import hardware
from appliance.planning.validate import validate
from engine.models.headers import read_headers

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


def write_random_adapter(checkpoint: Path, folder: Path, rank: int = 2) -> None:
    """Write a LoRA adapter of the query projections of a checkpoint."""
    folder.mkdir()
    tensors = {}
    for name, info in read_headers(checkpoint / "model.safetensors").items():
        if name.endswith(".q_proj.weight"):
            outputs, inputs = info.shape
            path = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{path}.lora_A.weight"] = np.ones((rank, inputs), np.float32)
            tensors[f"{path}.lora_B.weight"] = np.full((outputs, rank), 0.01, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def deployed(path: Path, words: str, layout: Layout = CONTAINER) -> Deployment:
    given = Given(path, (), {"HUB_TOKEN": "x"})
    plan = validate(given, hardware(words), assume=True)
    return deployment(load(given), plan, name="", image="slipway:1", layout=layout)
