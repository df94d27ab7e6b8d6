"""GGUF files of one model in other weight formats, and its tokenizer. Needs the packages gguf and tokenizers."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.lowering.footprint import LARGE_GROUP, SMALL_GROUP
from kernels.ggml_blocks import to_int6
from kernels.quantisation import to_int4, to_int8

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
STORED = ("original", "plain", "Q8_0", "Q4_0", "Q5_0", "Q5_1")
RESTORED = ("int8", "int6", "int4", "int8_head", "int6_head", "bf16")
FORMATS = (*STORED, *(f"{name}_restored" for name in RESTORED), "Q4_0_embedding")
Values = Any  # numpy arrays
Restorer = Callable[[Values], Values]


def gguf_file(file: Path) -> Path:
    """Return the file itself, or the one *.gguf in a wheel's unpacked folder."""
    found = [file] if file.is_file() else sorted(file.rglob("*.gguf"))
    if len(found) != 1:
        raise SystemExit(f"{file}: has {len(found)} GGUF files; name one file")
    return found[0]


def tokenize(file: Path, text: str) -> list[int]:
    """Tokenize with the file's byte-level BPE, digits apart (`tokenizer.ggml.pre: smollm`)."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = GGUFReader(file).fields
    if (kind := fields["tokenizer.ggml.pre"].contents()) != "smollm":
        raise SystemExit(f"{file}: tokenizer.ggml.pre is {kind!r}; this benchmark splits text as smollm does")
    vocab = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def write_formats(file: Path, folder: Path, wanted: Collection[str] = FORMATS) -> dict[str, Path]:
    """Write one folder with a GGUF file per wanted format, and original and plain always; return them by format.

    original: the given file. plain: its weights in float32. Q8_0, Q4_0, Q5_0, Q5_1: plain, quantized by gguf's
    reference code.
    int8_restored, int6_restored, int4_restored, bf16_restored: plain, rounded as the engine rounds at load, then
    restored to float32, with a head of its own because a tied embedding is not rounded. int8_head_restored and
    int6_head_restored: the head alone.
    Q4_0_embedding: plain with the embedding in Q4_0 and a head of its own.
    """
    from gguf import GGMLQuantizationType as Type

    plain = _dequantized(file)
    matrices = {name: values for name, values in plain.items() if values.ndim == 2}
    made = {"original": folder / "original"}
    made["original"].mkdir(parents=True, exist_ok=True)
    (made["original"] / "model.gguf").unlink(missing_ok=True)
    (made["original"] / "model.gguf").symlink_to(file.resolve())
    made["plain"] = _write(folder / "plain", file, plain, {})
    for kind in (one for one in (Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.Q5_1) if one.name in wanted):
        made[kind.name] = _write(folder / kind.name, file, plain, dict.fromkeys(matrices, kind))
    head = plain.get(HEAD, plain[EMBEDDING])
    layers = {name: values for name, values in matrices.items() if name not in (EMBEDDING, HEAD)}
    for bits, (restored, restored_head) in RESTORERS.items():
        if f"{bits}_restored" not in wanted:
            continue
        rounded = {} if restored is None else {name: restored(values) for name, values in layers.items()}
        rounded[HEAD] = restored_head(head)
        made[f"{bits}_restored"] = _write(folder / f"{bits}_restored", file, plain | rounded, {})
    if "Q4_0_embedding" in wanted:
        kinds = {EMBEDDING: Type.Q4_0}
        made["Q4_0_embedding"] = _write(folder / "Q4_0_embedding", file, plain | {HEAD: head}, kinds)
    return made


def _restored(rounded: Callable[[Tensor], Any]) -> Restorer:
    return lambda values: rounded(torch.from_numpy(values)).restored().numpy()


_restored_int8 = _restored(lambda weight: to_int8(weight, LARGE_GROUP))
_restored_int6 = _restored(to_int6)
_restored_int4 = _restored(lambda weight: to_int4(weight, SMALL_GROUP))


def _restored_bf16(values: Values) -> Values:
    return torch.from_numpy(values).bfloat16().float().numpy()


RESTORERS: dict[str, tuple[Restorer | None, Restorer]] = {
    "int8": (_restored_int8, _restored_int8),
    "int6": (_restored_int6, _restored_int8),
    "int4": (_restored_int4, _restored_int8),
    "int8_head": (None, _restored_int8),
    "int6_head": (None, _restored_int6),
    "bf16": (_restored_bf16, _restored_bf16),
}
"""Rounding of the layers, if there is one, and of the head."""


def _dequantized(file: Path) -> dict[str, Values]:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    return {one.name: dequantize(one.data, one.tensor_type).copy() for one in GGUFReader(file).tensors}


def _write(folder: Path, source: Path, tensors: Mapping[str, Values], kinds: Mapping[str, Any]) -> Path:
    """Write the tensors with the source file's keys; `kinds`: types other than float32 by tensor name."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import quantize

    folder.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    writer = GGUFWriter(folder / "model.gguf", reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        items = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=items)
    for name, values in tensors.items():
        if name in kinds:
            writer.add_tensor(name, quantize(values, kinds[name]), raw_dtype=kinds[name])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder
