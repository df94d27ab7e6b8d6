"""Scales of an 8-bit KV cache that a checkpoint folder may bring: kv_cache_scales.json, as AMD Quark and vLLM write it.

{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.0230, "1": …}}}}: by rank, then by layer. Pages
hold k / scale and v / scale, one scale for both.
"""

import json
from pathlib import Path

from engine.api.errors import CheckpointError

FILE = "kv_cache_scales.json"


def read_kv_scales(folder: Path, layers: int) -> tuple[float, ...]:
    """One scale for each attention layer; all 1 where the folder has no file. Raises CheckpointError."""
    path = folder / FILE
    if not path.exists():
        return (1.0,) * layers
    try:
        ranks = json.loads(path.read_text())["kv_cache"]["scaling_factor"]
        found = {int(layer): float(scale) for layer, scale in ranks["0"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: kv_cache.scaling_factor.0 must have a number for each layer: {error}"
        ) from error
    if len(ranks) > 1:
        raise CheckpointError(f"{path}: has scales for {len(ranks)} ranks, and the model runs on one")
    if sorted(found) != list(range(layers)):
        raise CheckpointError(
            f"{path}: has scales for layers {sorted(found)[:3]}…, and the model has 0 to {layers - 1}"
        )
    wrong = next((layer for layer, scale in found.items() if not 0 < scale < float("inf")), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: the scale of layer {wrong} is {found[wrong]}; it must be above 0 and finite")
    return tuple(found[layer] for layer in range(layers))
