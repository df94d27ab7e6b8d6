"""Matrices that the libraries of the formats wrote (write_golden.py) have the values that these libraries restore."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.api.errors import CheckpointError
from engine.formats.registry import find_method
from engine.models.headers import read_headers

FILES = sorted(Path(__file__).parent.glob("golden/*.safetensors"))
ROWS, INPUTS = 16, 128


class Matrix:
    """The tensors of one file."""

    path, rows, inputs = "m", ROWS, INPUTS

    def __init__(self, file: Path) -> None:
        with safe_open(file, "pt") as opened:
            self.tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            self.about = dict(opened.metadata())
        self.values = self.tensors.pop("values")

    def read(self, suffix: str) -> torch.Tensor:
        return self.tensors[suffix]

    def has(self, suffix: str) -> bool:
        return suffix in self.tensors

    def type(self, suffix: str) -> str:
        raise AssertionError("only formats of GGUF ask for the type")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(text)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_values_are_those_of_the_library(file: Path) -> None:
    matrix = Matrix(file)
    settings = json.loads(matrix.about["settings"])
    method = find_method(settings["quant_method"])
    assert method is not None
    group = next(iter(method.groups(settings, ["m"], "lm_head", "config.json").values()))
    format = method.format(settings, group)
    wanted, found = format.tensors(ROWS, INPUTS), read_headers(file)
    assert set(found) - {"values"} <= set(wanted)
    assert all(one.optional or name in found for name, one in wanted.items())
    for name, info in found.items():
        if name != "values":
            assert wanted[name].fits(info.shape) and info.dtype in wanted[name].types, (name, info)
    got = format.dequantize(matrix)
    assert got.dtype == torch.float32 and got.shape == (ROWS, INPUTS)
    torch.testing.assert_close(got, matrix.values, rtol=3e-7, atol=1e-9)
    assert format.native is None or torch.equal(format.unpack(matrix).restored(), got)


def test_every_library_has_written_several() -> None:
    libraries = Counter(Matrix(file).about["library"] for file in FILES)
    assert libraries == {"bitsandbytes": 5, "hqq": 6, "torchao": 6, "compressed-tensors": 16}
