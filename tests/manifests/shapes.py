"""Checkpoints without weights: config.json as published, headers made of the declaration, files of the full size that
hold nothing (sparse), a tokenizer that only says it is one."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.formats.format import Stored
from engine.models.checkpoint import INDEX, read_checkpoint
from engine.models.headers import ELEMENT_BYTES
from engine.models.sources import sources
from engine.models.stored import stored_tensors

CONFIGS = Path(__file__).with_name("configs")
SHARD_BYTES = 5 * 10**9  # as exporters cut them
PARAMETERS = {
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "Qwen3-Embedding-0.6B": 595_776_512,
    "bge-reranker-v2-m3": 567_755_777,
    "nllb-200-distilled-600M": 615_073_792,
}  # as the hub counts the tensors of the published checkpoints; a tied head once

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # type as headers spell it, shape

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of llama.cpp for the paths of Llama and Qwen, below the layer for those of layers."""


def make_checkpoint(name: str, folder: Path) -> Path:
    """A folder with this model's config.json and headers; weights read as zeros and take no space."""
    folder.mkdir(parents=True)
    text = (CONFIGS / f"{name}.json").read_text()
    (folder / "config.json").write_text(text)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    facts = read_checkpoint(folder, weights=False)
    kinds = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
    plain = kinds[json.loads(text)["torch_dtype"]]
    wanted = stored_tensors(facts.model, facts.quantization)
    tensors = {each: (_type(one, plain), one.shape) for each, one in wanted.items() if not one.optional}
    _write_shards(folder, tensors)
    return folder


def _type(one: Stored, plain: str) -> str:
    return plain if not one.types or plain in one.types else one.types[0]


def count_parameters(name: str, folder: Path) -> int:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    return sum(math.prod(shape) for shape in sources(read_checkpoint(folder, weights=False).model).values())


def _size(kind: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * ELEMENT_BYTES[kind]


def _shards(tensors: Tensors) -> Iterator[Tensors]:
    shard: Tensors = {}
    room = SHARD_BYTES
    for name, (kind, shape) in tensors.items():
        if shard and _size(kind, shape) > room:
            yield shard
            shard, room = {}, SHARD_BYTES
        shard[name] = (kind, shape)
        room -= _size(kind, shape)
    yield shard


def _write_shards(folder: Path, tensors: Tensors) -> None:
    shards = list(_shards(tensors))
    if len(shards) == 1:
        write_header(folder / "model.safetensors", tensors)
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_header(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_header(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file by its specification, of the size that it would have."""
    header, at = {}, 0
    for name, (kind, shape) in tensors.items():
        end = at + _size(kind, shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def make_gguf(name: str, folder: Path, quant: str = "Q4_0") -> Path:
    """Write the model as one GGUF file with matrices of the ggml type `quant`. An untied head has this type too."""
    import gguf
    import numpy as np

    folder.mkdir(parents=True)
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    writer = gguf.GGUFWriter(folder / f"{name}-{quant}.gguf", config["model_type"])
    matrix, size = gguf.GGMLQuantizationType[quant], 0
    for full, shape in sources(read_checkpoint(folder, weights=False).model).items():
        path, _, suffix = full.rpartition(".")
        layer = path.removeprefix("model.layers.").split(".", 1) if path.startswith("model.layers.") else None
        told = f"blk.{layer[0]}.{GGUF_NAMES[layer[1]]}" if layer else GGUF_NAMES[path]
        kind = matrix if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        elements, block = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // elements * block
        raw = gguf.quant_shape_to_byte_shape(shape, kind) if len(shape) > 1 else shape
        dtype = np.dtype(np.uint8 if len(shape) > 1 else np.float32)
        writer.add_tensor_info(f"{told}.{suffix}", raw, dtype, nbytes, raw_dtype=kind)
        size += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    file = folder / f"{name}-{quant}.gguf"
    with file.open("r+b") as opened:
        opened.truncate(-(-file.stat().st_size // 32) * 32 + size)
    return folder
