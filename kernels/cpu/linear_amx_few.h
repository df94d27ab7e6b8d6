// y = x Wᵀ by vectors over bf16 weights that are packed for matrix tiles (linear_amx.h). With one or two rows such tiles would be
// nearly empty, and the memory's bandwidth limits the speed.
//
// The results equal the results of the matrix tiles bit for bit, so that the number of rows may decide:
// for each block of 32 inputs and each part of x a tile instruction adds up the products of even inputs and those
// of odd ones, in order and rounded to float one by one, then both together, and this to the sum so far; it takes
// subnormal numbers for zero, and so does this code, by the CPU's own modes.
#pragma once
#ifdef __AMX_BF16__

#include "linear_amx.h"

namespace amx {

constexpr int64_t MOST_FEW = 2;               // rows for which this is the faster way
constexpr int64_t NEAR = 2048, FAR = 16384;  // bytes between fetching weights, to both caches, and using them

static inline int64_t few_pieces(const Linear& op, int64_t width) { return (output_tiles(op) + width - 1) / width; }
static inline int64_t few_width(int64_t rows) { return rows == 1 ? 2 : 1; }  // output tiles whose sums are held at once

// Subnormal numbers are zero, or they count.
static inline void flush_subnormal(bool on) {
    const unsigned modes = 0x8040;
    _mm_setcsr(on ? _mm_getcsr() | modes : _mm_getcsr() & ~modes);
}

// [block][word][row][part][2]: the two inputs of a word as floats.
template <class X> static inline size_t few_floats(const Linear& op, int64_t rows) {
    return size_t(blocks<X>(op) * rows * X::INPUTS * X::PARTS);
}

template <class X> static void pack_few(const Linear& op, int64_t token, int64_t rows, float* packed, Scratch& scratch) {
    const int64_t tiles = blocks<X>(op), words = X::INPUTS / 2;
    uint8_t* line = (uint8_t*)at_least(scratch.wide, size_t(tiles * X::PARTS * TILE / 4));
    pack_x(X{}, op, op.x + token * op.x_stride, line, nullptr, nullptr, scratch);
    for (int64_t block = 0; block < tiles; block++)
        for (int64_t part = 0; part < X::PARTS; part++) {
            const bf16* from = (const bf16*)(line + (block * X::PARTS + part) * TILE);
            for (int64_t i = 0; i < X::INPUTS; i++)
                packed[(((block * words + i / 2) * rows + token) * X::PARTS + part) * 2 + i % 2] = widen(from[i]);
        }
}

// Prefetches the weights `NEAR` and `FAR` bytes after `at`. `left`: bytes until the weights of the next tiles.
static inline void fetch(const uint8_t* at, int64_t left, int64_t skip) {
    _mm_prefetch((const char*)at + NEAR + (NEAR < left ? 0 : skip), _MM_HINT_T0);
    _mm_prefetch((const char*)at + FAR + (FAR < left ? 0 : skip), _MM_HINT_T1);
}

template <class X, int R, int T> static void few_bf16(const Linear& op, const float* x, int64_t tile) {
    constexpr int P = X::PARTS;
    const int64_t all = blocks<X>(op), apart = all * TILE;
    const uint8_t* w = (const uint8_t*)op.weight + tile * apart;
    const vi high = vi{} + int32_t(0xffff0000);
    vf sums[T][R] = {};
    for (int64_t block = 0; block < all; block++, w += TILE) {
        vf even[T][R][P] = {}, odd[T][R][P] = {};
        for (int64_t line = 0; line < SIDE; line++, x += R * P * 2)
            UNROLL for (int t = 0; t < T; t++) {
                const uint8_t* at = w + t * apart + line * LINE;
                fetch(at, apart - block * TILE - line * LINE, (T - 1) * apart);
                const vi both = load((const int32_t*)at);
                const vf w0 = (vf)(both << 16), w1 = (vf)(both & high);
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int p = 0; p < P; p++) {
                        even[t][r][p] += splat(x[(r * P + p) * 2]) * w0;
                        odd[t][r][p] += splat(x[(r * P + p) * 2 + 1]) * w1;
                    }
            }
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int p = 0; p < P; p++) sums[t][r] += even[t][r][p] + odd[t][r][p];
    }
    float out[R * T * SIDE];
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int r = 0; r < R; r++) store(out + (r * T + t) * SIDE, sums[t][r]);
    put(op, R, 0, R, tile * SIDE, T * SIDE, out);
}

// Pieces [begin, end), each of few_width(rows) output tiles.
template <class X, int R = 1>
static void few_rows(const Linear& op, int64_t rows, const float* packed, int64_t begin, int64_t end) {
    if (rows != R) {
        if constexpr (R < MOST_FEW) few_rows<X, R + 1>(op, rows, packed, begin, end);
        return;
    }
    constexpr int T = R == 1 ? 2 : 1;
    const int64_t tiles = output_tiles(op);
    for (int64_t tile = begin * T; tile < std::min(end * T, tiles); tile += T) {
        const bool whole = tile + T <= tiles;
        whole ? few_bf16<X, R, T>(op, packed, tile) : few_bf16<X, R, 1>(op, packed, tile);
    }
}

}  // namespace amx
#endif
