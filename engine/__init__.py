"""The engine: scheduler, paged KV cache, models, kernels, one loop.

Terms, with one meaning each:

block     fixed-size unit of the KV pool: `block_tokens` tokens in every layer of one group
page      the bytes of one block in one layer
group     layers that share a block table, because they cache the same kind of state
row       one request's part of one step
slot      a request's index in the worker's request table, fixed while it is running
source    a tensor of the checkpoint
rank      one process of a tensor-parallel group
step      one run of the model over the rows of a plan
"""

from typing import Any

_OFFLINE = ("LLM", "Generation", "Params")


def __getattr__(name: str) -> Any:
    """Import `LLM`, `Generation` and `Params` on first use, because they load torch."""
    if name not in _OFFLINE:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from engine import llm

    return getattr(llm, name)
