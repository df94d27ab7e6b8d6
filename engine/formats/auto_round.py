"""AutoRound (also named inc): the integers of gptq or awq, with settings of their own for some projections.

packing_format  auto_round:auto_gptq  the tensors of gptq, zero points minus 1
                auto_round, auto_round:exllamav2, :tritonv2  the same, zero points unchanged
                auto_round:auto_awq   the tensors of awq, version gemm
extra_config    settings by path, or by regular expression that is found in the path; 16 bits: plain
block_name_to_quantize  beginnings of paths; other projections are quantized only by extra_config

Source: AutoRound 0.16, export/export_to_autoround/export.py.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.formats.awq import Awq
from engine.formats.format import Format, Method, Settings, group_size, one_of, refuse
from engine.formats.gptq import BITS, Gptq
from engine.formats.layers import not_skipped, pattern
from engine.formats.native import Groups

PATTERN_SIGNS = frozenset(r"*+?^$()[]{}|\\")  # entries with one of these are regular expressions
PLAIN_BITS = 16


def _format(settings: Settings, group: str) -> Format:
    """group: the settings of the projection as JSON."""
    own = {**settings, **json.loads(group)}
    packing = str(own.get("packing_format", "auto_round:auto_gptq"))
    one_of("data_type", own.get("data_type", "int"), ("int",))
    bits: Any = own.get("bits")
    if bits not in BITS:
        refuse("bits", bits, f"auto-round is supported with {BITS[0]} to {BITS[-1]} bits")
    symmetric = own.get("sym", True) is True
    stored = Groups(bits, group_size(own.get("group_size", 128), "group_size"), zeros=not symmetric)
    if "awq" in packing:
        if bits != 4:
            refuse("bits", bits, f"supported with {packing} is 4")
        return Awq.of(replace(stored, zeros=True))
    if packing.partition(":")[0] != "auto_round" or "fp8" in packing or "llm_compressor" in packing:
        refuse("packing_format", packing, "supported are auto_round, auto_round:auto_gptq and auto_round:auto_awq")
    return Gptq.of(stored, zero_offset=1 if "gptq" in packing else 0)


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(one, dict) for one in extra.values()):
        raise CheckpointError(f"{where}.extra_config must be an object of settings by layer")
    patterns = [(pattern(name, where), one) for name, one in extra.items() if PATTERN_SIGNS & set(name)]
    blocks = settings.get("block_name_to_quantize") or settings.get("to_quant_block_names") or []
    begins = tuple(name.strip() for name in (blocks.split(",") if isinstance(blocks, str) else _flat(blocks)))
    found = {}
    for path in not_skipped(settings, paths, [], where):
        own = extra.get(path) or next((one for expression, one in patterns if expression.search(path)), None)
        if own is None and (path == head or (begins and not path.startswith(begins))):
            continue
        if (own or {}).get("bits", settings.get("bits")) != PLAIN_BITS:
            found[path] = json.dumps(own or {}, sort_keys=True)
    return found


def _flat(names: list[Any]) -> list[str]:
    return [str(one) for name in names for one in (name if isinstance(name, list) else [name])]


METHOD = Method(
    name="auto-round",
    format=_format,
    groups=_groups,
    table=(
        (
            "auto-round, inc (`auto_round`, `auto_gptq`, `auto_awq`)",
            "2 to 8 bits, also mixed (`extra_config`)",
            "4 bits, from 5 bits on 8; dequantized with zero points of 8 bits",
        ),
    ),
)
ALIASES = tuple(replace(METHOD, name=name, table=()) for name in ("inc", "intel/auto-round"))
