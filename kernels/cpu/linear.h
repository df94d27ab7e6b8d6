// y = x Wᵀ by fused multiply-add. Weights are stored in tiles of NR outputs, [tile][input][NR], in their own type; rows
// of x in panels of R, [panel][input][R]. The product of a tile of outputs and a panel of rows is summed in registers.
#pragma once

#include <algorithm>
#include <vector>

#include "program.h"
#include "simd.h"

constexpr int NR = 2 * W;
// Number of rows whose sums fit in the registers together with two vectors of weights and one of x.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_ROWS = 12;
#else
constexpr int MOST_ROWS = 6;
#endif
constexpr int DEPTH = 256;          // inputs whose widened weights stay in the L1 cache
constexpr int64_t FETCH = 2048;      // distance in bytes of the prefetch of weights that are used once
constexpr int CHUNK_PANELS = 16;    // panels that share one pass over the weights

// sums[r][v] += Σ_k x[k][r] · w[k][v], in the order of k. Each k also prefetches `ahead` bytes from `next`.
template <int R>
static inline __attribute__((always_inline)) void
multiply(int64_t depth, const float* x, const float* w, const char* next, int64_t ahead, vf (&sums)[R][2]) {
    for (int64_t k = 0; k < depth; k++, next += ahead) {
        __builtin_prefetch(next);
        vf w0 = load(w + k * NR), w1 = load(w + k * NR + W);
        UNROLL for (int r = 0; r < R; r++) {
            vf each = splat(x[k * R + r]);
            sums[r][0] += each * w0;
            sums[r][1] += each * w1;
        }
    }
}

// Without this barrier the compiler collects the products of several words first, and spills most of them to memory.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define IN_ORDER(sum) asm volatile("" : "+x"(sum))
#else
#define IN_ORDER(sum)
#endif

struct Panels {
    int64_t rows, count, chunk, chunks;  // rows of each; how many; panels of one pass; passes
    explicit Panels(int64_t tokens, int64_t most_rows = MOST_ROWS) {
        count = (tokens + most_rows - 1) / most_rows;
        rows = (tokens + count - 1) / count;
        chunks = (count + CHUNK_PANELS - 1) / CHUNK_PANELS;
        chunk = (count + chunks - 1) / chunks;
    }
};

struct Scratch {  // of one thread
    std::vector<float> sums, wide, attention, recurrent, scaled, low_rank;
};

static inline float* at_least(std::vector<float>& room, size_t size) {
    if (room.size() < size) room.resize(size);
    return room.data();
}

// Packs row `token` of x; the last row also clears the padding after it.
static void pack_row(const Linear& op, int64_t token, int64_t tokens, float* packed) {
    Panels panels(tokens);
    const float* x = op.x + token * op.x_stride;
    float* out = packed + token / panels.rows * panels.rows * op.inputs + token % panels.rows;
    for (int64_t k = 0; k < op.inputs; k++) out[k * panels.rows] = x[k];
    if (token != tokens - 1) return;
    for (int64_t row = token % panels.rows + 1; row < panels.rows; row++)
        for (int64_t k = 0; k < op.inputs; k++) out[k * panels.rows + row - token % panels.rows] = 0;
}

// Writes the sums of one tile of outputs for the rows from `row` on to y, with the bias; skips padding.
static inline void put(const Linear& op, int64_t tokens, int64_t row, int64_t rows, int64_t output, int64_t width,
                       const float* sums) {
    const int64_t outputs = std::min(width, op.outputs - output), vectors = outputs / W * W;
    for (int64_t r = 0; r < std::min(rows, tokens - row); r++) {
        float* y = op.y + (row + r) * op.y_stride + output;
        const float *from = sums + r * width, *bias = op.bias ? op.bias + output : nullptr;
        for (int64_t n = 0; n < vectors; n += W) store(y + n, bias ? load(from + n) + load(bias + n) : load(from + n));
        for (int64_t n = vectors; n < outputs; n++) y[n] = bias ? from[n] + bias[n] : from[n];
    }
}

// One panel, T adjacent tiles at once: with few rows, several independent sums hide the latency of an addition.
template <int R, int T, class B>
static void few_rows(const Linear& op, int64_t tokens, const float* x, int64_t tile) {
    const B* w = static_cast<const B*>(op.weight) + tile * op.inputs * NR;
    const int64_t apart = op.inputs * NR;
    vf sums[T][R][2] = {};
    for (int64_t k = 0; k < op.inputs; k++) {
        UNROLL for (int t = 0; t < T; t++) {
            const B* at = w + t * apart + k * NR;
            __builtin_prefetch((const char*)at + FETCH);
            if (sizeof(B) * NR > 64) __builtin_prefetch((const char*)at + FETCH + 64);
            vf w0 = load(at), w1 = load(at + W);
            UNROLL for (int r = 0; r < R; r++) {
                vf each = splat(x[k * R + r]);
                sums[t][r][0] += each * w0;
                sums[t][r][1] += each * w1;
            }
        }
    }
    UNROLL for (int t = 0; t < T; t++) {
        float out[R * NR];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < 2; v++) store(out + r * NR + v * W, sums[t][r][v]);
        put(op, tokens, 0, R, (tile + t) * NR, NR, out);
    }
}

template <int R, class B>
static void one_panel(const Linear& op, int64_t tokens, const float* x, int64_t begin, int64_t end) {
    constexpr int T = R == 1 ? 4 : R <= 3 ? 2 : 1;
    int64_t tile = begin;
    for (; tile + T <= end; tile += T) few_rows<R, T, B>(op, tokens, x, tile);
    for (; tile < end; tile++) few_rows<R, 1, B>(op, tokens, x, tile);
}

// Several panels: each piece of a tile is widened once and multiplied by all panels of the chunk.
template <int R, class B>
static void many_panels(const Linear& op, int64_t tokens, const float* packed, int64_t first, int64_t count,
                        int64_t tile, Scratch& scratch) {
    float* sums = at_least(scratch.sums, size_t(CHUNK_PANELS) * R * NR);
    float* wide = at_least(scratch.wide, DEPTH * NR);
    const B* w = static_cast<const B*>(op.weight) + tile * op.inputs * NR;
    const int64_t ahead = int64_t(sizeof(B)) * NR / count;
    for (int64_t k = 0; k < op.inputs; k += DEPTH) {
        int64_t depth = std::min<int64_t>(DEPTH, op.inputs - k);
        const float* piece = wide;
        if constexpr (sizeof(B) == 4) {
            piece = w + k * NR;
        } else {
            for (int64_t i = 0; i < depth * NR; i += W) store(wide + i, load(w + k * NR + i));
        }
        for (int64_t p = 0; p < count; p++) {
            const float* x = packed + ((first + p) * op.inputs + k) * R;
            float* sum = sums + p * R * NR;
            vf acc[R][2];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < 2; v++) acc[r][v] = k ? load(sum + r * NR + v * W) : vf{};
            // The next weights are prefetched while this piece is multiplied: a share of them with each panel.
            const char* next = (const char*)(w + (k + depth) * NR) + p * depth * ahead;
            multiply<R>(depth, x, piece, next, ahead, acc);
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < 2; v++) store(sum + r * NR + v * W, acc[r][v]);
        }
    }
    put(op, tokens, first * R, count * R, tile * NR, NR, sums);
}

static inline int64_t linear_tiles(const Linear& op) { return (op.outputs + NR - 1) / NR; }

template <int R, class B>
static void linear_piece(const Linear& op, int64_t tokens, const Panels& panels, const float* packed, int64_t begin,
                         int64_t end, Scratch& scratch) {
    if (panels.count == 1) return one_panel<R, B>(op, tokens, packed, begin, end);
    int64_t tiles = linear_tiles(op);
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t first = piece / tiles * panels.chunk;
        int64_t count = std::min(panels.chunk, panels.count - first);
        many_panels<R, B>(op, tokens, packed, first, count, piece % tiles, scratch);
    }
}

template <class B, int R = 1>
static void linear_rows(const Linear& op, int64_t tokens, const Panels& panels, const float* packed, int64_t begin,
                        int64_t end, Scratch& scratch) {
    if (panels.rows == R) return linear_piece<R, B>(op, tokens, panels, packed, begin, end, scratch);
    if constexpr (R < MOST_ROWS) linear_rows<B, R + 1>(op, tokens, panels, packed, begin, end, scratch);
}
