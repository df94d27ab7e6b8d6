"""Definitions that the truncation kernels share: the order and the weights of tokens, and the threshold of min_p.

s = logit / temperature. The mass of a token is exp(s - largest s) in units of 2^-40, an integer, so that a sum does not
depend on its order.
"""

from kernels.jit import jit, tl
from kernels.sampling.float_order import key_value, order_key


@jit
def float64_at(low, high, at):
    """Load a float64 whose two int32 words are in two lines."""
    lower = tl.load(low + at).to(tl.int64) & 0xFFFFFFFF
    return (lower | (tl.load(high + at).to(tl.int64) << 32)).to(tl.float64, bitcast=True)


@jit
def is_truncated(temperature, top_k, top_p, log_min_p):
    return (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")))


@jit
def scaled(x, temperature):
    """Return s for fp32 logits. The division is exact, because tokens with equal s are ordered by their ids."""
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    return x


@jit
def mass_of(s, peak):
    """Return the mass as int64 in units of 2^-40."""
    return (tl.exp2((s - peak) * 1.4426950408889634) * 1099511627776.0).to(tl.int64)


@jit
def least_kept(peak, log_min_p):
    """Return the smallest fp32 that is not below peak + log_min_p (float64)."""
    exact = peak.to(tl.float64) + log_min_p
    rounded = exact.to(tl.float32)
    return tl.where(rounded.to(tl.float64) < exact, key_value(order_key(rounded) + 1), rounded)
