// Operations on one row (token) at a time.
#pragma once

#include "pages.h"
#include "linear_blocks.h"
#include "program.h"
#include "simd.h"

template <class T> static void embed_row(const Embed& op, int64_t id, float* out) {
    const T* row = static_cast<const T*>(op.table) + id * op.size;
    for (int64_t i = 0; i < op.size; i++) out[i] = widen(row[i]) * op.scale;
}

static void embed_row(const Embed& op, int64_t token, const Step& step) {
    float* out = op.out + token * op.out_stride;
    int64_t id = step.ids[token];
    if (op.type == F32) embed_row<float>(op, id, out);
    else if (op.type == BF16) embed_row<bf16>(op, id, out);
    else if (op.type >= EMBED_BLOCKS) {
        const int32_t form = op.type - EMBED_BLOCKS;
        blocks::restore(form, static_cast<const uint8_t*>(op.table) + id * blocks::row_bytes(form, op.size), op.size, op.scale, out);
    }
    else embed_row<fp16>(op, id, out);
}

// Σ f(x): in W lanes, then the rest. The order depends on the size alone.
template <class F> static inline float total(const float* x, int64_t size, F f) {
    vf lanes[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int v = 0; v < 4; v++) lanes[v] += f(load(x + i + v * W));
    for (; i + W <= size; i += W) lanes[0] += f(load(x + i));
    float rest = 0;
    for (; i < size; i++) rest += f(splat(x[i]))[0];
    return sum((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + rest;
}

static void norm_piece(const Norm& op, const float* x, const float* weight, float* y) {
    float mean = 0;
    if (op.kind == LAYER) mean = total(x, op.size, [](vf v) { return v; }) / float(op.size);
    const vf middle = splat(mean);
    float square = total(x, op.size, [&](vf v) { return (v - middle) * (v - middle); }) / float(op.size);
    float scale = 1.f / std::sqrt(square + op.eps);
    int64_t i = 0;
    for (; i + W <= op.size; i += W) {
        vf out = (load(x + i) - middle) * scale * load(weight + i);
        store(y + i, op.bias ? out + load(op.bias + i) : out);
    }
    for (; i < op.size; i++) {
        float out = (x[i] - mean) * scale * weight[i];
        y[i] = op.bias ? out + op.bias[i] : out;
    }
}

static void norm_row(const Norm& op, int64_t token) {
    const float* x = op.x + token * op.x_stride;
    float* y = op.y + token * op.y_stride;
    for (int64_t g = 0; g < op.groups; g++)
        norm_piece(op, x + g * op.size, op.weight + g * op.weight_stride, y + g * op.size);
}

static void add_row(const Add& op, int64_t token) {
    float* x = op.x + token * op.x_stride;
    const float* y = op.y + token * op.y_stride;
    for (int64_t i = 0; i < op.size; i++) x[i] += op.alpha * y[i];
}

template <int ACT> static inline vf act(vf x) {
    if constexpr (ACT == SILU) return x / (1.f + exp(-x));
    if constexpr (ACT == GELU) return 0.5f * x * (1.f + erf(x * 0.707106781f));
    if constexpr (ACT == GELU_TANH) return 0.5f * x * (1.f + tanh(0.797884561f * (x + 0.044715f * x * x * x)));
    if constexpr (ACT == QUICK_GELU) return x / (1.f + exp(-1.702f * x));
    return x > 0.f ? x : x != x ? x : vf{};
}

// limit is infinite if there is none. NaN stays NaN.
static inline vf below(vf x, vf limit) { return x > limit ? limit : x; }
static inline vf within(vf x, vf limit) { return below(x < -limit ? -limit : x, limit); }

template <int ACT> static void activate_row(const Activate& op, const float* x, float* y) {
    const float* up = x + op.inner;
    const vf limit = splat(op.limit);
    int64_t i = 0;
    for (; i + W <= op.inner; i += W) {
        vf out = act<ACT>(below(load(x + i), limit));
        store(y + i, op.gated ? out * (within(load(up + i), limit) + op.up_offset) : out);
    }
    for (; i < op.inner; i++) {
        float out = act<ACT>(below(splat(x[i]), limit))[0];
        y[i] = op.gated ? out * (within(splat(up[i]), limit)[0] + op.up_offset) : out;
    }
}

static void activate_row(const Activate& op, int64_t token) {
    const float* x = op.x + token * op.x_stride;
    float* y = op.y + token * op.y_stride;
    for (int64_t g = 0; g < op.groups; g++, x += (1 + op.gated) * op.inner, y += op.inner) {
        switch (op.act) {
            case SILU: activate_row<SILU>(op, x, y); break;
            case GELU: activate_row<GELU>(op, x, y); break;
            case GELU_TANH: activate_row<GELU_TANH>(op, x, y); break;
            case QUICK_GELU: activate_row<QUICK_GELU>(op, x, y); break;
            default: activate_row<RELU>(op, x, y);
        }
    }
}

// cos and sin have the length of the rotated part; sin includes the sign for its place in the pair (kernels/rope.py).
static void rotate(float* x, int64_t dim, const float* cos, const float* sin, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < dim; i += 2) {
            float a = x[i], b = x[i + 1];
            x[i] = a * cos[i] + b * sin[i];
            x[i + 1] = b * cos[i + 1] + a * sin[i + 1];
        }
        return;
    }
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

static void write_kv(const RopeKV& op, const float* k, int64_t token, const Step& step) {
    const int64_t slot = step.groups[op.group].slot_mapping[token];
    if (slot < 0) return;
    const int64_t block = slot / step.block_tokens, offset = slot % step.block_tokens;
    for (int64_t value = 0; value < 2; value++)
        for (int64_t head = 0; head < op.kv_heads; head++) {
            const float* x = k + (value * op.kv_heads + head) * op.dim;
            switch (step.page_type) {
                case F32: write_page(x, Part<float>(step, block, op.layer, value, head), offset, value); break;
                case BF16: write_page(x, Part<bf16>(step, block, op.layer, value, head), offset, value); break;
                case F16: write_page(x, Part<fp16>(step, block, op.layer, value, head), offset, value); break;
                case I8: write_page(x, Part<int8_t>(step, block, op.layer, value, head), offset, value); break;
                default: write_page(x, Part<nibbles>(step, block, op.layer, value, head), offset, value);
            }
        }
}

static void rope_kv_row(const RopeKV& op, int64_t token, const Step& step) {
    float* qkv = op.qkv + token * op.stride;
    if (op.rotary_dim) {
        const Angles& angles = step.angles[op.rope];
        for (int64_t head = 0; head < op.heads + op.kv_heads; head++)
            rotate(qkv + head * op.dim, op.rotary_dim, angles.cos + token * op.rotary_dim,
                   angles.sin + token * op.rotary_dim, op.interleaved);
    }
    write_kv(op, qkv + op.heads * op.dim, token, step);
}

static void latent_kv_row(const LatentKV& op, int64_t token, const Step& step) {
    const Angles& angles = step.angles[op.rope];
    const float *cos = angles.cos + token * op.rotary_dim, *sin = angles.sin + token * op.rotary_dim;
    float *latent = op.latent + token * op.latent_stride, *q = op.q + token * op.q_stride, *y = op.y + token * op.y_stride;
    rotate(latent + op.dim - op.rotary_dim, op.rotary_dim, cos, sin, op.interleaved);
    for (int64_t head = 0; head < op.heads; head++) {
        float* rotated = q + (head + 1) * op.query_dim - op.rotary_dim;
        rotate(rotated, op.rotary_dim, cos, sin, op.interleaved);
        std::memcpy(y + (head + 1) * op.dim - op.rotary_dim, rotated, sizeof(float) * size_t(op.rotary_dim));
    }
    const int64_t slot = step.groups[op.group].slot_mapping[token];
    if (slot < 0) return;
    const int64_t block = slot / step.block_tokens, offset = slot % step.block_tokens;
    switch (step.page_type) {
        case F32: return write_page(latent, Part<float>(step, block, op.layer, 0, 0), offset, 1);
        case BF16: return write_page(latent, Part<bf16>(step, block, op.layer, 0, 0), offset, 1);
        default: write_page(latent, Part<fp16>(step, block, op.layer, 0, 0), offset, 1);
    }
}

// Position of a token. Rows are few, so they are searched one after another.
static int64_t position_of(const Step& step, int64_t token) {
    int64_t row = 0;
    for (; token >= step.count[row]; row++) token -= step.count[row];
    return step.first[row] + token;
}

static void scale_queries_row(const ScaleQueries& op, int64_t token, const Step& step) {
    const float steps = float((position_of(step, token) + op.offset) / op.length), factor = 1.f + op.scale * std::log1p(steps);
    float* x = op.qkv + token * op.stride;
    for (int64_t i = 0; i < op.size; i++) x[i] *= factor;
}

static void cap_row(const Cap& op, int64_t token) {
    float* x = op.x + token * op.stride;
    const vf scale = splat(op.cap ? op.scale / op.cap : op.scale);
    int64_t i = 0;
    for (; i + W <= op.size; i += W) {
        vf y = load(x + i) * scale;
        store(x + i, op.cap ? tanh(y) * op.cap : y);
    }
    for (; i < op.size; i++) {
        vf y = splat(x[i]) * scale;
        x[i] = (op.cap ? tanh(y) * op.cap : y)[0];
    }
}
