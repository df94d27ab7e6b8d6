"""Formats that are refused by name, each with the reason and what to use instead."""

from collections.abc import Mapping

_CODEBOOKS = "its weights are indices of trained codebooks, which no kernel here multiplies by"
_OTHER = "use a checkpoint of the model in gptq, awq, compressed-tensors or GGUF"
UNREAD: Mapping[str, str] = {
    "exl2": f"ExLlamaV2 has several widths of integers within a matrix; {_OTHER} (such as Q4_K_M)",
    "exl3": f"ExLlamaV3 has trellis codes, which only its own GPU kernels decode; {_OTHER} (such as IQ4_XS)",
    "aqlm": f"{_CODEBOOKS}; {_OTHER}",
    "quip": f"{_CODEBOOKS}; {_OTHER}",
    "quip_sharp": f"{_CODEBOOKS}; {_OTHER}",
    "vptq": f"{_CODEBOOKS}; {_OTHER}",
    "higgs": f"{_CODEBOOKS}, after a Hadamard transform; {_OTHER}",
    "spqr": f"it has sparse outliers beside integers of 3 bits; {_OTHER}",
    "squeezellm": f"{_CODEBOOKS}; {_OTHER}",
    "bitnet": "its ternary weights need activations of 8 bits; use the model's GGUF file of type TQ2_0 or TQ1_0",
    "eetq": f"its bytes have the order of a GPU kernel; {_OTHER}",
    "quanto": f"it is saved for quanto's own loader; {_OTHER}",
    "fp_quant": f"its weights are rotated by a Hadamard transform; {_OTHER}",
    "fouroversix": "use the NVFP4 checkpoint of ModelOpt or compressed-tensors",
    "sinq": f"its scales of rows and columns have no kernel; {_OTHER}",
    "metal": "it is for GPUs of Apple; use the model's GGUF file",
    "mlx": "it is for GPUs of Apple; use the model's GGUF file",
    "marlin": "save it as gptq with checkpoint_format marlin or gptq_v2",
    "gptq_marlin_24": f"its weights are sparse (2:4); {_OTHER}",
    "deepspeedfp": f"it is quantized while it is loaded; {_OTHER}",
    "nvfp4": "transformers quantizes to it while it loads; use the NVFP4 checkpoint of ModelOpt or compressed-tensors",
}
