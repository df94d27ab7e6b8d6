"""Convert a checkpoint to a GGUF file of any type, once, with the packages gguf and llama-cpp-python.

    python -m benchmarks.backends.gguf_file FOLDER Q4_K_M Q6_K

writes the files beforehand, for engines whose environment lacks these packages.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Tensors = Iterator[tuple[str, Any]]  # names of transformers and arrays


def _plain(config: Config, tensors: Tensors) -> Tensors:
    return tensors


def _stacked(config: Config, tensors: Tensors) -> Tensors:
    """Stack the matrices of all experts of a layer."""
    import numpy as np

    count, waiting = config.get("num_experts") or config["n_routed_experts"], dict[str, dict[int, Any]]()
    for name, array in tensors:
        before, marker, after = name.partition(".experts.")
        if not marker:
            yield name, array
            continue
        number, _, rest = after.partition(".")
        stack = waiting.setdefault(f"{before}.experts.{rest}", {})
        stack[int(number)] = array
        if len(stack) == count:
            joined = f"{before}.experts.{rest}"
            yield joined, np.stack([waiting[joined][at] for at in range(count)])
            del waiting[joined]
    assert not waiting, f"experts of {sorted(waiting)} are missing"


def _latent(config: Config, tensors: Tensors) -> Tensors:
    """Divide kv_b_proj into matrices of keys, transposed, and of values."""
    heads, keys, values = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    for name, array in _stacked(config, tensors):
        if name.endswith("kv_b_proj.weight"):
            both = array.reshape(heads, keys + values, -1)
            yield name.replace("kv_b_proj", "k_b_proj"), both[:, :keys].transpose(0, 2, 1).copy()
            yield name.replace("kv_b_proj", "v_b_proj"), both[:, keys:].copy()
        else:
            yield name, array


def _mamba2(config: Config, tensors: Tensors) -> Tensors:
    """Give the tensors of Mamba-2 mixers the shapes of llama.cpp."""
    import numpy as np

    for name, array in tensors:
        if name.endswith("conv1d.weight"):
            array = array.squeeze(1).astype(np.float32)
        elif name.endswith(".A_log"):
            array = -np.exp(array.astype(np.float32)).reshape(-1, 1)
        elif name.endswith("mamba.D"):
            array = array.reshape(-1, 1)
        elif name.endswith("mamba.norm.weight"):
            array = array.reshape(config["mamba_n_groups"], -1)
        yield name.replace(".dt_bias", ".dt_proj.bias"), array


def _set_nothing(writer: Any, config: Config) -> None:
    pass


def _set_experts(writer: Any, config: Config) -> None:
    writer.add_expert_count(config.get("num_experts") or config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _set_latent(writer: Any, config: Config) -> None:
    _set_experts(writer, config)
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_rope_dimension_count(rotated)


def _set_hybrid(writer: Any, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"] // 2)
    writer.add_rope_scaling_finetuned(True)


@dataclass(frozen=True)
class Kind:
    """How llama.cpp stores the models of one `model_type`. Values that do not change the speed, such as the order of
    rotated dimensions, are not converted."""

    architecture: str  # in the package gguf
    set: Callable[[Any, Config], None] = _set_nothing
    convert: Callable[[Config, Tensors], Tensors] = _plain


KINDS = {
    "qwen2": Kind("QWEN2"),
    "qwen3": Kind("QWEN3"),
    "qwen3_moe": Kind("QWEN3MOE", _set_experts, _stacked),
    "deepseek_v2": Kind("DEEPSEEK2", _set_latent, _latent),
    "bamba": Kind("GRANITE_HYBRID", _set_hybrid, _mamba2),
}
"""By model_type in config.json."""


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


def write_adapter(checkpoint: Path, folder: Path) -> Path:
    """Convert the LoRA adapter of a PEFT folder to the format of llama.cpp's convert_lora_to_gguf.py. Return the file.
    Architectures with reordered rows of queries and keys are not supported."""
    import gguf as format_
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    settings = json.loads((folder / "adapter_config.json").read_text())
    kind, file = KINDS[config["model_type"]], folder / "adapter.gguf"
    architecture = getattr(format_.MODEL_ARCH, kind.architecture)
    writer = format_.GGUFWriter(file, format_.MODEL_ARCH_NAMES[architecture])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    names = format_.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in _tensors(folder, "adapter_model.safetensors"):
        path, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        found = names.get_name(f"{path}.weight", (".weight",))
        assert found is not None, f"llama.cpp has no tensor for {name}"
        writer.add_tensor(f"{found}.{side.lower()}", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _heads(config: Config) -> int | list[int]:
    """Return the KV heads: one of latent attention, and none in layers with a mixer."""
    if "kv_lora_rank" in config:
        return 1
    heads: int = config["num_key_value_heads"]
    if (layers := config.get("attn_layer_indices")) is not None:
        return [heads if at in layers else 0 for at in range(config["num_hidden_layers"])]
    return heads


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
    kind = KINDS[config["model_type"]]
    architecture = getattr(format_.MODEL_ARCH, kind.architecture)
    writer = format_.GGUFWriter(file, format_.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_heads(config))
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(1)
    kind.set(writer, config)
    names = format_.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in kind.convert(config, _tensors(checkpoint)):
        exact = values.ndim == 1 or values.dtype == np.float32
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, f"llama.cpp has no tensor for {name}"
        writer.add_tensor(found, values.astype(np.float32 if exact else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Path, file: str = "model.safetensors") -> Tensors:
    """Read the bfloat16 tensors of a checkpoint: vectors as float32, all others as float16."""
    import numpy as np

    data = np.memmap(checkpoint / file, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    for name, info in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        bits = data[begin:end].view(np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32).reshape(info["shape"])
        yield name, values if values.ndim == 1 else values.astype(np.float16)


if __name__ == "__main__":
    main()
