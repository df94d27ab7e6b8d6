"""FlashAttention, if it is installed: a baseline for benchmarks of our attention, which never serves requests.

`flash_attention` is an operation of torch whose body is the library's; shapes can be traced without the library. vLLM's
build is preferred, in version 3 if the device supports it; the alternative is the package flash-attn. Sources:
flash_attn_interface.py of vllm-project/flash-attention and of Dao-AILab/flash-attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kernels.op import Args

FOUND_IN = ("vllm.vllm_flash_attn", "flash_attn")  # modules, the preferred one first
NO_WINDOW = -1


class MissingLibrary(RuntimeError):
    """FlashAttention is not installed."""


@dataclass(frozen=True)
class Flash:
    """An installed build of FlashAttention. `version` is None unless the library takes its version as an argument."""

    name: str
    attend: Callable[..., Tensor]
    version: int | None


@cache
def flash() -> Flash | None:
    """Return the installed library, or None if neither is installed or can be imported with this version of torch."""
    for module in FOUND_IN:
        try:
            found = import_module(module)
            attend = found.flash_attn_varlen_func
        except (ImportError, AttributeError, OSError, RuntimeError):
            continue
        has = getattr(found, "is_fa_version_supported", None)
        version = None if has is None else next((number for number in (3, 2) if has(number)), None)
        spelled = "FlashAttention" if version is None else f"FlashAttention {version}"
        return Flash(f"{spelled} of {module.partition('.')[0]}", attend, version)
    return None


@torch.library.custom_op("slipway::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    query_start: Tensor,
    key_start: Tensor,
    lengths: Tensor,
    most: int,
    longest: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    """Compute attention with FlashAttention.

    q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim], or with a table, [rows, blocks] int32, [blocks,
    block_tokens, kv_heads, dim]; query_start, key_start: [rows + 1] int32; lengths: [rows] int32, keys of each row;
    most, longest: maximum number of queries and of keys of a row; window: number of keys that a position reads before
    its own (and after its own if not causal), NO_WINDOW for all; softcap: 0 for none → [tokens, heads, dim]. Raises
    MissingLibrary."""
    library = flash()
    if library is None:
        raise MissingLibrary(f"FlashAttention is not installed: no module {' and no '.join(FOUND_IN)}")
    asked: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": query_start,
        "max_seqlen_q": most,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window, NO_WINDOW if causal else window),
        "softcap": softcap,
        "block_table": table,
    }
    if library.version is None:  # the package reads the lengths of paged keys from the argument for their starts
        return library.attend(cu_seqlens_k=key_start, **asked)
    keys = {"cu_seqlens_k": key_start} if table is None else {"seqused_k": lengths}
    return library.attend(fa_version=library.version, **keys, **asked)


@flash_attention.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def flash_arguments(op: str, args: Args) -> Args | None:
    """Convert the arguments of our operation to arguments of `flash_attention` that compute the same. Return None
    for an operation that FlashAttention lacks. Waits for the device. Raises ValueError for unsupported options."""
    match op:
        case "decode_attention":
            q, pages, layer, table, slot, query_start, lengths, _, _, scale, window, softcap, *rest = args
            return _paged(q, pages, layer, table, slot, query_start, lengths, scale, window, softcap, rest)
        case "prefill_attention":
            q, pages, layer, table, slot, query_start, lengths, _, scale, window, softcap, *rest, _ = args
            return _paged(q, pages, layer, table, slot, query_start, lengths, scale, window, softcap, rest)
        case "encoder_attention":
            q, k, v, start, _, scale, causal, window, softcap, biases = args
            if biases is not None:
                raise ValueError("the comparison with FlashAttention does not support biases")
            count = start.diff()
            most = int(count.max())
            sizes = most, most, scale, causal, _behind(window), softcap or 0.0
            return q, k, v, None, start, start, count, *sizes
    return None


def _paged(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    others: list[Any],
) -> Args:
    """others: further arguments of our operation, which are options that FlashAttention lacks, and page scales."""
    scales = (1.0, None)  # of pages that are not quantized
    if pages.dtype != q.dtype or any(isinstance(one, Tensor) or one not in scales for one in others):
        raise ValueError(
            "the comparison with FlashAttention does not support sinks, spans, key_starts, slopes, chunks, biases "
            "and pages of other types than q"
        )
    key_start = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    sizes = int(query_start.diff().max()), int(lengths.max()), scale, True, _behind(window), softcap or 0.0
    keys, values = pages[:, layer, 0], pages[:, layer, 1]
    return q, keys, values, table[slot.long()].contiguous(), query_start, key_start, lengths, *sizes


def _behind(window: int | None) -> int:
    return NO_WINDOW if window is None else window - 1
