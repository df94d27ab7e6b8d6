"""All operations that have a kernel of their own."""

from kernels.op import Op
from kernels.rms_norm import RMS_NORM

OPS: tuple[Op, ...] = (RMS_NORM,)
