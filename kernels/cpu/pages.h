// Order of keys and values in pages: for each KV head of a block's layer, its keys, and after the keys of all heads the
// values.
//
//     keys    [dim][token]    the keys of different positions are in different lanes, without a transposition
//     values  [token][dim]    a weight times a row adds to lanes of one output each
//
// Pages of latents have a single plane, which is read as keys and as values: [token][dim].
//
// Pages of 8 bits hold x / scale, with a scale for each key and each value: [token] float after the bytes.
//
// Pages of 4 bits hold (x - minimum) / scale of groups of GROUP dims. A byte holds dim 2i in its low half and dim 2i + 1
// in its high half, so keys are [dim / 2][token] and values [token][dim / 2]. The scales of the groups and then their
// minima follow as float16: [2 · groups][token] of keys, [token][2 · groups] of values.
// kernels/cpu/pages.py converts pages from the common order.
#pragma once

#include <algorithm>

#include "program.h"
#include "simd.h"

// The keys, the values, or the latents (as values) of one KV head in one block.
template <class T> struct Part {
    static constexpr int64_t SCALE = sizeof(T) == 1 ? sizeof(float) : 0;
    T* data;
    int64_t tokens, dim;
    Part(const Step& step, int64_t block, int64_t layer, int64_t value, int64_t head)
        : tokens(step.block_tokens), dim(step.page_dim) {
        const int64_t number = ((block * step.layers + layer) * step.planes + value) * step.page_kv_heads + head;
        data = (T*)((char*)step.pages + number * tokens * (dim * int64_t(sizeof(T)) + SCALE));
    }
    char* scale(int64_t token) const { return (char*)(data + tokens * dim) + token * SCALE; }  // may be unaligned
};

// Values that are not finite become 0 in the pages: a later owner of the block reads the rest of its old contents with
// weight 0, and 0 · NaN would corrupt its result.
static inline float finite(float x) { return std::isfinite(x) ? x : 0.f; }

template <class T> static void write_page(const float* x, const Part<T>& part, int64_t token, int64_t value) {
    T* to = part.data + (value ? token * part.dim : token);
    const int64_t apart = value ? 1 : part.tokens;
    for (int64_t i = 0; i < part.dim; i++, to += apart) {
        narrow(finite(x[i]), to);
        if (!std::isfinite(widen(*to))) narrow(0.f, to);
    }
}

// Rounds to 8 bits, scaled by the largest: to the nearest of 255 numbers, ties to even. A nearly zero vector becomes 0.
static void write_page(const float* x, const Part<int8_t>& part, int64_t token, int64_t value) {
    float most = 0;
    for (int64_t i = 0; i < part.dim; i++) most = std::max(most, std::fabs(finite(x[i])));
    const float scale = most < 1e-30f ? 0.f : most / 127.f, inverse = scale ? 127.f / most : 0.f;
    std::memcpy(part.scale(token), &scale, sizeof(scale));
    int8_t* to = part.data + (value ? token * part.dim : token);
    const int64_t apart = value ? 1 : part.tokens;
    for (int64_t i = 0; i < part.dim; i++, to += apart) *to = int8_t(std::nearbyint(finite(x[i]) * inverse));
}

struct nibbles {};  // type of pages of 4 bits

template <> struct Part<nibbles> {
    static constexpr int64_t SCALE = 0, GROUP = 32;
    uint8_t* data;
    int64_t tokens, dim, groups;
    bool value;
    Part(const Step& step, int64_t block, int64_t layer, int64_t value, int64_t head)
        : tokens(step.block_tokens), dim(step.page_dim), groups((dim + GROUP - 1) / GROUP), value(value) {
        const int64_t number = ((block * step.layers + layer) * step.planes + value) * step.page_kv_heads + head;
        data = (uint8_t*)step.pages + number * tokens * (dim / 2 + 2 * groups * int64_t(sizeof(fp16)));
    }
    // Dims 2 · pair and 2 · pair + 1 of a token.
    uint8_t* codes(int64_t token, int64_t pair) const { return data + (value ? token * (dim / 2) + pair : pair * tokens + token); }
    // The scale of a group, at `groups + group` its minimum; aligned to 2 bytes, because dim is a multiple of 4.
    fp16* factor(int64_t token, int64_t at) const {
        return (fp16*)(data + tokens * (dim / 2)) + (value ? token * 2 * groups + at : at * tokens + token);
    }
};

// Rounds groups of dims to 16 steps between their smallest and largest element, each limited to ±32768, so that no
// result is outside of float16. kernels/page_codes.py does the same.
static void write_page(const float* x, const Part<nibbles>& part, int64_t token, int64_t) {
    constexpr float MOST = 32768.f;
    for (int64_t group = 0; group < part.groups; group++) {
        const int64_t begin = group * part.GROUP, end = std::min(part.dim, begin + part.GROUP);
        auto at = [&](int64_t i) { return std::clamp(finite(x[i]), -MOST, MOST); };
        float least = at(begin), most = least;
        for (int64_t i = begin; i < end; i++) least = std::min(least, at(i)), most = std::max(most, at(i));
        fp16 *scale = part.factor(token, group), *minimum = part.factor(token, part.groups + group);
        narrow((most - least) / 15.f, scale);
        narrow(least, minimum);
        const float factor = widen(*scale), inverse = factor > 0 ? 1.f / factor : 0.f, offset = widen(*minimum);
        auto code = [&](int64_t i) { return uint8_t(std::clamp(std::nearbyint((at(i) - offset) * inverse), 0.f, 15.f)); };
        for (int64_t i = begin; i < end; i += 2) *part.codes(token, i / 2) = uint8_t(code(i) | code(i + 1) << 4);
    }
}

// Copies keys of `count` tokens from `token` on to[dim][apart]: lanes are tokens.
template <class T> static inline void widen_keys(const Part<T>& part, int64_t token, int64_t count, float* to, int64_t apart) {
    for (int64_t d = 0; d < part.dim; d++, to += apart) {
        const T* from = part.data + d * part.tokens + token;
        int64_t i = 0;
        for (; i + W <= count; i += W) store(to + i, load(from + i));
        for (; i < count; i++) to[i] = widen(from[i]);
    }
}
static inline void widen_keys(const Part<nibbles>& part, int64_t token, int64_t count, float* to, int64_t apart) {
    auto some = [&](int64_t i, auto size) {  // a whole vector of tokens, of constant size, or the rest
        auto wide = [&](const fp16* from) {
            fp16 all[W] = {};
            std::memcpy(all, from, sizeof(fp16) * size_t(size));
            return load(all);
        };
        for (int64_t group = 0; group < part.groups; group++) {
            const vf factor = wide(part.factor(token + i, group)), least = wide(part.factor(token + i, part.groups + group));
            for (int64_t d = group * part.GROUP; d < std::min(part.dim, (group + 1) * part.GROUP); d += 2) {
                uint8_t two[W] = {};
                std::memcpy(two, part.codes(token + i, d / 2), size_t(size));
                int8_t half[2][W];
                UNROLL for (int lane = 0; lane < W; lane++) half[0][lane] = int8_t(two[lane] & 15), half[1][lane] = int8_t(two[lane] >> 4);
                UNROLL for (int odd = 0; odd < 2; odd++) {
                    float out[W];
                    store(out, multiply_add(load(half[odd]), factor, least));
                    std::memcpy(to + (d + odd) * apart + i, out, sizeof(float) * size_t(size));
                }
            }
        }
    };
    int64_t i = 0;
    for (; i + W <= count; i += W) some(i, std::integral_constant<int64_t, W>());
    if (i < count) some(i, count - i);
}

// Copies `size` dims of a token's value.
template <class T> static inline void widen_value(const Part<T>& part, int64_t token, int64_t size, float* to) {
    const T* from = part.data + token * part.dim;
    int64_t i = 0;
    for (; i + W <= size; i += W) store(to + i, load(from + i));
    for (; i < size; i++) to[i] = widen(from[i]);
}
static inline void widen_value(const Part<nibbles>& part, int64_t token, int64_t size, float* to) {
    const uint8_t* from = part.codes(token, 0);
    for (int64_t group = 0; group < part.groups; group++) {
        const float factor = widen(*part.factor(token, group)), least = widen(*part.factor(token, part.groups + group));
        const int64_t begin = group * part.GROUP / 2, end = std::min(part.dim, (group + 1) * part.GROUP) / 2;
        for (int64_t i = begin; i < end; i++) {
            to[2 * i] = float(from[i] & 15) * factor + least;
            to[2 * i + 1] = float(from[i] >> 4) * factor + least;
        }
    }
}
