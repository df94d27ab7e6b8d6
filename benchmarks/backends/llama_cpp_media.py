"""Encode images with llama.cpp's mtmd: a CLIP tower of random weights, as in LLaVA 1.5.

    PYTHON benchmarks/backends/llama_cpp_media.py --edge 336 --depth 4 --width 256 --threads 2 --rounds 7

PYTHON needs llama-cpp-python with mtmd, and gguf. Prints the seconds of each round as JSON. Only the encoder is timed,
not the preprocessing.
"""

import argparse
import ctypes
import json
import tempfile
import time
from pathlib import Path
from typing import Any

PATCH, HEAD, TEXT_WIDTH = 14, 64, 64


def write_text_model(path: Path) -> None:
    """Write a text model of one layer, without which mtmd opens no tower. Its tokens are bytes."""
    import gguf  # type: ignore[import-not-found]
    import numpy as np

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 4096),
        (writer.add_embedding_length, TEXT_WIDTH),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, TEXT_WIDTH),
        (writer.add_head_count, 1),
        (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_dimension_count, TEXT_WIDTH),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "llama"),
        (writer.add_token_list, tokens),
        (writer.add_token_scores, [0.0] * len(tokens)),
        (writer.add_token_types, kinds),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
    ):
        add(value)
    square = np.zeros((TEXT_WIDTH, TEXT_WIDTH), np.float32)
    ones = np.ones(TEXT_WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), TEXT_WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", ones)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", ones)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    _finish(writer)


def write_tower(path: Path, edge: int, depth: int, width: int) -> None:
    """Write the tower and a projector of two layers."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return rng.normal(0, 0.02, shape).astype(np.float32)

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", False)
    writer.add_string("clip.projector_type", "mlp")
    for name, value in {
        **{"image_size": edge, "patch_size": PATCH, "embedding_length": width, "feed_forward_length": 4 * width},
        **{"block_count": depth, "attention.head_count": width // HEAD, "projection_dim": TEXT_WIDTH},
    }.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    writer.add_tensor("v.patch_embd.weight", random(width, 3, PATCH, PATCH))
    writer.add_tensor("v.class_embd", random(width))
    writer.add_tensor("v.position_embd.weight", random((edge // PATCH) ** 2 + 1, width))
    for name in ("v.pre_ln", *(f"v.blk.{layer}.{norm}" for layer in range(depth) for norm in ("ln1", "ln2"))):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(width, np.float32))
    matrices = {"mm.0": (TEXT_WIDTH, width), "mm.2": (TEXT_WIDTH, TEXT_WIDTH)}
    for layer in range(depth):
        matrices |= {f"v.blk.{layer}.{name}": (width, width) for name in ("attn_q", "attn_k", "attn_v", "attn_out")}
        matrices |= {f"v.blk.{layer}.ffn_up": (4 * width, width), f"v.blk.{layer}.ffn_down": (width, 4 * width)}
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", random(*shape))
        writer.add_tensor(f"{name}.bias", random(shape[0]))
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(folder: Path, edge: int, threads: int, rounds: int) -> list[float]:
    import llama_cpp  # type: ignore[import-not-found]
    from llama_cpp import mtmd_cpp as mtmd  # type: ignore[import-not-found]

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(folder / "text.gguf").encode(), llama_cpp.llama_model_default_params()
    )
    settings = mtmd.mtmd_context_params_default()
    settings.use_gpu, settings.print_timings, settings.n_threads = False, False, threads
    context = mtmd.mtmd_init_from_file(str(folder / "tower.gguf").encode(), model, settings)
    assert context, "mtmd opens the tower"
    pixels = (ctypes.c_uint8 * (3 * edge * edge))(*(value % 251 for value in range(3 * edge * edge)))
    bitmap = mtmd.mtmd_bitmap_init(edge, edge, pixels)
    chunks = mtmd.mtmd_input_chunks_init()
    marker = mtmd.mtmd_default_marker()
    text = mtmd.mtmd_input_text(text=marker, text_len=len(marker), add_special=True, parse_special=True)
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1) == 0
    found = [mtmd.mtmd_input_chunks_get(chunks, at) for at in range(mtmd.mtmd_input_chunks_size(chunks))]
    (image,) = (one for one in found if mtmd.mtmd_input_chunk_get_type(one) == 1)
    took = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        assert mtmd.mtmd_encode_chunk(context, image) == 0
        if number:  # the first round warms up
            took.append(time.perf_counter() - began)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"edge": 336, "depth": 4, "width": 256, "threads": 2, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text_model(folder / "text.gguf")
        write_tower(folder / "tower.gguf", given.edge, given.depth, given.width)
        took = measure(folder, given.edge, given.threads, given.rounds)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
