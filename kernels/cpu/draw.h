// Draw of one token for each row: the token with the largest logit, or with the largest logit + noise.
//
// The noise equals engine/sampling/noise.py, a function of the row's key and the token alone: the token's hash and the
// key pass through MurmurHash3's finaliser to a number u in (0, 1), and -log(-log(1 - u)) is Gumbel distributed.
#pragma once

#include "simd.h"

namespace draw {

typedef uint32_t vu __attribute__((vector_size(4 * W)));

static inline vu finalised(vu h) {
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ h >> 16;
}

// Natural logarithm of positive normal numbers: a polynomial in the mantissa in [√½, √2), plus exponent · ln 2.
// Source: Cephes, logf.
static inline vf log(vf x) {
    vi bits = (vi)x;
    vi exponent = ((bits >> 23) & 0xff) - 126;
    vf m = (vf)((bits & 0x007fffff) | 0x3f000000);  // [½, 1)
    vi low = m < 0.707106781f;
    exponent += low;  // a true lane is -1
    m = (low ? m + m : m) - 1.f;
    vf z = m * m, e = to_float(exponent);
    vf p = splat(7.0376836292e-2f);
    for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                    2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        p = p * m + c;
    p = p * m * z;
    p += e * -2.12194440e-4f;
    p -= z * 0.5f;
    return m + p + e * 0.693359375f;
}

// -log(1 - u) for 0 < u < 1, also exact near 0: log(w) · u / (1 - w) compensates for the rounding of w = 1 - u.
static inline vf exponential(vf u) {
    vf w = 1.f - u;
    vf gone = 1.f - w;
    vf y = -log(w) * (u / gone);
    return gone == 0.f ? u : y;
}

static inline vf gumbel(vi token, uint32_t first, uint32_t second) {
    vu hashed = finalised((vu)token + 1u) ^ first;
    vu bits = finalised(finalised(hashed) ^ second) & 0x7FFFFFFFu;
    vf u = (to_float((vi)bits) + 0.5f) * 0x1p-31f;
    const vf last = splat(1.f - 0x1p-24f);
    u = u > last ? last : u;
    return -log(exponential(u));
}

struct Best {
    float score;
    int64_t token;
};

// Returns the first of the largest. NaN is larger than all numbers. key null: no noise.
static Best best(const float* logits, int64_t vocab, const uint32_t* key) {
    vf top = splat(-INFINITY);
    vi where = {}, lane, spoiled = {};
    for (int i = 0; i < W; i++) lane[i] = i;
    auto look = [&](vf x, int64_t at) {
        vi token = lane + int32_t(at);
        if (key) x += gumbel(token, key[0], key[1]);
        vi better = x > top;
        top = better ? x : top;
        where = better ? token : where;
        spoiled |= x != x;
    };
    int64_t at = 0;
    for (; at + W <= vocab; at += W) look(load(logits + at), at);
    if (at < vocab) {
        float rest[W];
        for (int i = 0; i < W; i++) rest[i] = at + i < vocab ? logits[at + i] : -INFINITY;
        look(load(rest), at);
    }
    Best found{top[0], where[0]};
    bool nan = spoiled[0];
    for (int i = 1; i < W; i++) {
        nan = nan || spoiled[i];
        if (top[i] > found.score || (top[i] == found.score && where[i] < found.token)) found = {top[i], where[i]};
    }
    if (!nan) return found;
    for (int64_t token = 0; token < vocab; token++)
        if (std::isnan(logits[token])) return {NAN, token};
    return {NAN, 0};
}

}  // namespace draw
