// y = x Wᵀ by matrix tiles (Intel AMX), exact to float: weights that are bf16 in the checkpoint, and each x as the sum of
// three bf16 numbers, which together hold all of its digits. Products of two bf16 numbers are exact in float, sums are in
// float; for each block of 32 inputs the three parts are added in the same order whatever the number of rows.
//
// Weights: [16 outputs][32 inputs] as [tile][block][input pair][output][2]; x: [16 rows][block][part][row][32].
#pragma once
#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linear.h"

namespace amx {

constexpr int64_t SIDE = 16, BLOCK = 32, TILE = SIDE * BLOCK, PARTS = 3;
constexpr int64_t CHUNK = 8;          // row tiles that share one pass over the weights
constexpr int64_t GROUP = 8;          // output tiles of a piece of work where there are many rows
constexpr int64_t AHEAD = 4;          // blocks of weights between fetching and using them
constexpr int64_t DEPTH_BLOCKS = 32;  // blocks of inputs whose x (two row tiles) stays in the first-level cache

// The kernel hands tiles out only to a process that asks.
static bool permitted() {
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// For one row tile only its rows are computed: tiles 3 to 5 hold weights there, the others x and sums.
static void configure(int64_t tokens) {
    struct __attribute__((packed)) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = 64;
        config.rows[tile] = uint8_t(tokens < SIDE && (tile < 3 || tile > 5) ? tokens : SIDE);
    }
    _tile_loadconfig(&config);
}

static inline int64_t blocks(const Linear& op) { return (op.inputs + BLOCK - 1) / BLOCK; }
static inline int64_t row_tiles(int64_t tokens) { return (tokens + SIDE - 1) / SIDE; }
static inline int64_t output_tiles(const Linear& op) { return (op.outputs + SIDE - 1) / SIDE; }
static inline size_t packed_floats(const Linear& op, int64_t tokens) {
    return size_t(row_tiles(tokens) * blocks(op) * PARTS * TILE / 2);
}

static inline vf round_bf16(vf x, uint16_t* out) {
    vi bits = (vi)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & int32_t(0xffff0000);
    *(vh_any*)out = __builtin_convertvector(bits >> 16, vh);
    return (vf)bits;
}

static void pack_row(const Linear& op, int64_t token, int64_t tokens, float* packed) {
    const float* x = op.x + token * op.x_stride;
    uint16_t* out = (uint16_t*)packed + token / SIDE * blocks(op) * PARTS * TILE + token % SIDE * BLOCK;
    for (int64_t k = 0; k < op.inputs; k += BLOCK, out += PARTS * TILE) {
        alignas(64) float block[BLOCK] = {};
        std::memcpy(block, x + k, sizeof(float) * std::min(BLOCK, op.inputs - k));
        for (int64_t half = 0; half < BLOCK; half += W) {
            vf rest = load(block + half);
            for (int part = 0; part < PARTS; part++) rest -= round_bf16(rest, out + part * TILE + half);
        }
    }
    if (token != tokens - 1) return;
    out = (uint16_t*)packed + token / SIDE * blocks(op) * PARTS * TILE;
    for (int64_t piece = 0; piece < blocks(op) * PARTS; piece++)
        for (int64_t row = token % SIDE + 1; row < SIDE; row++) std::memset(out + piece * TILE + row * BLOCK, 0, 64);
}

// One row tile, N output tiles `apart` from each other. sums: [16][stride].
template <int N> static void one_by(const uint16_t* x, const uint16_t* w, int64_t apart, int64_t depth, float* sums,
                                    int64_t stride, bool more) {
    if (more) {
        _tile_loadd(0, sums, stride * 4);
        if constexpr (N > 1) _tile_loadd(1, sums + 16, stride * 4);
        if constexpr (N > 2) _tile_loadd(2, sums + 32, stride * 4);
    } else {
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (N > 2) _tile_zero(2);
    }
    for (int64_t block = 0; block < depth; block++, x += PARTS * TILE, w += TILE) {
        // Weights of some blocks further on; near the end, of the tiles that come next.
        const uint16_t* ahead = w + AHEAD * TILE + (block + AHEAD < depth ? 0 : N * apart - depth * TILE);
        for (int n = 0; n < N; n++)
            for (int line = 0; line < SIDE; line++) _mm_prefetch((const char*)(ahead + n * apart + line * BLOCK), _MM_HINT_T0);
        _tile_loadd(3, w, 64);
        if constexpr (N > 1) _tile_loadd(4, w + apart, 64);
        if constexpr (N > 2) _tile_loadd(5, w + 2 * apart, 64);
#define PART(part, tile)                                \
    _tile_loadd(tile, x + part * TILE, 64);             \
    _tile_dpbf16ps(0, tile, 3);                         \
    if constexpr (N > 1) _tile_dpbf16ps(1, tile, 4);    \
    if constexpr (N > 2) _tile_dpbf16ps(2, tile, 5);
        PART(0, 6) PART(1, 7) PART(2, 6)
#undef PART
    }
    _tile_stored(0, sums, stride * 4);
    if constexpr (N > 1) _tile_stored(1, sums + 16, stride * 4);
    if constexpr (N > 2) _tile_stored(2, sums + 32, stride * 4);
}

// Two row tiles `x_apart` from each other, two output tiles. sums: [32][stride].
static void two_by_two(const uint16_t* x, int64_t x_apart, const uint16_t* w, int64_t apart, int64_t depth, float* sums,
                       int64_t stride, bool more) {
    float* lower = sums + 16 * stride;
    if (more) {
        _tile_loadd(0, sums, stride * 4); _tile_loadd(1, sums + 16, stride * 4);
        _tile_loadd(2, lower, stride * 4); _tile_loadd(3, lower + 16, stride * 4);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int64_t block = 0; block < depth; block++, x += PARTS * TILE, w += TILE) {
        _tile_loadd(4, w, 64);
        _tile_loadd(5, w + apart, 64);
#define PART(part)                                              \
    _tile_loadd(6, x + part * TILE, 64);                        \
    _tile_loadd(7, x + x_apart + part * TILE, 64);              \
    _tile_dpbf16ps(0, 6, 4); _tile_dpbf16ps(1, 6, 5);           \
    _tile_dpbf16ps(2, 7, 4); _tile_dpbf16ps(3, 7, 5);
        PART(0) PART(1) PART(2)
#undef PART
    }
    _tile_stored(0, sums, stride * 4); _tile_stored(1, sums + 16, stride * 4);
    _tile_stored(2, lower, stride * 4); _tile_stored(3, lower + 16, stride * 4);
}

// Pieces of work: (chunk of row tiles) × (group of output tiles), groups counting fastest.
struct Work {
    int64_t row_tiles, group, groups, pieces;
    Work(const Linear& op, int64_t tokens) : row_tiles(amx::row_tiles(tokens)) {
        group = row_tiles == 1 ? 3 : row_tiles <= 4 ? 2 : GROUP;
        groups = (output_tiles(op) + group - 1) / group;
        pieces = groups * ((row_tiles + CHUNK - 1) / CHUNK);
    }
};

static void piece(const Linear& op, int64_t tokens, const Work& work, const float* packed, int64_t index, Scratch& scratch) {
    const int64_t all = blocks(op), apart = all * TILE, x_apart = all * PARTS * TILE;
    const int64_t tile = index % work.groups * work.group, tiles = std::min(work.group, output_tiles(op) - tile);
    const int64_t first = index / work.groups * CHUNK, rows = std::min(CHUNK, work.row_tiles - first);
    const int64_t stride = work.group * SIDE;
    float* sums = at_least(scratch.sums, size_t(CHUNK * SIDE * GROUP * SIDE));
    const int64_t most = work.row_tiles == 1 ? all : DEPTH_BLOCKS;
    for (int64_t block = 0; block < all; block += most) {
        const int64_t depth = std::min(most, all - block);
        const bool more = block > 0;
        const uint16_t* w = (const uint16_t*)op.weight + tile * apart + block * TILE;
        const uint16_t* x = (const uint16_t*)packed + first * x_apart + block * PARTS * TILE;
        // Rows outside, outputs inside: x is the larger part, three numbers for one, and stays in the nearest cache.
        int64_t row = 0;
        for (; row + 1 < rows; row += 2) {
            const uint16_t* pair = x + row * x_apart;
            float* out = sums + row * SIDE * stride;
            int64_t n = 0;
            for (; n + 1 < tiles; n += 2)
                two_by_two(pair, x_apart, w + n * apart, apart, depth, out + n * SIDE, stride, more);
            for (; n < tiles; n++) {
                one_by<1>(pair, w + n * apart, apart, depth, out + n * SIDE, stride, more);
                one_by<1>(pair + x_apart, w + n * apart, apart, depth, out + (SIDE * stride) + n * SIDE, stride, more);
            }
        }
        for (; row < rows; row++) {
            float* out = sums + row * SIDE * stride;
            int64_t n = 0;
            for (; n + 2 < tiles; n += 3) one_by<3>(x + row * x_apart, w + n * apart, apart, depth, out + n * SIDE, stride, more);
            for (; n < tiles; n++) one_by<1>(x + row * x_apart, w + n * apart, apart, depth, out + n * SIDE, stride, more);
        }
    }
    const int64_t outputs = tiles * SIDE;
    const int64_t from = first * SIDE, count = std::min(rows * SIDE, tokens - from);
    for (int64_t r = 0; r < count; r++) {
        float* y = op.y + (from + r) * op.y_stride + tile * SIDE;
        const float* sum = sums + r * stride;
        const int64_t width = std::min(outputs, op.outputs - tile * SIDE);
        if (op.bias) for (int64_t i = 0; i < width; i++) y[i] = sum[i] + op.bias[tile * SIDE + i];
        else std::memcpy(y, sum, size_t(width) * 4);
    }
}

}  // namespace amx
#endif
