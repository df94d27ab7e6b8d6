"""The engine: scheduler, paged KV cache, models, kernels, one loop.

One word for one thing, everywhere:

block     equal piece of the KV pool, `block_tokens` tokens of every layer of one group
page      the bytes of one block in one layer
group     layers that share a block table, because they keep the same kind of state
row       one request's part of one step
slot      a request's place in the worker's request table, fixed while it runs
source    a tensor of the checkpoint
rank      one process of a tensor-parallel group
step      one run of the model over a plan's rows
"""

from typing import Any

_OFFLINE = ("LLM", "Generation", "Params")


def __getattr__(name: str) -> Any:
    """`engine.LLM` and its companions load torch, so they come when they are asked for."""
    if name not in _OFFLINE:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from engine import llm

    return getattr(llm, name)
