"""All operations that have a kernel of their own."""

from kernels.activation import ACTIVATION
from kernels.block_copy import BLOCK_COPY
from kernels.decode_attention import DECODE_ATTENTION
from kernels.decode_work import DECODE_WORK
from kernels.embedding import EMBEDDING
from kernels.finite import FINITE_ROWS
from kernels.heads import HEADS
from kernels.layer_norm import LAYER_NORM
from kernels.linear import MATMUL
from kernels.op import Op
from kernels.rms_norm import RMS_NORM
from kernels.rope import ROPE_ANGLES
from kernels.step_inputs import NEXT_TOKENS, STAGED_WRITES, STEP_INPUTS

OPS: tuple[Op, ...] = (
    STAGED_WRITES,
    STEP_INPUTS,
    EMBEDDING,
    RMS_NORM,
    LAYER_NORM,
    ROPE_ANGLES,
    HEADS,
    DECODE_WORK,
    DECODE_ATTENTION,
    MATMUL,
    ACTIVATION,
    FINITE_ROWS,
    NEXT_TOKENS,
    BLOCK_COPY,
)
