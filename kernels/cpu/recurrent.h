// Operations of recurrent layers: convolution, delta rule, selective scan and RG-LRU over the tokens of each row, from
// the row's state on; formulas in kernels/recurrent/.
//
// A row is computed token by token, so its result is the same bit for bit alone, in a batch, and however a prompt is
// divided into steps. Pieces are pairs of a row and some channels, heads or columns of a head, which do not depend on
// each other. Lanes are channels or columns of the state, except in the scan, whose outputs are sums over lanes.
#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

namespace recurrent {

constexpr int64_t CHANNELS = 256;  // of a piece of a convolution
constexpr int64_t COPIED = 16;     // tokens whose inputs are copied at once
constexpr int64_t COLUMNS = 64;    // of a piece of a delta rule with few rows and heads
constexpr int64_t PREPARED = 32;   // tokens whose queries, keys and gates are prepared at once
constexpr int64_t ELEMENTS = 8192; // of the state of a piece of a scan, which stays in the L1 cache
constexpr int64_t FEW = 4;         // tokens for which copying a tile of a state costs more than it saves

struct Row {
    int64_t begin, end, slot;
    bool fresh;  // starts from zeros
};

static inline std::vector<Row> rows_of(const Step& step) {
    std::vector<Row> rows;
    int64_t token = 0;
    for (int64_t row = 0; row < step.rows; row++) {
        const int64_t end = token + step.count[row];
        if (end > token) rows.push_back({token, end, step.slots[row], step.first[row] == 0});
        token = end;
    }
    return rows;
}

// The first `count` lanes, of W at most; the other lanes are 0.
static inline vf load_some(const float* p, int64_t count) {
    if (count >= W) return load(p);
    vf x{};
    std::memcpy(&x, p, size_t(count) * sizeof(float));
    return x;
}
static inline void store_some(float* p, vf x, int64_t count) {
    if (count >= W) return store(p, x);
    std::memcpy(p, &x, size_t(count) * sizeof(float));
}

// Sum of the lanes, in halves.
static inline float fold(vf x) {
    over_halves([&](auto turn) { x = x + turn(x); });
    return x[0];
}

static inline vf sigmoid(vf x) { return 1.f / (1.f + exp(-x)); }

// log(1 + e^x) = max(x, 0) + 2 artanh(z / (2 + z)), z = e^-|x|; the series' next term is below 4e-10.
static inline vf softplus(vf x) {
    const vf z = exp(x > 0.f ? -x : x), s = z / (z + 2.f), square = s * s;
    vf p = splat(2.f / 15.f);
    for (float odd : {13.f, 11.f, 9.f, 7.f, 5.f, 3.f, 1.f}) p = multiply_add(p, square, splat(2.f / odd));
    return multiply_add(p, s, x > 0.f ? x : vf{});
}

static inline float first(vf x) { return x[0]; }

static int64_t pieces(const CausalConv& op, int64_t, int) { return (op.channels + CHANNELS - 1) / CHANNELS; }

static void run(const CausalConv& op, const Row& row, int64_t piece, int64_t, Scratch& scratch) {
    const int64_t channel = piece * CHANNELS, size = std::min(CHANNELS, op.channels - channel), kept = op.width - 1;
    float* state = op.state ? op.state + row.slot * op.slot_stride + channel * kept : nullptr;
    // Rows of inputs and weights may be a power of two apart and would use a few sets of the L1 cache, so they are copied.
    float* weight = at_least(scratch.recurrent, size_t((op.width + kept + COPIED) * CHANNELS));  // [width][CHANNELS]
    float* inputs = weight + op.width * CHANNELS;  // [kept + COPIED][CHANNELS]
    for (int64_t j = 0; j < op.width; j++) std::copy_n(op.weight + j * op.channels + channel, size, weight + j * CHANNELS);
    for (int64_t j = 0; j < kept; j++)
        for (int64_t c = 0; c < size; c++) inputs[j * CHANNELS + c] = row.fresh || !state ? 0.f : state[c * kept + j];
    const auto output = [&](float* y, const float* in, int64_t c, int64_t count) {
        vf sum = op.bias ? load_some(op.bias + channel + c, count) : vf{};
        for (int64_t j = 0; j < op.width; j++)
            sum = multiply_add(load(weight + j * CHANNELS + c), load(in + j * CHANNELS + c), sum);
        store_some(y + c, op.silu ? act<SILU>(sum) : sum, count);
    };
    for (int64_t from = row.begin; from < row.end; from += COPIED) {
        const int64_t tokens = std::min(COPIED, row.end - from);
        for (int64_t t = 0; t < tokens; t++)
            std::copy_n(op.x + (from + t) * op.x_stride + channel, size, inputs + (kept + t) * CHANNELS);
        for (int64_t t = 0; t < tokens; t++) {
            float* y = op.y + (from + t) * op.y_stride + channel;
            int64_t c = 0;
            for (; c + W <= size; c += W) output(y, inputs + t * CHANNELS, c, W);
            if (c < size) output(y, inputs + t * CHANNELS, c, size - c);
        }
        std::copy_n(inputs + tokens * CHANNELS, kept * CHANNELS, inputs);  // forward
    }
    for (int64_t j = 0; state && j < kept; j++)
        for (int64_t c = 0; c < size; c++) state[c * kept + j] = inputs[j * CHANNELS + c];
}

// Columns of the state that a piece of the delta rule has.
static int64_t columns_of(const DeltaRule& op, int64_t rows, int threads) {
    return rows * op.heads >= 4 * threads ? op.value_dim : COLUMNS;
}
static int64_t pieces(const DeltaRule& op, int64_t rows, int threads) {
    const int64_t columns = columns_of(op, rows, threads);
    return op.heads * ((op.value_dim + columns - 1) / columns);
}

// What the columns of a head have in common at one token.
struct Token {
    float *q, *k, *faded, *decay;  // [key_dim] each: q · scale, k, k · decay, and decay, or only decay[0]
    float beta;
};

static void prepare(const DeltaRule& op, int64_t token, int64_t head, Token& out) {
    const int64_t dim = op.key_dim, key = head / (op.heads / op.key_heads) * dim;
    const float *q = op.q + token * op.q_stride + key, *k = op.k + token * op.k_stride + key;
    const auto norm = [&](const float* x) {
        return op.qk_norm ? 1.f / std::sqrt(total(x, dim, [](vf v) { return v * v; }) + 1e-6f) : 1.f;
    };
    const vf q_scale = splat(norm(q) * op.scale), k_scale = splat(norm(k)), A = splat(op.A[head]);
    const int64_t gates = op.vector_decay ? dim : 1;
    const float *a = op.a + token * op.a_stride + head * gates, *bias = op.dt_bias + head * gates;
    for (int64_t i = 0; i < gates; i += W) {
        const vf raw = load_some(a + i, gates - i) + load_some(bias + i, gates - i);
        store_some(out.decay + i, exp(op.lower_bound ? op.lower_bound * sigmoid(-A * raw) : A * softplus(raw)), gates - i);
    }
    for (int64_t i = 0; i < dim; i += W) {
        const vf at = load_some(k + i, dim - i) * k_scale;
        store_some(out.q + i, load_some(q + i, dim - i) * q_scale, dim - i);
        store_some(out.k + i, at, dim - i);
        store_some(out.faded + i, at * (op.vector_decay ? load_some(out.decay + i, dim - i) : splat(*out.decay)), dim - i);
    }
    out.beta = op.beta_scale * recurrent::first(sigmoid(splat(op.b[token * op.b_stride + head])));
}

// One token for N vectors of columns; a single vector may have fewer than W. Rows of the state are `stride` apart.
template <int N, bool VECTOR_DECAY>
static inline void delta_columns(const DeltaRule& op, const Token& token, float* state, int64_t stride, const float* v,
                                 float* y, int64_t columns) {
    const int64_t dim = op.key_dim;
    vf even[N] = {}, odd[N] = {}, error[N], out[N] = {};
    const auto read = [&](const float* p, int n) { return N > 1 ? load(p + n * W) : load_some(p, columns); };
    int64_t i = 0;
    for (; i + 1 < dim; i += 2) {
        const vf k = splat(token.faded[i]), next = splat(token.faded[i + 1]);
        UNROLL for (int n = 0; n < N; n++) {
            even[n] = multiply_add(k, read(state + i * stride, n), even[n]);
            odd[n] = multiply_add(next, read(state + (i + 1) * stride, n), odd[n]);
        }
    }
    if (i < dim)
        UNROLL for (int n = 0; n < N; n++)
            even[n] = multiply_add(splat(token.faded[i]), read(state + i * stride, n), even[n]);
    UNROLL for (int n = 0; n < N; n++) error[n] = (read(v, n) - (even[n] + odd[n])) * token.beta;
    for (i = 0; i < dim; i++) {
        const vf decay = splat(token.decay[VECTOR_DECAY ? i : 0]), k = splat(token.k[i]), q = splat(token.q[i]);
        UNROLL for (int n = 0; n < N; n++) {
            const vf s = multiply_add(k, error[n], decay * read(state + i * stride, n));
            if (N > 1) store(state + i * stride + n * W, s);
            else store_some(state + i * stride, s, columns);
            out[n] = multiply_add(q, s, out[n]);
        }
    }
    UNROLL for (int n = 0; n < N; n++) {
        if (N > 1) store(y + n * W, out[n]);
        else store_some(y, out[n], columns);
    }
}

template <bool VECTOR_DECAY>
static void run_delta(const DeltaRule& op, const Row& row, int64_t head, int64_t begin, int64_t end, Scratch& scratch) {
    const int64_t dim = op.key_dim;
    float* room = at_least(scratch.recurrent, size_t(PREPARED * 4 * dim + 4 * W * dim));
    float* tile = room + PREPARED * 4 * dim;  // [key_dim][4 · W]
    float* state = op.state + row.slot * op.slot_stride + head * dim * op.value_dim;
    if (row.fresh)
        for (int64_t i = 0; i < dim; i++) std::fill(state + i * op.value_dim + begin, state + i * op.value_dim + end, 0.f);
    Token prepared[PREPARED];
    for (int64_t from = row.begin; from < row.end; from += PREPARED) {
        const int64_t tokens = std::min(PREPARED, row.end - from);
        for (int64_t t = 0; t < tokens; t++) {
            float* at = room + t * 4 * dim;
            prepared[t] = {at, at + dim, at + 2 * dim, at + 3 * dim, 0.f};
            prepare(op, from + t, head, prepared[t]);
        }
        const float* v = op.v + from * op.v_stride + head * op.value_dim;
        float* y = op.y + from * op.y_stride + head * op.value_dim;
        int64_t c = begin;
        for (; c + 4 * W <= end; c += 4 * W) {
            // The rows of a tile are a power of two apart and would use a few sets of the L1 cache.
            const bool copies = tokens > FEW;
            float* at = copies ? tile : state + c;
            const int64_t stride = copies ? 4 * W : op.value_dim;
            if (copies)
                for (int64_t i = 0; i < dim; i++) std::copy_n(state + i * op.value_dim + c, 4 * W, tile + i * 4 * W);
            for (int64_t t = 0; t < tokens; t++)
                delta_columns<4, VECTOR_DECAY>(op, prepared[t], at, stride, v + t * op.v_stride + c,
                                               y + t * op.y_stride + c, 4 * W);
            if (copies)
                for (int64_t i = 0; i < dim; i++) std::copy_n(tile + i * 4 * W, 4 * W, state + i * op.value_dim + c);
        }
        for (; c < end; c += W)
            for (int64_t t = 0; t < tokens; t++)
                delta_columns<1, VECTOR_DECAY>(op, prepared[t], state + c, op.value_dim, v + t * op.v_stride + c,
                                               y + t * op.y_stride + c, std::min<int64_t>(W, end - c));
    }
}

static void run(const DeltaRule& op, const Row& row, int64_t piece, int64_t pieces, Scratch& scratch) {
    const int64_t blocks = pieces / op.heads, columns = blocks == 1 ? op.value_dim : COLUMNS;
    const int64_t begin = piece % blocks * columns, end = std::min(begin + columns, op.value_dim);
    if (op.vector_decay) run_delta<true>(op, row, piece / blocks, begin, end, scratch);
    else run_delta<false>(op, row, piece / blocks, begin, end, scratch);
}

static int64_t channels_of(const SelectiveScan& op) { return std::max<int64_t>(16, ELEMENTS / op.state_dim / 16 * 16); }
static int64_t pieces(const SelectiveScan& op, int64_t, int) {
    return (op.heads * op.head_dim + channels_of(op) - 1) / channels_of(op);
}

// Numbers of each channel of a piece at one token.
struct Channels {
    float *delta, *decay, *scaled;  // scaled: input · Δ; decay: if A is one number
};

// One token for R channels. state: [R][state_dim]; A[r]: row of A. Writes the sums over the state to y.
template <int R, bool VECTOR_A>
static inline void scan_channels(int64_t dim, const Channels& at, int64_t channel, const float* const* A, const float* B,
                                 const float* C, float* state, float* y) {
    vf sums[R] = {}, fade[R], x[R];
    UNROLL for (int r = 0; r < R; r++) {
        fade[r] = splat((VECTOR_A ? at.delta : at.decay)[channel + r]);
        x[r] = splat(at.scaled[channel + r]);
    }
    const auto add = [&](int64_t n, int64_t count) {
        const vf b = load_some(B + n, count), c = load_some(C + n, count);
        UNROLL for (int r = 0; r < R; r++) {
            float* place = state + r * dim + n;
            const vf decay = VECTOR_A ? exp(load_some(A[r] + n, count) * fade[r]) : fade[r];
            const vf s = multiply_add(x[r], b, decay * load_some(place, count));
            store_some(place, s, count);
            sums[r] = multiply_add(s, c, sums[r]);
        }
    };
    int64_t n = 0;
    for (; n + W <= dim; n += W) add(n, W);
    if (n < dim) add(n, dim - n);
    UNROLL for (int r = 0; r < R; r++) y[r] = fold(sums[r]);
}

// Δ, decay and scaled inputs of the channels from `begin` on.
template <bool VECTOR_A>
static void prepare(const SelectiveScan& op, int64_t token, int64_t begin, int64_t count, const Channels& out) {
    const int64_t size = op.head_dim, head = begin / size, heads = (begin + count - 1) / size + 1 - head;
    const float *x = op.x + token * op.x_stride + begin, *dt = op.dt + token * op.dt_stride;
    float *delta = out.scaled + count, *decay = delta + heads;  // of heads
    for (int64_t h = 0; h < heads; h += W) {
        vf step = load_some(dt + head + h, heads - h);
        if (op.dt_bias) step += load_some(op.dt_bias + head + h, heads - h);
        step = softplus(step);
        step = step < op.dt_min ? splat(op.dt_min) : step > op.dt_max ? splat(op.dt_max) : step;
        store_some(delta + h, step, heads - h);
        if (!VECTOR_A) store_some(decay + h, exp(step * load_some(op.A + head + h, heads - h)), heads - h);
    }
    int64_t h = 0, left = size - begin % size;  // channels of head h
    for (int64_t c = 0; c < count; c++, left--) {
        if (left == 0) h++, left = size;
        out.delta[c] = delta[h];
        if (!VECTOR_A) out.decay[c] = decay[h];
        out.scaled[c] = x[c] * delta[h];
    }
}

template <bool VECTOR_A> static void run_scan(const SelectiveScan& op, const Row& row, int64_t begin, int64_t end, Scratch& scratch) {
    const int64_t dim = op.state_dim, count = end - begin, group = op.heads * op.head_dim / op.groups;
    float* room = at_least(scratch.recurrent, size_t(5 * count));
    const Channels at{room, room + count, room + 2 * count};
    float* state = op.state + row.slot * op.slot_stride + begin * dim;
    if (row.fresh) std::fill(state, state + count * dim, 0.f);
    const auto slopes = [&](int64_t channel) { return op.A + channel / op.head_dim * dim; };
    for (int64_t t = row.begin; t < row.end; t++) {
        const float *x = op.x + t * op.x_stride + begin, *B = op.B + t * op.B_stride, *C = op.C + t * op.C_stride;
        float* y = op.y + t * op.y_stride + begin;
        prepare<VECTOR_A>(op, t, begin, count, at);
        for (int64_t c = 0; c < count;) {
            const int64_t own = (begin + c) / group, stop = std::min((own + 1) * group - begin, count);
            for (; c + 4 <= stop; c += 4) {
                const float* A[4] = {};
                if (VECTOR_A)
                    for (int r = 0; r < 4; r++) A[r] = slopes(begin + c + r);
                scan_channels<4, VECTOR_A>(dim, at, c, A, B + own * dim, C + own * dim, state + c * dim, y + c);
            }
            for (; c < stop; c++) {
                const float* A = VECTOR_A ? slopes(begin + c) : nullptr;
                scan_channels<1, VECTOR_A>(dim, at, c, &A, B + own * dim, C + own * dim, state + c * dim, y + c);
            }
        }
        for (int64_t c = 0; c < count; c += W) {
            vf out = load_some(y + c, count - c);
            if (op.D) out = multiply_add(load_some(op.D + begin + c, count - c), load_some(x + c, count - c), out);
            if (op.gate) out *= act<SILU>(load_some(op.gate + t * op.gate_stride + begin + c, count - c));
            store_some(y + c, out, count - c);
        }
    }
}

static void run(const SelectiveScan& op, const Row& row, int64_t piece, int64_t, Scratch& scratch) {
    const int64_t begin = piece * channels_of(op), end = std::min(begin + channels_of(op), op.heads * op.head_dim);
    if (op.vector_A) run_scan<true>(op, row, begin, end, scratch);
    else run_scan<false>(op, row, begin, end, scratch);
}

static int64_t pieces(const RgLru& op, int64_t, int) { return (op.channels + CHANNELS - 1) / CHANNELS; }

static void run(const RgLru& op, const Row& row, int64_t piece, int64_t, Scratch&) {
    const int64_t begin = piece * CHANNELS, size = std::min(CHANNELS, op.channels - begin);
    float* state = op.state + row.slot * op.slot_stride + begin;
    float slopes[CHANNELS];
    for (int64_t c = 0; c < size; c += W)
        store_some(slopes + c, softplus(load_some(op.rate + begin + c, size - c)) * -8.f, size - c);
    for (int64_t t = row.begin; t < row.end; t++) {
        const float *x = op.x + t * op.x_stride + begin, *gate = op.gate + t * op.gate_stride + begin;
        const float* decay = op.decay + t * op.decay_stride + begin;
        float* y = op.y + t * op.y_stride + begin;
        for (int64_t c = 0; c < size; c += W) {
            const int64_t count = size - c;
            const vf opening = sigmoid(load_some(gate + c, count) + load_some(op.gate_bias + begin + c, count));
            vf h = load_some(x + c, count) * opening;
            if (!row.fresh || t > row.begin) {
                const vf open = sigmoid(load_some(decay + c, count) + load_some(op.decay_bias + begin + c, count));
                const vf power = load_some(slopes + c, count) * open;
                vf root = 1.f - exp(power * 2.f);
                for (int i = 0; i < W; i++) root[i] = std::sqrt(root[i] > 0.f ? root[i] : 0.f);
                h = multiply_add(exp(power), load_some(state + c, count), h * root);
            }
            store_some(state + c, h, count);
            store_some(y + c, h, count);
        }
    }
}

template <int ACT> static inline vf gate_of(vf x) { return ACT == SILU ? act<SILU>(x) : sigmoid(x); }

template <int ACT> static void gated_norm_group(const GatedNorm& op, const float* x, const float* gate, const float* weight, float* y) {
    const int64_t size = op.size;
    if (op.gate_first) {
        for (int64_t i = 0; i < size; i += W)
            store_some(y + i, load_some(x + i, size - i) * gate_of<ACT>(load_some(gate + i, size - i)), size - i);
        x = y;
    }
    const float scale = 1.f / std::sqrt(total(x, size, [](vf v) { return v * v; }) / float(size) + op.eps);
    for (int64_t i = 0; i < size; i += W) {
        vf out = load_some(x + i, size - i) * scale * load_some(weight + i, size - i);
        if (!op.gate_first) out *= gate_of<ACT>(load_some(gate + i, size - i));
        store_some(y + i, out, size - i);
    }
}

}  // namespace recurrent

static void gated_norm_row(const GatedNorm& op, int64_t token) {
    const float *x = op.x + token * op.x_stride, *gate = op.gate + token * op.gate_stride;
    float* y = op.y + token * op.y_stride;
    for (int64_t g = 0; g < op.groups; g++) {
        const float* weight = op.weight + g * op.weight_stride;
        const int64_t at = g * op.size;
        if (op.silu) recurrent::gated_norm_group<SILU>(op, x + at, gate + at, weight, y + at);
        else recurrent::gated_norm_group<-1>(op, x + at, gate + at, weight, y + at);
    }
}
