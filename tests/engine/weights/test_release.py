"""Resident memory of mapped checkpoint files."""

import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.headers import read_headers
from engine.weights.files import AROUND, Weights

MIB = 1 << 20


def resident(path: Path) -> int:
    """Bytes of a file that are resident in this process (proc(5), smaps)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def written(tmp_path, sizes):
    """Return tensors with the given sizes in bytes, and their file."""
    tensors = {name: torch.randn(size // 4) for name, size in sizes.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    return tensors, tmp_path / "x.safetensors"


def test_released_tensors_are_not_resident_and_read_again_with_the_same_numbers(tmp_path):
    tensors, path = written(tmp_path, {"a": 8 * MIB, "b": 3 * MIB + 4})
    weights = Weights(read_headers(path), lambda fraction: None)
    a, b = weights.read("a"), weights.read("b")
    assert torch.equal(a, tensors["a"]) and torch.equal(b, tensors["b"])
    assert resident(path) >= 11 * MIB, "the file was not mapped"
    weights.release()
    assert resident(path) == 0
    assert torch.equal(a, tensors["a"]), "a view outlives the release"
    assert resident(path) >= 8 * MIB


def test_release_keeps_tensors_resident_that_were_read_after_it(tmp_path):
    _, path = written(tmp_path, {"a": 8 * MIB, "b": 4 * MIB})
    weights = Weights(read_headers(path), lambda fraction: None)
    weights.read("a").sum()
    weights.release()
    weights.read("b").sum()
    assert 4 * MIB <= resident(path) <= 4 * MIB + 2 * AROUND


def test_closed_weights_are_not_resident_and_views_stay_valid(tmp_path):
    tensors, path = written(tmp_path, {f"small.{number}": 4096 * (number + 1) for number in range(17)})
    weights = Weights(read_headers(path), lambda fraction: None)
    views = {}
    for name in tensors:
        views[name] = weights.read(name)
        views[name].sum()
        weights.release()
    weights.close()
    assert resident(path) == 0
    path.unlink()
    assert all(torch.equal(views[name], tensors[name]) for name in tensors)
