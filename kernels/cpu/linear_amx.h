// y = x Wᵀ by matrix tiles (Intel AMX).
//
// AMX_BF16: exact to float. Weights that are bf16 in the checkpoint, and each x as the sum of three bf16 numbers, which
// together hold all of its digits. Products of two bf16 numbers are exact in float, sums are in float; for each block of
// inputs the three parts are added in the same order whatever the number of rows.
// PAIRS_BF16: the same with each x rounded to one bf16 number, which takes a third of the multiplications.
// int8: x quantized to 8 bits in blocks, as in linear_int.h; the products are in linear_amx_groups.h.
//
// A tile holds 16 rows of 64 bytes: 32 inputs of 2 bytes, or 64 of one. bf16 weights: [16 outputs][block][word][output][4
// bytes]; x: [16 rows][block][part][row][64 bytes], and for int8 also the scales, [16 rows][block of x][row], and the
// outliers, [row][list].
#pragma once
#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linear_int.h"

namespace amx {

constexpr int64_t SIDE = 16, LINE = 64, TILE = SIDE * LINE;  // rows, bytes of a row, bytes

// Numbers of x in a tile: inputs of a row, and tiles that hold the parts of the same inputs.
template <int64_t P> struct Bf16 {
    static constexpr int64_t INPUTS = 32, PARTS = P;
    static constexpr bool SCALED = false;
};
struct Int8 {
    static constexpr int64_t INPUTS = 64, PARTS = 1;
    static constexpr bool SCALED = true;
};
using Exact = Bf16<3>;
using Rounded = Bf16<1>;

constexpr int64_t CHUNK = 8;          // row tiles that share one pass over the weights
constexpr int64_t GROUP = 8;          // output tiles of a piece of work where there are many rows
constexpr int64_t AHEAD = 6;          // blocks of weights between fetching and using them
constexpr int64_t FAR_FLOATS = 1 << 20; // numbers of y that do not fit into a second-level cache
constexpr int64_t DEPTH_BLOCKS = 32;  // blocks of inputs whose x stays in the second-level cache

// The kernel hands tiles out only to a process that asks.
static bool permitted() {
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

struct __attribute__((packed)) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void load() const {
        asm volatile("" ::"r"(this) : "memory");  // the compiler's own call says that it reads 8 bytes of these 64
        _tile_loadconfig(this);
    }
};

// For one row tile only its rows are computed: tiles 3 to 5 hold weights there, the others x and sums.
static void configure(int64_t tokens) {
    Config config;
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = LINE;
        config.rows[tile] = uint8_t(tokens < SIDE && (tile < 3 || tile > 5) ? tokens : SIDE);
    }
    config.load();
}

// Blocks of x with a scale of their own, in int8.
static inline int64_t x_blocks(const Linear& op) { return (op.inputs + op.group - 1) / op.group * op.group / block_of(op); }
template <class T> static inline int64_t blocks(const Linear& op) {
    return (T::SCALED ? x_blocks(op) * block_of(op) + T::INPUTS - 1 : op.inputs + T::INPUTS - 1) / T::INPUTS;
}
static inline int64_t row_tiles(int64_t tokens) { return (tokens + SIDE - 1) / SIDE; }
static inline int64_t output_tiles(const Linear& op) { return (op.outputs + SIDE - 1) / SIDE; }
template <class T> static inline int64_t packed_tiles(const Linear& op, int64_t tokens) {
    return row_tiles(tokens) * blocks<T>(op) * T::PARTS;
}
static inline size_t packed_floats(const Linear& op, int64_t tokens) {
    if (op.form == AMX_BF16) return size_t(packed_tiles<Exact>(op, tokens) * TILE / 4);
    if (op.form == PAIRS_BF16) return size_t(packed_tiles<Rounded>(op, tokens) * TILE / 4);
    const int64_t of_tile = (x_blocks(op) + outlier_words(x_blocks(op)) + 1) * SIDE;
    return size_t(packed_tiles<Int8>(op, tokens) * TILE / 4 + row_tiles(tokens) * of_tile);
}
// The list of outliers of a token, after the scales of all rows; then the lengths of all lists, which are read without them.
template <class I> static inline I* outliers(const Linear& op, int64_t tokens, int64_t token, I* scales) {
    return scales + row_tiles(tokens) * x_blocks(op) * SIDE + token * outlier_words(x_blocks(op));
}

template <class I> static inline I* outlier_counts(const Linear& op, int64_t tokens, I* scales) {
    return outliers(op, tokens, row_tiles(tokens) * SIDE, scales);
}

static inline vf round_bf16(vf x, uint8_t* out) {
    vi bits = (vi)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & int32_t(0xffff0000);
    *(vh_any*)out = __builtin_convertvector(bits >> 16, vh);
    return (vf)bits;
}

template <int64_t P>
static void pack_x(Bf16<P>, const Linear& op, const float* x, uint8_t* row, float*, int32_t*, Scratch&) {
    constexpr int64_t INPUTS = Bf16<P>::INPUTS;
    for (int64_t at = 0; at < op.inputs; at += INPUTS, row += P * TILE) {
        alignas(64) float block[INPUTS] = {};
        std::memcpy(block, x + at, sizeof(float) * size_t(std::min(INPUTS, op.inputs - at)));
        for (int64_t half = 0; half < INPUTS; half += W) {
            vf rest = load(block + half);
            for (int64_t part = 0; part < P; part++) rest -= round_bf16(rest, row + part * TILE + 2 * half);
        }
    }
}

static void pack_x(Int8, const Linear& op, const float* x, uint8_t* row, float* scales, int32_t* list, Scratch& scratch) {
    const int64_t inputs = blocks<Int8>(op) * Int8::INPUTS, used = x_blocks(op) * block_of(op);
    int32_t* totals = (int32_t*)at_least(scratch.wide, size_t(x_blocks(op) * SIDE + inputs / 4));
    int8_t* whole = (int8_t*)(totals + x_blocks(op) * SIDE);
    quantise_blocks(op, x, used, whole, scales, totals, SIDE, list);
    std::memset(whole + used, 0, size_t(inputs - used));
    for (int64_t at = 0; at < inputs; at += LINE, row += TILE) std::memcpy(row, whole + at, LINE);
}

// x of one token into its row of the tiles; the last token also clears the rows after it.
template <class T>
static void pack_row(const Linear& op, int64_t token, int64_t tokens, float* packed, Scratch& scratch) {
    uint8_t* tiles = (uint8_t*)packed;
    float* scales = (float*)(tiles + packed_tiles<T>(op, tokens) * TILE);
    uint8_t* tile = tiles + token / SIDE * blocks<T>(op) * T::PARTS * TILE;
    int32_t* list = nullptr;
    if constexpr (T::SCALED) {
        list = outliers(op, tokens, token, (int32_t*)scales);
        scales += token / SIDE * x_blocks(op) * SIDE + token % SIDE;
    }
    pack_x(T{}, op, row_of(op, token, scratch), tile + token % SIDE * LINE, scales, list, scratch);
    if constexpr (T::SCALED) outlier_counts(op, tokens, (int32_t*)(tiles + packed_tiles<T>(op, tokens) * TILE))[token] = list[0];
    if (token != tokens - 1) return;
    for (int64_t piece = 0; piece < blocks<T>(op) * T::PARTS; piece++)
        for (int64_t row = token % SIDE + 1; row < SIDE; row++) std::memset(tile + piece * TILE + row * LINE, 0, LINE);
}

// Writes sums like `put`, past the caches if y is larger than they are: then it is written before it is read again.
static inline void put_far(const Linear& op, int64_t tokens, int64_t row, int64_t rows, int64_t output, int64_t width,
                           const float* sums) {
    const int64_t outputs = std::min(width, op.outputs - output);
    if (tokens * op.outputs < FAR_FLOATS || outputs % W || op.y_stride % W || uintptr_t(op.y + output) % LINE)
        return put(op, tokens, row, rows, output, width, sums);
    for (int64_t r = 0; r < std::min(rows, tokens - row); r++) {
        float* y = op.y + (row + r) * op.y_stride + output;
        const float *from = sums + r * width, *bias = op.bias ? op.bias + output : nullptr;
        for (int64_t n = 0; n < outputs; n += W) _mm512_stream_ps(y + n, (__m512)(bias ? load(from + n) + load(bias + n) : load(from + n)));
    }
    _mm_sfence();
}

// One row tile, N output tiles `apart` from each other. sums: [16][stride].
template <class T, int N>
static void one_by(const uint8_t* x, const uint8_t* w, int64_t apart, int64_t depth, float* sums, int64_t stride, bool more) {
    if (more) {
        _tile_loadd(0, sums, stride * 4);
        if constexpr (N > 1) _tile_loadd(1, sums + 16, stride * 4);
        if constexpr (N > 2) _tile_loadd(2, sums + 32, stride * 4);
    } else {
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (N > 2) _tile_zero(2);
    }
    for (int64_t block = 0; block < depth; block++, x += T::PARTS * TILE, w += TILE) {
        // Weights of some blocks further on; near the end, of the tiles that come next.
        const uint8_t* ahead = w + AHEAD * TILE + (block + AHEAD < depth ? 0 : N * apart - depth * TILE);
        for (int n = 0; n < N; n++)
            for (int line = 0; line < SIDE; line++) _mm_prefetch((const char*)(ahead + n * apart + line * LINE), _MM_HINT_T0);
        _tile_loadd(3, w, 64);
        if constexpr (N > 1) _tile_loadd(4, w + apart, 64);
        if constexpr (N > 2) _tile_loadd(5, w + 2 * apart, 64);
#define ROWS_OF(part, tile)                                 \
    if constexpr (part < T::PARTS) {                     \
        _tile_loadd(tile, x + part * TILE, 64);             \
        _tile_dpbf16ps(0, tile, 3);                               \
        if constexpr (N > 1) { _tile_dpbf16ps(1, tile, 4); }      \
        if constexpr (N > 2) { _tile_dpbf16ps(2, tile, 5); }      \
    }
        ROWS_OF(0, 6) ROWS_OF(1, 7) ROWS_OF(2, 6)
#undef ROWS_OF
    }
    _tile_stored(0, sums, stride * 4);
    if constexpr (N > 1) _tile_stored(1, sums + 16, stride * 4);
    if constexpr (N > 2) _tile_stored(2, sums + 32, stride * 4);
}

// Two row tiles `x_apart` from each other, two output tiles. sums: [32][stride].
template <class T>
static void two_by_two(const uint8_t* x, int64_t x_apart, const uint8_t* w, int64_t apart, int64_t depth, float* sums,
                       int64_t stride, bool more) {
    float* lower = sums + 16 * stride;
    if (more) {
        _tile_loadd(0, sums, stride * 4); _tile_loadd(1, sums + 16, stride * 4);
        _tile_loadd(2, lower, stride * 4); _tile_loadd(3, lower + 16, stride * 4);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int64_t block = 0; block < depth; block++, x += T::PARTS * TILE, w += TILE) {
        _tile_loadd(4, w, 64);
        _tile_loadd(5, w + apart, 64);
#define ROWS_OF(part)                                       \
    if constexpr (part < T::PARTS) {                     \
        _tile_loadd(6, x + part * TILE, 64);                \
        _tile_loadd(7, x + x_apart + part * TILE, 64);      \
        _tile_dpbf16ps(0, 6, 4); _tile_dpbf16ps(1, 6, 5);   \
        _tile_dpbf16ps(2, 7, 4); _tile_dpbf16ps(3, 7, 5);   \
    }
        ROWS_OF(0) ROWS_OF(1) ROWS_OF(2)
#undef ROWS_OF
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

template <class T>
static void piece(const Linear& op, int64_t tokens, const Work& work, const float* packed, int64_t index, Scratch& scratch) {
    const int64_t all = blocks<T>(op), apart = all * TILE, x_apart = all * T::PARTS * TILE;
    const int64_t tile = index % work.groups * work.group, tiles = std::min(work.group, output_tiles(op) - tile);
    const int64_t first = index / work.groups * CHUNK, rows = std::min(CHUNK, work.row_tiles - first);
    const int64_t stride = work.group * SIDE;
    float* sums = at_least(scratch.sums, size_t(CHUNK * SIDE * GROUP * SIDE));
    const int64_t most = work.row_tiles == 1 ? all : DEPTH_BLOCKS;
    for (int64_t block = 0; block < all; block += most) {
        const int64_t depth = std::min(most, all - block);
        const bool more = block > 0;
        const uint8_t* w = (const uint8_t*)op.weight + tile * apart + block * TILE;
        const uint8_t* x = (const uint8_t*)packed + first * x_apart + block * T::PARTS * TILE;
        // Rows outside, outputs inside: x stays in the nearest cache, because it is the larger part with three numbers for one.
        int64_t row = 0;
        for (; row + 1 < rows; row += 2) {
            const uint8_t* pair = x + row * x_apart;
            float* out = sums + row * SIDE * stride;
            int64_t n = 0;
            for (; n + 1 < tiles; n += 2)
                two_by_two<T>(pair, x_apart, w + n * apart, apart, depth, out + n * SIDE, stride, more);
            for (; n < tiles; n++) {
                one_by<T, 1>(pair, w + n * apart, apart, depth, out + n * SIDE, stride, more);
                one_by<T, 1>(pair + x_apart, w + n * apart, apart, depth, out + (SIDE * stride) + n * SIDE, stride, more);
            }
        }
        for (; row < rows; row++) {
            float* out = sums + row * SIDE * stride;
            int64_t n = 0;
            for (; n + 2 < tiles; n += 3) one_by<T, 3>(x + row * x_apart, w + n * apart, apart, depth, out + n * SIDE, stride, more);
            for (; n < tiles; n++) one_by<T, 1>(x + row * x_apart, w + n * apart, apart, depth, out + n * SIDE, stride, more);
        }
    }
    put_far(op, tokens, first * SIDE, rows * SIDE, tile * SIDE, stride, sums);
}

template <class T>
static void pieces(const Linear& op, int64_t rows, const float* packed, int64_t begin, int64_t end, Scratch& scratch) {
    const Work work(op, rows);
    for (int64_t index = begin; index < end; index++) piece<T>(op, rows, work, packed, index, scratch);
}

}  // namespace amx
#endif
