// LoRA of rows that have an adapter: y += (x A) B, before and after the linear whose rows they are, or after the linears
// of experts. A lane is one column of A or one output, and the order of its sum depends on the sizes alone.
#pragma once

#include <algorithm>

#include "experts.h"
#include "linear.h"
#include "program.h"
#include "simd.h"

// Adapter of a token, or -1.
static inline int64_t adapter_of(const Step& step, int64_t token) { return step.adapters ? step.adapters[token] : -1; }

// u[c] = Σ_i x[i] · a[i][c] for N vectors of columns. Four sums of every fourth input hide the latency of an addition.
template <int N> static void lora_columns(const float* x, const float* a, int64_t inputs, int64_t columns, float* u) {
    vf sums[4][N] = {};
    int64_t i = 0;
    for (; i + 4 <= inputs; i += 4)
        UNROLL for (int j = 0; j < 4; j++)
            UNROLL for (int n = 0; n < N; n++) sums[j][n] += splat(x[i + j]) * load(a + (i + j) * columns + n * W);
    for (int j = 0; i < inputs; i++, j++)
        UNROLL for (int n = 0; n < N; n++) sums[j][n] += splat(x[i]) * load(a + i * columns + n * W);
    UNROLL for (int n = 0; n < N; n++) store(u + n * W, (sums[0][n] + sums[1][n]) + (sums[2][n] + sums[3][n]));
}

// u = x A of matrix `group`.
static void lora_shrink(const LoraShrink& op, int64_t group, const float* x, float* u) {
    const float* a = op.a + group * op.inputs * op.columns;
    int64_t c = 0;
    for (; c + 2 * W <= op.columns; c += 2 * W) lora_columns<2>(x, a + c, op.inputs, op.columns, u + c);
    for (; c < op.columns; c += W) lora_columns<1>(x, a + c, op.inputs, op.columns, u + c);
}

static void lora_shrink_row(const LoraShrink& op, int64_t token, const Step& step) {
    const int64_t adapter = adapter_of(step, token);
    if (adapter >= 0) lora_shrink(op, adapter, op.x + token * op.x_stride, op.u + token * op.u_stride);
}

// y[o] += Σ_r u[r] · b[r][o] for N vectors of outputs.
template <int N> static void lora_outputs(const float* u, const float* b, int64_t rank, int64_t stride, float* y) {
    vf sums[N] = {};
    for (int64_t r = 0; r < rank; r++)
        UNROLL for (int n = 0; n < N; n++) sums[n] += splat(u[r]) * load(b + r * stride + n * W);
    UNROLL for (int n = 0; n < N; n++) store(y + n * W, load(y + n * W) + sums[n]);
}

// y += u B of matrix `group`.
static void lora_expand(const LoraExpand& op, int64_t group, const float* u, float* y) {
    const float* b = op.b + group * op.rank * op.outputs;
    const int32_t* ranks = op.ranks + group * op.sources;
    for (int64_t p = 0; p < op.count; p++) {
        const LoraPiece& piece = op.pieces[p];
        const float* own = u + piece.source * op.rank;
        const int64_t rank = ranks[piece.source], end = piece.at + piece.rows;
        if (!rank) continue;
        int64_t o = piece.at;
        for (; o + 8 * W <= end; o += 8 * W) lora_outputs<8>(own, b + o, rank, op.outputs, y + o);
        for (; o + W <= end; o += W) lora_outputs<1>(own, b + o, rank, op.outputs, y + o);
        for (; o < end; o++) {
            float sum = 0;
            for (int64_t r = 0; r < rank; r++) sum += own[r] * b[r * op.outputs + o];
            y[o] += sum;
        }
    }
}

static void lora_expand_row(const LoraExpand& op, int64_t token, const Step& step) {
    const int64_t adapter = adapter_of(step, token);
    if (adapter >= 0) lora_expand(op, adapter, op.u + token * op.u_stride, op.y + token * op.y_stride);
}

// The rows that the next operation on rows reads for this token: Activate, after the first linear, the places with the
// token's number, which have pairs of other tokens, because pairs are sorted by expert; Combine the token's own pairs.
static void lora_experts_row(const LoraExperts& op, int64_t token, const Step& step, const experts::Order& order,
                             Scratch& scratch) {
    const LoraShrink& shrink = op.shrink;
    float* u = at_least(scratch.low_rank, size_t(shrink.columns));
    for (int64_t at = token * op.k; at < (token + 1) * op.k; at++) {
        const int64_t place = op.gathered ? at : order.place[size_t(at)], pair = order.pair[size_t(place)];
        const int64_t adapter = adapter_of(step, pair / op.k);
        const int64_t expert = order.owner[size_t(place)];
        if (adapter < 0 || expert >= op.count) continue;  // a zero-computation expert has no matrices
        const int64_t group = adapter * op.count + expert;
        const int32_t* ranks = op.expand.ranks + group * op.expand.sources;
        if (!std::any_of(ranks, ranks + op.expand.sources, [](int32_t rank) { return rank > 0; })) continue;
        lora_shrink(shrink, group, shrink.x + (op.gathered ? pair / op.k : place) * shrink.x_stride, u);
        if (op.scales)
            for (int64_t c = 0; c < shrink.columns; c++) u[c] *= op.scales[pair];
        lora_expand(op.expand, group, u, op.expand.y + place * op.expand.y_stride);
    }
}
