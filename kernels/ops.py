"""All operations that have a kernel of their own."""

from kernels.activation import ACTIVATION
from kernels.activation_quantized import ACTIVATION_QUANTIZED
from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.prefill import PREFILL_ATTENTION
from kernels.attention.work import DECODE_WORK
from kernels.block_copy import BLOCK_COPY
from kernels.embedding import EMBEDDING
from kernels.experts.matmul import EXPERT_MATMUL
from kernels.experts.routes import EXPERT_ROUTES
from kernels.experts.sum import EXPERT_SUM
from kernels.experts.work import EXPERT_WORK
from kernels.finite import FINITE_ROWS
from kernels.fp8_matmul import FP8_MATMUL
from kernels.heads import HEADS
from kernels.layer_norm import LAYER_NORM
from kernels.linear import MATMUL
from kernels.op import Op
from kernels.pool_end import POOL_END
from kernels.pool_rows import POOL_ROWS
from kernels.quantize_rows import QUANTIZE_ROWS
from kernels.rms_norm import RMS_NORM
from kernels.rms_norm_quantized import RMS_NORM_QUANTIZED
from kernels.rope import ROPE_ANGLES
from kernels.sampling.bad_words import BAD_WORDS
from kernels.sampling.cap_logits import CAP_LOGITS
from kernels.sampling.logit_bias import LOGIT_BIAS
from kernels.sampling.min_tokens import MIN_TOKENS
from kernels.sampling.penalties import PENALTIES
from kernels.sampling.sample import SAMPLE
from kernels.sampling.token_mask import TOKEN_MASK
from kernels.sampling.top_logprobs import TOP_LOGPROBS
from kernels.step_inputs import NEXT_TOKENS, STAGED_WRITES, STEP_INPUTS
from kernels.step_segments import STEP_SEGMENTS
from kernels.step_sources import STEP_SOURCES

OPS: tuple[Op, ...] = (
    STAGED_WRITES,
    STEP_INPUTS,
    STEP_SEGMENTS,
    STEP_SOURCES,
    EMBEDDING,
    RMS_NORM,
    RMS_NORM_QUANTIZED,
    LAYER_NORM,
    ROPE_ANGLES,
    HEADS,
    DECODE_WORK,
    DECODE_ATTENTION,
    PREFILL_ATTENTION,
    ENCODER_ATTENTION,
    MATMUL,
    FP8_MATMUL,
    QUANTIZE_ROWS,
    ACTIVATION,
    ACTIVATION_QUANTIZED,
    EXPERT_ROUTES,
    EXPERT_WORK,
    EXPERT_MATMUL,
    EXPERT_SUM,
    FINITE_ROWS,
    POOL_ROWS,
    POOL_END,
    CAP_LOGITS,
    TOKEN_MASK,
    LOGIT_BIAS,
    MIN_TOKENS,
    PENALTIES,
    BAD_WORDS,
    SAMPLE,
    TOP_LOGPROBS,
    NEXT_TOKENS,
    BLOCK_COPY,
)
