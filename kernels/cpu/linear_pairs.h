// y = x Wᵀ by vectors of pairs of bf16 numbers (AVX-512 BF16), with each x rounded to bf16.
//
// Weights are packed as for matrix tiles (linear_amx.h): [16 outputs][word][output][2 inputs]. Rows of x in panels of R,
// [panel][word][R] pairs. A lane is one output, which adds one pair after another, so a row's result does not depend on
// the other rows. The instruction rounds each of its two sums to float and takes subnormal numbers for zero.
#pragma once
#ifdef __AVX512BF16__

#include "linear.h"

namespace pairs {

constexpr int64_t LINE = 64;           // bytes of a word of 16 outputs
constexpr int64_t DEPTH_WORDS = 128;   // words whose weights, of two tiles, stay in the L1 cache
constexpr int64_t BLOCK_WORDS = 16;    // weights are padded to whole blocks of words

static inline int64_t words(const Linear& op) { return (op.inputs + 2 * BLOCK_WORDS - 1) / (2 * BLOCK_WORDS) * BLOCK_WORDS; }
static inline int64_t tiles(const Linear& op) { return (op.outputs + W - 1) / W; }

static inline vf dot(vf sum, const uint8_t* w, uint32_t x) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(int32_t(x)));
}

static inline uint32_t pair(float first, float second) {
    bf16 low, high;
    narrow(first, &low);
    narrow(second, &high);
    return low.bits | uint32_t(high.bits) << 16;
}

// Packs row `token` of x; the last row also clears the padding after it.
static void pack_row(const Linear& op, int64_t token, int64_t tokens, float* packed) {
    const Panels panels(tokens);
    const int64_t count = words(op), row = token % panels.rows;
    const float* x = op.x + token * op.x_stride;
    uint32_t* out = (uint32_t*)packed + token / panels.rows * panels.rows * count + row;
    for (int64_t k = 0; k < count; k++) {
        const float first = 2 * k < op.inputs ? x[2 * k] : 0, second = 2 * k + 1 < op.inputs ? x[2 * k + 1] : 0;
        out[k * panels.rows] = pair(first, second);
    }
    if (token != tokens - 1) return;
    for (int64_t after = 1; after < panels.rows - row; after++)
        for (int64_t k = 0; k < count; k++) out[k * panels.rows + after] = 0;
}

// One panel, T tiles of 16 outputs at once: with few rows, several independent sums hide the latency of a product.
template <int R, int T> static void few_rows(const Linear& op, int64_t tokens, const uint32_t* x, int64_t tile) {
    const int64_t count = words(op), apart = count * LINE;
    const uint8_t* w = (const uint8_t*)op.weight + tile * apart;
    vf sums[T][R] = {};
    for (int64_t k = 0; k < count; k++)
        UNROLL for (int t = 0; t < T; t++) {
            const uint8_t* at = w + t * apart + k * LINE;
            __builtin_prefetch(at + FETCH);
            UNROLL for (int r = 0; r < R; r++) sums[t][r] = dot(sums[t][r], at, x[k * R + r]);
        }
    float out[R * T * W];
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int r = 0; r < R; r++) store(out + (r * T + t) * W, sums[t][r]);
    put(op, tokens, 0, R, tile * W, T * W, out);
}

// Several panels: a part of T tiles of weights is multiplied by all panels of the chunk while it is in the cache.
template <int R, int T>
static void many_panels(const Linear& op, int64_t tokens, const uint32_t* packed, int64_t first, int64_t count, int64_t tile,
                        Scratch& scratch) {
    float* sums = at_least(scratch.sums, size_t(CHUNK_PANELS) * R * T * W);
    const int64_t all = words(op), apart = all * LINE, ahead = LINE / count;
    const uint8_t* w = (const uint8_t*)op.weight + tile * apart;
    for (int64_t begin = 0; begin < all; begin += DEPTH_WORDS) {
        const int64_t depth = std::min(DEPTH_WORDS, all - begin);
        const uint8_t* part = w + begin * LINE;
        for (int64_t p = 0; p < count; p++) {
            const uint32_t* x = packed + ((first + p) * all + begin) * R;
            float* sum = sums + p * R * T * W;
            vf acc[T][R];
            UNROLL for (int t = 0; t < T; t++)
                UNROLL for (int r = 0; r < R; r++) acc[t][r] = begin ? load(sum + (r * T + t) * W) : vf{};
            // A share of the next weights is prefetched with each panel.
            const uint8_t* next = part + depth * (LINE + p * ahead);
            for (int64_t k = 0; k < depth; k++, next += ahead)
                UNROLL for (int t = 0; t < T; t++) {
                    __builtin_prefetch(next + t * apart);
                    UNROLL for (int r = 0; r < R; r++) acc[t][r] = dot(acc[t][r], part + t * apart + k * LINE, x[k * R + r]);
                }
            UNROLL for (int t = 0; t < T; t++)
                UNROLL for (int r = 0; r < R; r++) store(sum + (r * T + t) * W, acc[t][r]);
        }
    }
    put(op, tokens, first * R, count * R, tile * W, T * W, sums);
}

// Pieces [begin, end) as in linear.h, each of NR outputs, which are two tiles.
template <int R = 1>
static void pieces(const Linear& op, int64_t tokens, const Panels& panels, const float* packed, int64_t begin, int64_t end,
                   Scratch& scratch) {
    if (panels.rows != R) {
        if constexpr (R < MOST_ROWS) pieces<R + 1>(op, tokens, panels, packed, begin, end, scratch);
        return;
    }
    const uint32_t* x = (const uint32_t*)packed;
    const int64_t across = linear_tiles(op);
    if (panels.count == 1) {
        constexpr int T = R == 1 ? 8 : R <= 3 ? 4 : 2;
        const int64_t last = std::min(2 * end, tiles(op));
        int64_t tile = 2 * begin;
        for (; tile + T <= last; tile += T) few_rows<R, T>(op, tokens, x, tile);
        for (; tile < last; tile++) few_rows<R, 1>(op, tokens, x, tile);
        return;
    }
    for (int64_t piece = begin; piece < end; piece++) {
        const int64_t first = piece / across * panels.chunk, tile = piece % across * 2;
        const int64_t count = std::min(panels.chunk, panels.count - first);
        if (tile + 2 <= tiles(op)) many_panels<R, 2>(op, tokens, x, first, count, tile, scratch);
        else many_panels<R, 1>(op, tokens, x, first, count, tile, scratch);
    }
}

}  // namespace pairs
#endif
