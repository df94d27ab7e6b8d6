"""Reading tensors out of mapped files."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from engine.models.headers import read_headers
from engine.weights.files import Weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_each_type_are_read_bit_for_bit(tmp_path, dtype):
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype), "scalar": torch.tensor(2.5).to(dtype)}
    save_file(tensors, tmp_path / "x.safetensors")
    weights = Weights(read_headers(tmp_path / "x.safetensors"), lambda fraction: None)
    for name, want in tensors.items():
        got = weights.read(name)
        assert got.dtype == dtype and got.shape == want.shape and torch.equal(got, want)


def test_a_tensor_that_starts_at_an_odd_byte_is_read(tmp_path):
    """Writers align the data, but the format does not demand it of each tensor."""
    header = json.dumps(
        {
            "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    (tmp_path / "x.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + b"\0" + struct.pack("<2f", 1.5, -3.0)
    )
    weights = Weights(read_headers(tmp_path / "x.safetensors"), lambda fraction: None)
    assert weights.read("x").tolist() == [1.5, -3.0]


def test_progress_rises_with_the_bytes_and_ends_at_one(tmp_path):
    save_file({"a": torch.ones(1), "b": torch.ones(3)}, tmp_path / "x.safetensors")
    seen = []
    weights = Weights(read_headers(tmp_path / "x.safetensors"), seen.append)
    for name in ("a", "b", "a"):
        weights.read(name)
    assert seen == [0.25, 1.0]
