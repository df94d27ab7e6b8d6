// Order of keys and values in pages: for each KV head of a block's layer, its keys, and after the keys of all heads the
// values.
//
//     keys    [dim][token]    the keys of different positions are in different lanes, without a transposition
//     values  [token][dim]    a weight times a row adds to lanes of one output each
//
// Pages of latents have a single plane, which is read as keys and as values: [token][dim].
//
// Pages of 8 bits hold x / scale, with a scale for each key and each value: [token] float after the bytes.
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
