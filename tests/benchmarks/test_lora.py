"""The benchmark of adapters at its smallest size: rates of both kinds, and adapters of all projections."""

import json
from pathlib import Path

from benchmarks.lora import main, write_adapters
from engine.lowering.adapters import fitted_adapters
from engine.models.adapters import read_adapter
from engine.models.checkpoint import read_checkpoint

DEMO = Path(__file__).resolve().parents[2] / "manifests" / "demo"


def test_both_kinds_of_rounds_are_measured(tmp_path: Path):
    sizes = "--rows 2 --adapters 2 --rank 3 --tokens 4 --rounds 1 --weights stored"
    (result,) = main([*sizes.split(), "--checkpoint", str(DEMO), "--out", str(tmp_path / "found.json")])
    assert result.base.median > 0 and result.adapted.median > 0
    assert result.adapter_bytes > 0
    assert json.loads((tmp_path / "found.json").read_text())[0]["relative"] == result.relative


def test_adapters_change_every_projection(tmp_path: Path):
    model = read_checkpoint(DEMO).model
    (folder,) = write_adapters(DEMO, tmp_path, 1, 2).values()
    (fitted,) = fitted_adapters(model, [read_adapter("a", folder)])
    assert len(fitted.modules) == 7 * len(model.blocks)
