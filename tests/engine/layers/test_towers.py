"""Towers and projectors of multimodal families, compared with transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.api.errors import CheckpointError, TaskError
from engine.distributed.world import Single
from engine.layers.compiled.build import Region
from engine.layers.linear import Target
from engine.layers.tower import TowerModel
from engine.layers.tower_executors import CompiledExecutor
from engine.layers.tower_triton import TritonExecutor
from engine.lowering.operations import Linear
from engine.models.checkpoint import Checkpoint, check_tensors, read_checkpoint
from engine.models.media import Media
from engine.weights.files import Weights
from kernels.cpu import program as cpu
from kernels.cpu.program import Team
from kernels.jit import installed, recorded
from tests.engine.layers.towers import CASES, Case, save

Saved = tuple[Case, Path, Any]
CPU = Target(torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("towers") / request.param
    return CASES[request.param], path, save(CASES[request.param], path)


def loaded(found: Checkpoint, target: Target = CPU) -> TowerModel:
    """Return the tower of a checkpoint. Every tensor of the tower and the projectors is read once."""
    assert found.model.media is not None
    tower = TowerModel(found.model.media, Single(), target)
    weights = Weights(found.tensors, lambda fraction: None)
    tower.load(weights.read)
    return tower


def compiled(threads: int = 2) -> Target:
    return Target(torch.float32, torch.device("cpu"), Team("base", threads))


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-5) -> None:
    assert [one.shape for one in found] == [one.shape for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_embeddings_are_those_of_transformers(saved: Saved) -> None:
    """Also if several items of different sizes are computed together."""
    case, path, model = saved
    found, items = read_checkpoint(path), case.items()
    check_tensors(found.model, found.tensors, found.quantization)
    with torch.no_grad():
        wanted = case.features(model, items)
    assert found.model.media is not None and wanted[0].shape[1] == found.model.media.width
    for target in (CPU, compiled()):
        tower = loaded(found, target)
        assert_close([embeddings for item in items for embeddings in tower.encode([item])], wanted)
        assert_close(tower.encode(items), wanted)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.sampled(4)
def test_triton_kernels_equal_transformers(saved: Saved) -> None:
    """In Triton's interpreter. Programs with masks, bounds or learned queries run with torch."""
    case, path, model = saved
    tower = TowerModel(read_media(path), Single(), CPU, triton=True)
    tower.load(Weights(read_checkpoint(path).tensors, lambda fraction: None).read)
    plain = ("llava", "pixtral", "qwen2-vl", "gemma3", "qwen2.5-vl", "qwen3-vl", "internvl-odd", "glm4v", "llama4")
    blocks = tower._executors[id(tower.program.tower)]
    assert isinstance(blocks, TritonExecutor) or path.name not in plain
    items = case.items()
    with torch.no_grad():
        wanted = case.features(model, items)
    assert_close(tower.encode(items), wanted, 3e-5)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "internvl-odd"])
def test_warm_towers_have_compiled_all_kernels(name: str, tmp_path: Path) -> None:
    """They are launched on torch's meta device, as when kernels are compiled ahead, and no others for items."""
    case = CASES[name]
    save(case, tmp_path)
    media, launches = read_media(tmp_path), list[set[tuple[object, ...]]]()
    for device in ("meta", "cpu"):
        tower = TowerModel(media, Single(), replace(CPU, device=torch.device(device)), triton=True)
        tower.load(Weights(read_checkpoint(tmp_path).tensors, lambda fraction: None).read)
        with recorded() as found:
            tower.warm() if device == "meta" else tower.encode(case.items())
        launches.append({(one.kernel.fn.__name__, one.warps, *sorted(one.constants.items())) for one in found})
    known, needed = launches
    assert {name for name, *_ in needed} >= {"encoder_attention_kernel"} and needed <= known


def read_media(path: Path) -> Media:
    media = read_checkpoint(path).model.media
    assert media is not None
    return media


def test_compiled_kernels_execute_every_program(saved: Saved) -> None:
    """Also of towers with masks, of learned queries and of merged squares. Only operations that they lack are torch's,
    and no product is."""
    tower = loaded(read_checkpoint(saved[1]), compiled(1))
    for program in tower.program.programs:
        executor = tower._executors[id(program)]
        assert isinstance(executor, CompiledExecutor)
        executor.reserve(3)
        made = [one for _, segment in executor._segments for one in segment if isinstance(one, Region)]
        products = sum(isinstance(op, Linear) for op in program.ops)
        assert sum(isinstance(op, cpu.Linear) for one in made for op in one.program.ops) == products
    assert sum(isinstance(op, Linear) for program in tower.program.programs for op in program.ops) > 0


@pytest.mark.parametrize("prefix", ["", "other.model."])
@pytest.mark.sampled(5)
def test_prefixes_of_other_exports_are_read(saved: Saved, tmp_path: Path, prefix: str) -> None:
    """In two files, as exporters write large checkpoints."""
    case, path, _ = saved
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    renamed = {
        (name if "language_model" in name or "lm_head" in name or "text_model" in name else prefix + bare(name)): tensor
        for name, tensor in tensors.items()
    }
    if any(name.startswith("model.layers.") for name in tensors):
        renamed = {f"text.{name}" if name.startswith("model.") else name: one for name, one in renamed.items()}
    names = sorted(renamed)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: renamed[name].contiguous() for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in shards.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(tmp_path)
    check_tensors(found.model, found.tensors, found.quantization)
    item = case.items()[:1]
    assert torch.equal(loaded(found).encode(item)[0], loaded(read_checkpoint(path)).encode(item)[0])


def bare(name: str) -> str:
    return name.removeprefix("model.")


@pytest.mark.parametrize("value", [10**18, -1, []])
@pytest.mark.sampled(4)
def test_absurd_settings_of_a_tower_are_refused_or_read(saved: Saved, tmp_path: Path, value: Any) -> None:
    config = json.loads((saved[1] / "config.json").read_text())
    vision = config["vision_config"]
    for changed in (
        *({**config, "vision_config": {**vision, key: value}} for key in vision),
        *({**config, key: value} for key in (*config, "vision_feature_layer", "image_grid_pinpoints")),
    ):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            read_checkpoint(tmp_path, weights=False)
        except (CheckpointError, TaskError) as error:
            assert "config.json" in str(error) and len(str(error)) < 1000
