"""The planned memory of a checkpoint that a test loads."""

from typing import Any

from engine.distributed.world import SINGLE
from engine.lowering.footprint import Holder, Holding, footprint
from engine.models.checkpoint import Checkpoint
from kernels.cpu.library import tiling


def predicted(
    checkpoint: Checkpoint,
    kernels: str,
    dtype: str = "float32",
    bits: str = "stored",
    world: Any = SINGLE,
    group: int = 0,
    head: str = "auto",
    embedding: str = "stored",
    bf16: bool = False,
) -> tuple[Holding, ...]:
    holder = Holder(
        dtype=dtype,
        tiling=tiling(kernels, bf16=bf16),
        bits=bits,
        group=group,
        head=head,
        embedding=embedding,
        rank=world.rank,
        ranks=world.size,
        triton=kernels == "triton",
    )
    return footprint(checkpoint.model, checkpoint.tensors, checkpoint.quantization, holder)
