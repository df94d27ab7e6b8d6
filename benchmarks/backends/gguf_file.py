"""Convert a checkpoint to a GGUF file of any type, once, with the packages gguf and llama-cpp-python.

    python -m benchmarks.backends.gguf_file FOLDER Q4_K_M Q6_K

writes the files beforehand, for engines whose environment lacks these packages.
"""

import argparse
import json
from pathlib import Path

# llama.cpp's architecture name and tensor name table, by model_type.
ARCHITECTURES = {"qwen2": "QWEN2", "qwen3": "QWEN3"}


def gguf(checkpoint: Path, bits: str) -> Path:
    """bits: F16 or another type of llama.cpp."""
    file, half = checkpoint / f"{bits}.gguf", checkpoint / "F16.gguf"
    if not half.exists():
        _write(checkpoint, half)
    if not file.exists():
        try:
            import llama_cpp  # type: ignore[import-not-found]
        except ModuleNotFoundError as error:
            raise SystemExit(f"{file} does not exist; write it with {__name__} where llama-cpp-python is") from error

        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{bits}")
        assert llama_cpp.llama_model_quantize(str(half).encode(), str(file).encode(), settings) == 0
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("types", nargs="+", help="types of llama.cpp")
    arguments = parser.parse_args()
    for bits in arguments.types:
        print(gguf(arguments.checkpoint, bits))


def _write(checkpoint: Path, file: Path) -> None:
    import gguf as format_  # type: ignore[import-not-found]
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    writer = format_.GGUFWriter(file, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(1)
    names = format_.get_tensor_name_map(getattr(format_.MODEL_ARCH, ARCHITECTURES[kind]), config["num_hidden_layers"])
    data = np.memmap(checkpoint / "model.safetensors", np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    for name, info in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        bits = data[begin:end].view(np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32).reshape(info["shape"])
        array = values if len(info["shape"]) == 1 else values.astype(np.float16)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
