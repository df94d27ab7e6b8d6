"""Compare keys and tensors of GGUF files with the package gguf, and test damaged or malicious files."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.errors import CheckpointError
from engine.gguf.file import TYPES, find_gguf, read_gguf
from tests.tiers import examples


def write(path: Path, *, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("small", 7)
    writer.add_int64("large", -(2**40))
    writer.add_float32("single", 0.5)
    writer.add_float64("double", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "größer 中")
    writer.add_array("texts", ["", "a b", "ß"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("blocks", np.zeros((5, 2 * 20), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("half", np.arange(7, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_keys_and_tensors_equal_the_gguf_package(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "m.gguf", alignment=alignment)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    wanted = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    got = {name: list(value) if isinstance(value, tuple) else value for name, value in ours.keys.items()}
    got["nested"] = [list(inner) for inner in got["nested"]]
    wanted["nested"] = [[1, 2], [3, 4]]  # the package reads these as one list
    assert got == wanted
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (one.name, one.type) == (other.name, other.tensor_type.name)
        assert one.shape == tuple(int(size) for size in reversed(other.shape))
        assert (one.offset, one.bytes) == (other.data_offset, other.n_bytes)


def test_types_equal_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert theirs == TYPES


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "part.gguf"

    @settings(max_examples=examples(200), deadline=None)
    @given(st.integers(0, len(whole) - 32))
    def refused(size: int) -> None:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"part\.gguf: not a GGUF file, or truncated or damaged"):
            read_gguf(path)

    refused()


def test_corrupted_bytes_raise_only_checkpoint_errors(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "changed.gguf"

    @settings(max_examples=examples(500), deadline=None)
    @given(st.integers(0, 700), st.binary(min_size=1, max_size=9))
    def handled(at: int, data: bytes) -> None:
        path.write_bytes(whole[:at] + data + whole[at + len(data) :])
        try:
            read_gguf(path)
        except CheckpointError as error:
            assert str(path) in str(error)

    handled()


def header(version: int = 3, tensors: int = 0, keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


HOSTILE = {
    "a text of 2**63 bytes": header() + struct.pack("<Q", 2**63),
    "2**60 numbers": header() + text(b"a") + struct.pack("<IIQ", 9, 4, 2**60),
    "2**30 bytes in a sparse file": header() + text(b"a") + struct.pack("<IIQ", 9, 0, 2**30),
    "2**60 empty arrays": header() + text(b"a") + struct.pack("<IIQ", 9, 9, 2**60),
    "arrays in arrays": header() + text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
    "2**60 keys": header(keys=2**60),
    "2**60 tensors": header(tensors=2**60, keys=0),
    "no UTF-8": header() + text(b"\xff"),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 1": header(1),
    "alignment 0": header() + text(b"general.alignment") + struct.pack("<II", 4, 0),
    "an unknown type": header(tensors=1, keys=0) + text(b"t") + struct.pack("<IQIQ", 1, 32, 99, 0) + bytes(99),
    "part of a block": header(tensors=1, keys=0) + text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(99),
    "5 dimensions": header(tensors=1, keys=0) + text(b"t") + struct.pack("<I5QIQ", 5, 1, 1, 1, 1, 1, 0, 0) + bytes(99),
    "a key twice": header(keys=2) + (text(b"a") + struct.pack("<IB", 0, 1)) * 2,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_at_once(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[what])
    if "sparse" in what:
        with path.open("r+b") as file:
            file.truncate(2**31)
    with pytest.raises(CheckpointError, match=r"m\.gguf: not a GGUF file, or truncated or damaged"):
        read_gguf(path)


def test_file_is_found_by_name_or_as_the_only_one(tmp_path: Path) -> None:
    first = write(tmp_path / "a.gguf")
    assert find_gguf(tmp_path) == find_gguf(first) == first
    second = write(tmp_path / "b.gguf")
    assert find_gguf(second) == second
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models, such as a\.gguf and b\.gguf; name the one to serve"):
        find_gguf(tmp_path)
    second.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_gguf(tmp_path) is None
    assert find_gguf(first) == first


def test_a_tower_of_images_beside_the_model_is_not_the_model(tmp_path: Path) -> None:
    first = write(tmp_path / "a.gguf")
    write(tmp_path / "mmproj-a.gguf")
    assert find_gguf(tmp_path) == first


def test_a_name_of_no_part_is_that_of_a_whole_file(tmp_path: Path) -> None:
    for name in ("m-00001-of-00000.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf"):
        path = write(tmp_path / name)
        assert find_gguf(path) == path and find_gguf(tmp_path) == path
        assert len(read_gguf(path).tensors) == 3
        path.unlink()
