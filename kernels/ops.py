"""All operations that have a kernel of their own."""

from kernels.decode_attention import DECODE_ATTENTION
from kernels.decode_work import DECODE_WORK
from kernels.encoder_attention import ENCODER_ATTENTION
from kernels.op import Op
from kernels.prefill_attention import PREFILL_ATTENTION
from kernels.rms_norm import RMS_NORM

OPS: tuple[Op, ...] = (RMS_NORM, DECODE_WORK, DECODE_ATTENTION, PREFILL_ATTENTION, ENCODER_ATTENTION)
