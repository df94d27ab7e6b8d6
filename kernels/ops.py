"""All operations that have a kernel of their own."""

from kernels.activation import ACTIVATION
from kernels.activation_quantized import ACTIVATION_QUANTIZED
from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.latent import LATENT_DECODE, LATENT_PREFILL
from kernels.attention.prefill import PREFILL_ATTENTION
from kernels.attention.prefill_schedule import PREFILL_SCHEDULE
from kernels.attention.schedule import DECODE_SCHEDULE
from kernels.attention.select import SELECT_KEYS
from kernels.attention.sparse_latent import SPARSE_LATENT
from kernels.block_copy import BLOCK_COPY
from kernels.block_matmul import BLOCK_MATMUL
from kernels.cross_attention_inputs import CROSS_ATTENTION_INPUTS
from kernels.embedding import EMBEDDING
from kernels.experts.block_matmul import BLOCK_EXPERT_MATMUL
from kernels.experts.fp8_matmul import FP8_EXPERT_MATMUL
from kernels.experts.int8_matmul import INT8_EXPERT_MATMUL
from kernels.experts.integer_matmul import INTEGER_EXPERT_MATMUL
from kernels.experts.matmul import EXPERT_MATMUL
from kernels.experts.routes import EXPERT_ROUTES
from kernels.experts.schedule import EXPERT_SCHEDULE
from kernels.experts.sum import EXPERT_SUM
from kernels.finite import FINITE_ROWS
from kernels.fp8_matmul import FP8_MATMUL
from kernels.head_matmul import HEAD_MATMUL
from kernels.index_kv import INDEX_KV
from kernels.int8_matmul import INT8_MATMUL
from kernels.integer_matmul import INTEGER_MATMUL
from kernels.latent_kv import LATENT_KV
from kernels.layer_norm import LAYER_NORM
from kernels.linear import MATMUL
from kernels.lora_expand import LORA_EXPAND
from kernels.lora_shrink import LORA_SHRINK
from kernels.op import Op
from kernels.pool_end import POOL_END
from kernels.pool_rows import POOL_ROWS
from kernels.qk_norm_rope_kv import QK_NORM_ROPE_KV
from kernels.quantize_int8 import QUANTIZE_INT8
from kernels.quantize_rows import QUANTIZE_ROWS
from kernels.recurrent.causal_conv import CAUSAL_CONV
from kernels.recurrent.delta_rule import DELTA_RULE
from kernels.recurrent.gated_norm import GATED_NORM
from kernels.recurrent.rg_lru import RG_LRU
from kernels.recurrent.selective_scan import SELECTIVE_SCAN
from kernels.reduce_norm import REDUCE_NORM
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
from kernels.step_adapters import STEP_ADAPTERS
from kernels.step_inputs import NEXT_TOKENS, STAGED_WRITES, STEP_INPUTS
from kernels.step_segments import STEP_SEGMENTS

OPS: tuple[Op, ...] = (
    STAGED_WRITES,
    STEP_INPUTS,
    STEP_SEGMENTS,
    STEP_ADAPTERS,
    CROSS_ATTENTION_INPUTS,
    EMBEDDING,
    RMS_NORM,
    REDUCE_NORM,
    RMS_NORM_QUANTIZED,
    LAYER_NORM,
    ROPE_ANGLES,
    QK_NORM_ROPE_KV,
    DECODE_SCHEDULE,
    DECODE_ATTENTION,
    PREFILL_SCHEDULE,
    PREFILL_ATTENTION,
    ENCODER_ATTENTION,
    LATENT_KV,
    LATENT_DECODE,
    LATENT_PREFILL,
    INDEX_KV,
    SELECT_KEYS,
    SPARSE_LATENT,
    HEAD_MATMUL,
    MATMUL,
    FP8_MATMUL,
    INTEGER_MATMUL,
    BLOCK_MATMUL,
    QUANTIZE_ROWS,
    INT8_MATMUL,
    QUANTIZE_INT8,
    LORA_SHRINK,
    LORA_EXPAND,
    ACTIVATION,
    ACTIVATION_QUANTIZED,
    CAUSAL_CONV,
    DELTA_RULE,
    SELECTIVE_SCAN,
    RG_LRU,
    GATED_NORM,
    EXPERT_ROUTES,
    EXPERT_SCHEDULE,
    EXPERT_MATMUL,
    INTEGER_EXPERT_MATMUL,
    BLOCK_EXPERT_MATMUL,
    FP8_EXPERT_MATMUL,
    INT8_EXPERT_MATMUL,
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
