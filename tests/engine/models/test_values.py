"""Numbers of config.json that would make every result NaN are found before weights are read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.api.errors import CheckpointError
from engine.models.checkpoint import read_checkpoint

DEMO = Path(__file__).parents[3] / "manifests" / "demo"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 512,
}


def changed(folder: Path, **values: Any) -> Path:
    config = json.loads((DEMO / "config.json").read_text())
    config.pop("rope_parameters", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rms_norm_eps": -1e-6}, r"rms_norm_eps .* is -1e-06; it must be 0 or greater"),
        ({"rope_theta": 0}, r"rope_theta is 0.0; it must be greater than 0"),
        ({"rope_theta": -10000.0}, r"rope_theta is -10000.0; it must be greater than 0"),
        ({"rope_scaling": YARN | {"factor": 0}}, r"factor of the YaRN RoPE scaling is 0.0; it must be greater than 0"),
        ({"rope_scaling": YARN | {"factor": -2}}, r"factor of the YaRN RoPE scaling is -2.0"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, r"original_max_position_embeddings is 0"),
        ({"rope_scaling": YARN | {"beta_slow": -1}}, r"beta_slow of the YaRN RoPE scaling is -1"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, r"attention_factor of the YaRN RoPE scaling is 0.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"factor of the linear RoPE scaling is 0.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": -1}}, r"factor of the dynamic RoPE scaling is -1.0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, r"high_freq_factor is 1 and low_freq_factor 1"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, r"factor of the llama3 RoPE scaling is 0.0"),
    ],
)
def test_a_number_that_makes_every_result_nan_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as found:
        read_checkpoint(changed(tmp_path / "model", **values), weights=False)
    assert str(tmp_path / "model" / "config.json") in str(found.value)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}, None])
def test_usual_numbers_are_accepted(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    folder = changed(tmp_path / "model", rms_norm_eps=1e-5, rope_scaling=scaling)
    assert read_checkpoint(folder, weights=False).model.blocks


@pytest.mark.parametrize("number", ["1e400", "-1e400"])
def test_a_number_beyond_floating_point_is_refused(tmp_path: Path, number: str) -> None:
    folder = changed(tmp_path / "model")
    text = re.sub(r'"rms_norm_eps": [^,}]+', f'"rms_norm_eps": {number}', (folder / "config.json").read_text())
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json"):
        read_checkpoint(folder, weights=False)
