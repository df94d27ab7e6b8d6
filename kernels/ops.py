"""All operations that have a kernel of their own."""

from kernels.activation import ACTIVATION
from kernels.embedding import EMBEDDING
from kernels.heads import HEADS
from kernels.layer_norm import LAYER_NORM
from kernels.op import Op
from kernels.rms_norm import RMS_NORM
from kernels.rope import ROPE_ANGLES

OPS: tuple[Op, ...] = (
    EMBEDDING,
    RMS_NORM,
    LAYER_NORM,
    ROPE_ANGLES,
    HEADS,
    ACTIVATION,
)
