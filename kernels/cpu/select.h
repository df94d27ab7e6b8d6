// Selection of the keys that sparse attention reads (arXiv:2512.02556, section 2.1): the top_k positions, up to a token's
// own, with the largest
//
//     score[s] = Σ_h weights[h] · max(q[h] · key[s], 0)
//
// A piece of work is a run of a row's tokens, as in attention.h: the keys of a chunk are widened once for all of their
// queries. The positions of a row with one token are divided among several threads, which write scores to the partial
// results; `select_row` selects among them. Every sum is in the order of dims, then of heads, so that a score does not
// depend on other tokens.
#pragma once

#include <algorithm>

#include "attention.h"
#include "rows.h"

namespace selection {

using attention::CHUNK;
using attention::Piece;
using attention::SPLIT;

// Writes the positions of the k largest of `count` scores, the first among equals, in ascending order. NaN is the least.
static void take(const float* scores, int64_t count, int64_t k, int32_t* selected, std::vector<float>& room) {
    const float none = -std::numeric_limits<float>::infinity();
    float* sorted = at_least(room, size_t(count));
    for (int64_t i = 0; i < count; i++) sorted[i] = scores[i] == scores[i] ? scores[i] : none;
    std::nth_element(sorted, sorted + k - 1, sorted + count, [](float a, float b) { return a > b; });
    const float threshold = sorted[k - 1];
    int64_t equal = k;  // of those with the threshold as their score
    for (int64_t i = 0; i < count; i++) equal -= scores[i] > threshold;
    for (int64_t i = 0; i < count; i++) {
        const float score = scores[i] == scores[i] ? scores[i] : none;
        if (score > threshold || (score == threshold && equal-- > 0)) *selected++ = int32_t(i);
    }
}

// Writes all positions up to the token's own, if they are at most top_k, and returns whether they are.
static bool take_all(const Select& op, int64_t token, int64_t position) {
    if (position >= op.top_k) return false;
    int32_t* selected = op.selected + token * op.top_k;
    for (int64_t i = 0; i < op.top_k; i++) selected[i] = i <= position ? int32_t(i) : -1;
    return true;
}

// Widens the keys [low, high) of a chunk to [dim][CHUNK].
template <class T> static void widen_keys(const Select& op, const Step& step, const Piece& piece, int64_t low, int64_t high, float* keys) {
    const int64_t* table = step.groups[op.group].table + piece.row * step.table_width;
    for (int64_t at = low; at < high; at++) {
        const T* key = Part<T>(step, table[at / step.block_tokens], op.layer, 0, 0).data + at % step.block_tokens * op.dim;
        for (int64_t d = 0; d < op.dim; d++) keys[d * CHUNK + at % CHUNK] = widen(key[d]);
    }
}

// Adds the scores of all heads for the keys of a chunk.
static void add_heads(const float* products, const float* weights, int64_t heads, float* scores) {
    for (int64_t n = 0; n < CHUNK; n += W) {
        vf total = {};
        for (int64_t head = 0; head < heads; head++) {
            const vf x = load(products + head * CHUNK + n);
            total += weights[head] * (x > 0.f ? x : vf{});
        }
        store(scores + n, total);
    }
}

template <class T> static void score_piece(const Select& op, const Step& step, const Piece& piece, float* partials, Scratch& scratch) {
    if (piece.position + piece.count <= op.top_k) {
        for (int64_t i = 0; piece.partial < 0 && i < piece.count; i++) take_all(op, piece.token + i, piece.position + i);
        return;
    }
    const int64_t size = attention::padded(op.dim), vectors = piece.count * op.heads;
    const int64_t first = piece.begin / CHUNK * CHUNK, length = (piece.end - first + CHUNK - 1) / CHUNK * CHUNK;
    float* queries = at_least(scratch.attention, size_t(vectors * (size + CHUNK) + CHUNK * size + piece.count * length));
    float *products = queries + vectors * size, *keys = products + vectors * CHUNK, *scores = keys + CHUNK * size;
    for (int64_t i = 0; i < vectors; i++)
        std::memcpy(queries + i * size, op.q + (piece.token + i / op.heads) * op.q_stride + i % op.heads * op.dim,
                    sizeof(float) * size_t(op.dim));
    std::fill_n(keys, CHUNK * size, 0.f);
    attention::Chunk<float> chunk{};
    chunk.apart = CHUNK;
    for (int64_t n = 0; n < CHUNK / W; n++) chunk.keys[n] = keys + n * W;
    for (int64_t at = first; at < piece.end; at += CHUNK) {
        widen_keys<T>(op, step, piece, std::max(at, piece.begin), std::min(at + CHUNK, piece.end), keys);
        attention::product<attention::Keys, false, false>(vectors, chunk, chunk, 0, op.dim, 0, CHUNK / W, queries, size, products, CHUNK);
        for (int64_t i = 0; i < piece.count; i++)
            add_heads(products + i * op.heads * CHUNK, op.weights + (piece.token + i) * op.weights_stride, op.heads,
                      scores + i * length + at - first);
    }
    if (piece.partial >= 0) {
        std::memcpy(partials + piece.partial * SPLIT + piece.begin % SPLIT, scores + piece.begin - first,
                    sizeof(float) * size_t(piece.end - piece.begin));
        return;
    }
    for (int64_t i = 0; i < piece.count; i++) {
        const int64_t token = piece.token + i, position = piece.position + i;
        if (!take_all(op, token, position))
            take(scores + i * length, position + 1, op.top_k, op.selected + token * op.top_k, scratch.scaled);
    }
}

// Selects for a row with one token, whose scores are partial results.
static void select_row(const Select& op, const attention::Schedule& schedule, int64_t token, const Step& step, float* partials,
                       Scratch& scratch) {
    if (schedule.first_partial[size_t(token)] < 0) return;
    const int64_t position = position_of(step, token);
    if (take_all(op, token, position)) return;
    take(partials + schedule.first_partial[size_t(token)] * SPLIT, position + 1, op.top_k, op.selected + token * op.top_k, scratch.scaled);
}

}  // namespace selection
