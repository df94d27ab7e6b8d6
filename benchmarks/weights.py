"""Bytes of weights that a side reads for one token: all its matrices once, and of the embedding a row."""

import json
import math
from pathlib import Path

from benchmarks.backends import Name
from benchmarks.backends.slipway import OWN
from engine.gguf.file import read_gguf
from engine.lowering.footprint import Holder, footprint, part_bytes
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import has_experts
from kernels.cpu.library import best, tiling

TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def token_bytes(checkpoint: Path, side: Name) -> int | None:
    """Return the bytes; None for engines whose files say nothing of them, and for models with experts.

    Call it once the side has loaded: it makes the files that are read here.
    """
    if has_experts(read_checkpoint(checkpoint).model):
        return None
    if side.engine in ("slipway", "slipway-http"):
        return _held(checkpoint, side)
    if side.engine in ("llama.cpp", "ik_llama.cpp"):
        sizes = {one.name: one.bytes for one in read_gguf(checkpoint / f"{side.bits}.gguf").tensors}
        return sum(sizes.values()) - ("output.weight" in sizes) * sizes["token_embd.weight"]
    if side.engine == "transformers" and side.bits in TYPE_BYTES:
        tied = json.loads((checkpoint / "config.json").read_text())["tie_word_embeddings"]
        shapes = {name: one.shape for name, one in read_checkpoint(checkpoint).tensors.items()}
        elements = sum(math.prod(shape) for shape in shapes.values())
        looked_up = 0 if tied else math.prod(shapes["model.embed_tokens.weight"])
        return TYPE_BYTES[side.bits] * (elements - looked_up)
    return None


def _held(checkpoint: Path, side: Name) -> int:
    bf16, own = side.bits == "bfloat16", side.bits in OWN
    found = read_checkpoint(checkpoint if own or bf16 else checkpoint / f"{side.bits}.gguf")
    bits = side.bits if own else "stored"
    holder = Holder("float32", tiling=tiling(side.variant or best(), bf16=bf16), bits=bits)  # type: ignore[arg-type]
    parts = part_bytes(footprint(found.model, found.tensors, found.quantization, holder))
    head = parts.get("head", 0)
    return sum(parts.values()) - (parts.get("embedding", 0) if head else 0)
