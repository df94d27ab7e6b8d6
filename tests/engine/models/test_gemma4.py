"""Gemma 4: settings of layers as transformers writes them."""

import json
from pathlib import Path

import transformers

from engine.models.gemma4 import declare
from engine.models.parts import attentions


def test_settings_of_more_than_nine_layers_are_read(tmp_path: Path) -> None:
    """Their numbers have leading zeros."""
    config = transformers.Gemma4TextConfig(num_hidden_layers=12, head_dim=16, global_head_dim=32)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Gemma4ForCausalLM"]}
    assert any(key.startswith("0") for key in written["per_layer_config"])
    found = [part.head_dim for part in attentions(declare(written))]
    kinds = written["layer_types"]
    assert found == [32 if kind == "full_attention" else 16 for kind in kinds] and set(found) == {16, 32}
