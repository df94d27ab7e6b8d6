"""Image processors of transformers that need torchvision, which is not installed: torch pads and resizes images, with
the kernels for uint8 that torchvision uses."""

import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate


def pad(x: Tensor, padding: Sequence[int], fill: Any = 0) -> Tensor:
    """padding: left, top, right, bottom. fill: a number, or equal numbers for each channel."""
    value = float(fill[0] if isinstance(fill, Sequence) else fill)
    return torch.nn.functional.pad(x, (padding[0], padding[2], padding[1], padding[3]), value=value)


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    return interpolate(x.unsqueeze(0), tuple(size), mode="bilinear", antialias=True)[0]


@contextmanager
def imported(module: str) -> Iterator[Any]:
    """Import a module of transformers with a replacement for torchvision."""
    functional = types.ModuleType("functional")
    functional.pad, functional.resize = pad, resize  # type: ignore[attr-defined]
    functional.InterpolationMode = Enum("InterpolationMode", ["BILINEAR"])  # type: ignore[attr-defined]
    v2, transforms, torchvision = (types.ModuleType(name) for name in ("v2", "transforms", "torchvision"))
    v2.functional = functional  # type: ignore[attr-defined]
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    stands = dict(zip([*names, f"{names[2]}.functional"], [torchvision, transforms, v2, functional], strict=True))
    with pytest.MonkeyPatch.context() as patch:
        for name, stand in stands.items():
            patch.setitem(sys.modules, name, stand)
        found = importlib.import_module(module)
    sys.modules.pop(module)
    yield found
