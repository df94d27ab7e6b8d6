// Attention of ragged rows over paged keys and values: softmax(scale · q kᵀ + mask) v. A sink is an additional logit of
// each head. ALiBi adds a head's slope times the distance from the query to the key, which is negative or 0; biases are a
// number of each head for each distance. Positions of an encoder input (Step::starts) are the keys of cross-attention, and
// no others are.
//
// A piece of work is a run of a row's queries × one KV head, with all query heads that share it: keys and values are
// read once for all of them. Keys come in chunks of CHUNK positions, chunks in splits of SPLIT. Both start at multiples
// of their sizes, so the order of additions depends on a query's position and window or chunk alone. A row with one query
// distributes its splits among several threads, which merge their results afterwards, in order; other rows merge them
// while they compute, in the same order. Sinks are added at the very end.
//
// Latents (Attend::latent) are keys and values at once, and all query heads read the same ones. Heads are divided among
// pieces of work as if they belonged to several KV heads, which affects no result. A chunk is always widened, as keys
// and as values, because pages store it only once.
//
// Sparse attention (Attend::selected) reads the keys that Select chose (select.h). The places in that list take the roles of
// positions, so a list of all positions gives the same bits as dense attention.
//
// The sum of a score over the dims takes one lane, in order; so does the sum of an output over the positions. This
// holds for any number of queries: a few read the pages directly (pages.h), many read a chunk that is widened once for
// them.
#pragma once

#include <limits>

#include "linear.h"
#include "pages.h"

namespace attention {

constexpr int64_t CHUNK = 64, SPLIT = 512, RUN_VECTORS = 64;
// SUMS: vectors of sums of a product that fit in the registers next to its operands. TILE: maximum number of queries.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SUMS = 16, TILE = 8;
#else
constexpr int SUMS = 8, TILE = 4;
#endif

struct Piece {
    int64_t token, count, position, row, begin, end, partial;  // keys [begin, end); partial -1: the piece is the whole
};

struct Kind {  // operations of one kind share a schedule; group_size: query heads to a KV head; top_k: of sparse attention
    int64_t window, chunk, group_size, top_k;
    bool causal, cross;
    bool operator==(const Kind&) const = default;
};

static inline Kind kind_of(const Attend& op) {
    return {op.window, op.chunk, op.heads / op.kv_heads, op.top_k, bool(op.causal), bool(op.cross)};
}
static inline Kind kind_of(const Select& op) { return {0, 0, op.heads, 0, true, false}; }

struct Schedule {  // pieces of a step
    Kind kind;
    std::vector<Piece> pieces;
    std::vector<int64_t> first_partial, partials;  // per token: -1 where its piece is the whole
    int64_t total = 0;
};

// The first position that this position reads.
static inline int64_t first_key(int64_t position, int64_t window, int64_t chunk) {
    if (chunk) return position / chunk * chunk;
    return window ? std::max<int64_t>(0, position - window + 1) : 0;
}

// Positions that a token reads with causal attention: up to its own, and all of its span, whose tokens see one another.
struct Reach {
    int64_t begin, end;
};

static inline Reach reach_of(const int64_t* spans, int64_t token, int64_t position, int64_t window, int64_t chunk) {
    const Reach own{first_key(position, window, chunk), position + 1};
    if (!spans || spans[2 * token] >= spans[2 * token + 1]) return own;
    return {std::min(own.begin, spans[2 * token]), std::max(own.end, spans[2 * token + 1])};
}

static Schedule schedule(const Step& step, const Kind& kind) {
    const size_t tokens = size_t(step.tokens);
    const auto [window, chunk, group_size, top_k, causal, cross] = kind;
    Schedule made{kind, {}, std::vector<int64_t>(tokens, -1), std::vector<int64_t>(tokens, 0)};
    const int64_t run = top_k ? 1 : std::max<int64_t>(1, RUN_VECTORS / group_size);
    int64_t token = 0;
    for (int64_t row = 0; row < step.rows; row++) {
        for (int64_t at = 0; at < step.count[row]; at += run) {
            const int64_t count = std::min(run, step.count[row] - at), position = step.first[row] + at;
            const int64_t start = step.starts ? step.starts[row] : 0;
            const int64_t row_end = cross ? start : step.first[row] + step.count[row];
            int64_t begin = cross ? 0 : std::max(start, first_key(position, window, chunk));
            int64_t end = causal ? position + count : window ? std::min(row_end, position + count - 1 + window) : row_end;
            for (int64_t i = 0; causal && step.spans && i < count; i++) {
                const Reach reach = reach_of(step.spans, token + at + i, position + i, window, chunk);
                begin = std::min(begin, reach.begin);
                end = std::min(row_end, std::max(end, reach.end));
            }
            if (top_k) end = std::min(end, top_k);
            const int64_t splits = (end - 1) / SPLIT - begin / SPLIT + 1;
            if (step.count[row] > 1 || splits == 1) {
                made.pieces.push_back({token + at, count, position, row, begin, end, -1});
                continue;
            }
            made.first_partial[size_t(token)] = made.total;
            made.partials[size_t(token)] = splits;
            for (int64_t split = begin / SPLIT; split <= (end - 1) / SPLIT; split++)
                made.pieces.push_back({token, 1, position, row, std::max(begin, split * SPLIT),
                                       std::min(end, (split + 1) * SPLIT), made.total++});
        }
        token += step.count[row];
    }
    return made;
}

// State of one query head: the largest score and the sum of e^(score - largest). The weighted values are separate.
struct Sum {
    float top = -std::numeric_limits<float>::infinity(), weight = 0;
};

// Merges `more` into the result. Both are relative to their own largest score.
static inline void merge(Sum& sum, float* values, const Sum& more, const float* more_values, int64_t dim) {
    if (more.weight == 0) return;
    const float top = std::max(sum.top, more.top);
    const float old_scale = sum.weight == 0 ? 0.f : std::exp(sum.top - top), new_scale = std::exp(more.top - top);
    sum = {top, sum.weight * old_scale + more.weight * new_scale};
    for (int64_t i = 0; i < dim; i += W)
        store(values + i, load(values + i) * old_scale + load(more_values + i) * new_scale);
}

static inline int64_t padded(int64_t dim) { return (dim + W - 1) / W * W; }

// Addresses of a chunk's keys and values. Dim d of the keys of vector n starts at keys[n] + d · apart, the value of
// position j at values[j]. Positions [from, to) of the chunk are read. Only 8-bit pages have scales.
template <class T> struct Chunk {
    const T *keys[CHUNK / W], *values[CHUNK];
    int64_t apart, from, to;
    const float *key_scales = nullptr, *value_scales = nullptr;
    int64_t first() const { return from / W; }
    int64_t last() const { return (to + W - 1) / W; }
};

// Vector n of row k of the matrix by which q, or the weights, are multiplied.
struct Keys {
    template <class T> static const T* at(const Chunk<T>& chunk, int64_t k, int64_t n) { return chunk.keys[n] + k * chunk.apart; }
};
struct Values {
    template <class T> static const T* at(const Chunk<T>& chunk, int64_t k, int64_t n) { return chunk.values[k] + n * W; }
};

// c[r][n] (+)= Σ_k a[r][k] · b[k][n] for vectors n in [first, last), k in [begin, end) in order. AHEAD: prefetch the
// same place of the next chunk.
template <class B, int R, bool AHEAD, bool MORE, class T>
static inline void product_rows(const Chunk<T>& b, const Chunk<T>& next, int64_t begin, int64_t end, int64_t first, int64_t last,
                                const float* a, int64_t a_row, float* c, int64_t c_row) {
    auto columns = [&]<int V>(int64_t n) {
        vf sums[R][V];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sums[r][v] = MORE ? load(c + r * c_row + (n + v) * W) : vf{};
        for (int64_t k = begin; k < end; k++) {
            vf wide[V];
            UNROLL for (int v = 0; v < V; v++) {
                wide[v] = load(B::at(b, k, n + v));
                if (AHEAD) __builtin_prefetch(B::at(next, k, n + v));
            }
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < V; v++) sums[r][v] += a[r * a_row + k] * wide[v];
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) store(c + r * c_row + (n + v) * W, sums[r][v]);
    };
    constexpr int V = SUMS / R >= 4 ? 4 : 2;
    for (; first + V <= last; first += V) columns.template operator()<V>(first);
    if (V == 4 && first + 2 <= last) { columns.template operator()<2>(first); first += 2; }
    if (first < last) columns.template operator()<1>(first);
}

template <class B, bool AHEAD, bool MORE, int R = TILE, class T>
static inline void product(int64_t rows, const Chunk<T>& b, const Chunk<T>& next, int64_t begin, int64_t end, int64_t first,
                           int64_t last, const float* a, int64_t a_row, float* c, int64_t c_row) {
    for (; rows >= R; rows -= R, a += R * a_row, c += R * c_row)
        product_rows<B, R, AHEAD, MORE>(b, next, begin, end, first, last, a, a_row, c, c_row);
    if constexpr (R > 1)
        if (rows) product<B, AHEAD, MORE, R - 1>(rows, b, next, begin, end, first, last, a, a_row, c, c_row);
}

struct Workspace {  // one thread's working memory for a piece
    float *queries, *keys, *values, *scores, *sums, *split_sums, *weights, *scales;
    std::vector<Sum> whole, split;
    Workspace(Scratch& scratch, int64_t vectors, int64_t size) : whole(size_t(vectors)), split(size_t(vectors)) {
        const int64_t chunk = CHUNK * size, all = vectors * size;
        float* at = at_least(scratch.attention, size_t(2 * chunk + 3 * all + vectors * (CHUNK + W) + 2 * CHUNK));
        for (float** part : {&keys, &values}) { *part = at; at += chunk; }
        for (float** part : {&queries, &sums, &split_sums}) { *part = at; at += all; }
        scores = at;
        weights = scores + vectors * CHUNK;  // of the split so far, in lanes
        scales = weights + vectors * W;      // of the chunk's keys, then of its values
    }
};

// Calls f(keys, values, token, at, count) for each run of the positions [low, high) within one block: `count` tokens
// from `token` of the block on, which are positions `at` … of the chunk. Selected positions are separate runs.
template <class T, class F> static inline void runs(const Attend& op, const Step& step, const Piece& piece, int64_t head,
                                                    int64_t low, int64_t high, F f) {
    const int64_t* table = step.groups[op.group].table + piece.row * step.table_width;
    const int64_t tokens = step.block_tokens, start = low / CHUNK * CHUNK;
    if (op.latent) head = 0;
    for (int64_t at = low; op.selected && at < high; at++) {
        const int64_t position = op.selected[piece.token * op.top_k + at], block = table[position / tokens];
        f(Part<T>(step, block, op.layer, 0, head), Part<T>(step, block, op.layer, op.latent ? 0 : 1, head), position % tokens,
          at - start, int64_t(1));
    }
    for (int64_t at = low; !op.selected && at < high;) {
        const int64_t token = at % tokens, count = std::min(high - at, tokens - token), block = table[at / tokens];
        f(Part<T>(step, block, op.layer, 0, head), Part<T>(step, block, op.layer, op.latent ? 0 : 1, head), token, at - start, count);
        at += count;
    }
}

// The chunk in the pages, without a copy. Blocks are whole vectors of positions, heads are whole vectors of dims.
template <class T> static Chunk<T> gather_chunk(const Attend& op, const Step& step, const Piece& piece, int64_t head, int64_t low,
                                                int64_t high) {
    Chunk<T> chunk{};
    chunk.apart = step.block_tokens;
    chunk.from = low % CHUNK;
    chunk.to = chunk.from + high - low;
    runs<T>(op, step, piece, head, low, high, [&](auto keys, auto values, int64_t token, int64_t at, int64_t count) {
        for (int64_t n = at / W; n * W < at + count; n++) chunk.keys[n] = keys.data + token + n * W - at;
        for (int64_t j = 0; j < count; j++) chunk.values[at + j] = values.data + (token + j) * op.dim;
    });
    return chunk;
}

// Pages whose elements are no numbers on their own: 4 bits, which have their scales applied where they are widened.
template <class T> constexpr bool is_packed = std::is_same_v<T, nibbles>;

// Widens the chunk into `room`, with the scales of 8-bit pages separate.
template <class T> static Chunk<float> widen_chunk(const Attend& op, const Step& step, const Piece& piece, int64_t head,
                                                   int64_t low, int64_t high, const Workspace& room) {
    const int64_t size = padded(op.value_dim);
    Chunk<float> chunk{};
    chunk.apart = CHUNK;
    chunk.from = low % CHUNK;
    chunk.to = chunk.from + high - low;
    for (int64_t n = 0; n < CHUNK / W; n++) chunk.keys[n] = room.keys + n * W;
    for (int64_t j = 0; j < CHUNK; j++) chunk.values[j] = room.values + j * size;
    runs<T>(op, step, piece, head, low, high, [&](auto keys, auto values, int64_t token, int64_t at, int64_t count) {
        if constexpr (!is_packed<T>) {
            for (int64_t j = 0; op.latent && j < count; j++)
                for (int64_t d = 0; d < op.dim; d++) room.keys[d * CHUNK + at + j] = widen(values.data[(token + j) * op.dim + d]);
        }
        if (!op.latent) widen_keys(keys, token, count, room.keys + at, CHUNK);
        for (int64_t j = 0; j < count; j++) {
            float* row = room.values + (at + j) * size;
            widen_value(values, token + j, op.value_dim, row);
            std::fill(row + op.value_dim, row + size, 0.f);
        }
    });
    return chunk;
}

template <class T, class Any> static void find_scales(const Attend& op, const Step& step, const Piece& piece, int64_t head,
                                                      int64_t low, int64_t high, const Workspace& room, Chunk<Any>& chunk) {
    if constexpr (Part<T>::SCALE != 0) {
        std::fill_n(room.scales, 2 * CHUNK, 0.f);  // a weight of 0 times what was left there could be NaN
        runs<T>(op, step, piece, head, low, high, [&](auto keys, auto values, int64_t token, int64_t at, int64_t count) {
            std::memcpy(room.scales + at, keys.scale(token), sizeof(float) * size_t(count));
            std::memcpy(room.scales + CHUNK + at, values.scale(token), sizeof(float) * size_t(count));
        });
        chunk.key_scales = room.scales;
        chunk.value_scales = room.scales + CHUNK;
    }
}

// The biases of the distances from `distance` on, of which there are 2 · reach + 1.
static inline vf biases_from(const float* biases, int64_t reach, int64_t distance) {
    if (distance >= -reach && distance + W - 1 <= reach) return load(biases + reach + distance);
    vf found;
    for (int i = 0; i < W; i++) found[i] = biases[reach + std::clamp<int64_t>(distance + i, -reach, reach)];
    return found;
}

enum Added { NOTHING, ALIBI, BIASES };  // to the scores

// Converts scores of one chunk to weights, in place, and scales the sums to the new largest score. Positions [from, to)
// of the chunk are seen. weight: Σ of the weights so far, in lanes. ALIBI: adds slope · (position in the chunk - query).
// added: the slope, or the biases of the head.
template <Added ADDED>
static inline void softmax_chunk(const Attend& op, const float* key_scales, const float* value_scales, float* scores, float& top_so_far,
                                 float* weight, float* values, int64_t size, int64_t from, int64_t to, const float* added, int64_t query) {
    constexpr int V = CHUNK / W;
    const float none = -std::numeric_limits<float>::infinity();
    vf weights[V], top = splat(none);
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    UNROLL for (int v = 0; v < V; v++) {
        vf x = load(scores + v * W) * op.scale;
        if (key_scales) x *= load(key_scales + v * W);
        if (op.softcap != 0) x = tanh(x / op.softcap) * op.softcap;
        vi at = lane + v * W;
        if (ADDED == ALIBI) x = multiply_add(to_float(at - int32_t(query)), splat(*added), x);
        if (ADDED == BIASES) x += biases_from(added, op.reach, v * W - query);
        weights[v] = (at < int32_t(from)) | (at >= int32_t(to)) ? splat(none) : x;
        top = larger(top, weights[v]);
    }
    const float now = std::max(top_so_far, largest(top)), scale = std::exp(top_so_far - now);  // 0 at first
    top_so_far = now;
    if (scale != 1.f) {
        store(weight, load(weight) * scale);
        for (int64_t i = 0; i < size; i += W) store(values + i, load(values + i) * scale);
    }
    vf total = load(weight);
    UNROLL for (int v = 0; v < V; v++) {
        vf w = exp(weights[v] - now);
        total += w;
        if (value_scales) w *= load(value_scales + v * W);
        store(scores + v * W, w);
    }
    store(weight, total);
}

// Adds one chunk, which begins at position `start`, to the split's sums.
template <bool AHEAD, class T> static inline void attend_chunk(const Attend& op, const Step& step, const Piece& piece,
                                                               const Chunk<T>& chunk, const Chunk<T>& next, int64_t head, int64_t start,
                                                               Workspace& room) {
    const int64_t group_size = op.heads / op.kv_heads, vectors = piece.count * group_size, size = padded(op.value_dim);
    product<Keys, AHEAD, false>(vectors, chunk, next, 0, op.dim, chunk.first(), chunk.last(), room.queries, padded(op.dim), room.scores, CHUNK);
    for (int64_t i = 0; i < vectors; i++) {
        const int64_t position = piece.position + i / group_size - start;
        const Reach reach = reach_of(op.causal ? step.spans : nullptr, piece.token + i / group_size, position + start, op.window, op.chunk);
        const int64_t from = std::max(chunk.from, reach.begin - start);
        const int64_t to = op.causal ? std::min(chunk.to, reach.end - start) : op.window ? std::min(chunk.to, position + op.window) : chunk.to;
        const int64_t query_head = head * group_size + i % group_size;
        float* scores = room.scores + i * CHUNK;
        auto softmax = [&]<Added ADDED>(const float* added) {
            softmax_chunk<ADDED>(op, chunk.key_scales, chunk.value_scales, scores, room.split[size_t(i)].top, room.weights + i * W,
                                 room.split_sums + i * size, size, from, to, added, position);
        };
        if (from >= to) std::fill_n(scores, CHUNK, 0.f);
        else if (op.slopes) softmax.template operator()<ALIBI>(op.slopes + query_head);
        else if (op.biases) softmax.template operator()<BIASES>(op.biases + query_head * (2 * op.reach + 1));
        else softmax.template operator()<NOTHING>(nullptr);
    }
    product<Values, AHEAD, true>(vectors, chunk, next, chunk.from, chunk.to, 0, size / W, room.scores, CHUNK, room.split_sums, size);
}

// Computes one split of a piece into room.split and room.split_sums.
template <class T> static void attend_split(const Attend& op, const Step& step, const Piece& piece, int64_t head, int64_t low,
                                            int64_t high, Workspace& room) {
    const int64_t group_size = op.heads / op.kv_heads, vectors = piece.count * group_size, size = padded(op.value_dim);
    const bool whole = op.dim % W == 0 && step.block_tokens % W == 0 && !op.latent;
    std::fill_n(room.split.begin(), vectors, Sum{});
    std::fill_n(room.split_sums, vectors * size, 0.f);
    std::fill_n(room.weights, vectors * W, 0.f);
    auto end = [&](int64_t from) { return std::min(high, (from / CHUNK + 1) * CHUNK); };
    auto widened = [&] {
        for (int64_t at = low; at < high; at = end(at)) {
            Chunk<float> chunk = widen_chunk<T>(op, step, piece, head, at, end(at), room);
            find_scales<T>(op, step, piece, head, at, end(at), room, chunk);
            attend_chunk<false>(op, step, piece, chunk, chunk, head, at / CHUNK * CHUNK, room);
        }
    };
    if constexpr (is_packed<T>) {
        widened();
    } else if (whole && (vectors <= TILE || sizeof(T) == 4)) {
        Chunk<T> chunk = gather_chunk<T>(op, step, piece, head, low, end(low));
        for (int64_t at = low; at < high; at = end(at)) {
            const int64_t then = end(at);
            const Chunk<T> next = then < high ? gather_chunk<T>(op, step, piece, head, then, end(then)) : chunk;
            find_scales<T>(op, step, piece, head, at, then, room, chunk);
            if (vectors <= TILE) attend_chunk<true>(op, step, piece, chunk, next, head, at / CHUNK * CHUNK, room);
            else if constexpr (sizeof(T) == 4) attend_chunk<false>(op, step, piece, chunk, chunk, head, at / CHUNK * CHUNK, room);
            chunk = next;
        }
    } else {
        widened();
    }
    for (int64_t i = 0; i < vectors; i++) room.split[size_t(i)].weight = ::sum(load(room.weights + i * W));
}

// Adds the weight of a sink, which has no value.
static inline void finish(const Attend& op, int64_t head, const Sum& sum, const float* values, float* out) {
    float scale = 1.f / sum.weight;
    if (op.sinks) {
        const float top = std::max(sum.top, op.sinks[head]), kept = std::exp(sum.top - top);
        scale = kept / (sum.weight * kept + std::exp(op.sinks[head] - top));
    }
    for (int64_t i = 0; i < op.value_dim; i++) out[i] = values[i] * scale;
}

// Partial results: per partial and query head, its Sum, then its values.
static inline float* partial_of(const Attend& op, float* partials, int64_t partial, int64_t head) {
    return partials + (partial * op.heads + head) * (padded(op.value_dim) + W);
}

template <class T> static void attend_piece(const Attend& op, const Step& step, const Piece& piece, int64_t head,
                                            float* partials, Scratch& scratch) {
    const int64_t group_size = op.heads / op.kv_heads, vectors = piece.count * group_size, size = padded(op.value_dim);
    const int64_t key_size = padded(op.dim);
    Workspace room(scratch, vectors, key_size);
    for (int64_t i = 0; i < vectors; i++) {
        float* q = room.queries + i * key_size;
        std::memcpy(q, op.q + (piece.token + i / group_size) * op.q_stride + (head * group_size + i % group_size) * op.dim, sizeof(float) * size_t(op.dim));
        std::fill(q + op.dim, q + key_size, 0.f);
    }
    if (piece.partial >= 0) {
        attend_split<T>(op, step, piece, head, piece.begin, piece.end, room);
        for (int64_t i = 0; i < group_size; i++) {
            float* out = partial_of(op, partials, piece.partial, head * group_size + i);
            out[0] = room.split[size_t(i)].top;
            out[1] = room.split[size_t(i)].weight;
            std::memcpy(out + W, room.split_sums + i * size, sizeof(float) * size_t(size));
        }
        return;
    }
    std::fill_n(room.sums, vectors * size, 0.f);
    for (int64_t split = piece.begin / SPLIT; split * SPLIT < piece.end; split++) {
        attend_split<T>(op, step, piece, head, std::max(piece.begin, split * SPLIT), std::min(piece.end, (split + 1) * SPLIT), room);
        for (int64_t i = 0; i < vectors; i++)
            merge(room.whole[size_t(i)], room.sums + i * size, room.split[size_t(i)], room.split_sums + i * size, op.value_dim);
    }
    for (int64_t i = 0; i < vectors; i++)
        finish(op, head * group_size + i % group_size, room.whole[size_t(i)], room.sums + i * size,
               op.out + (piece.token + i / group_size) * op.out_stride + (head * group_size + i % group_size) * op.value_dim);
}

// Merges the splits of a row with one query.
static void merge_row(const Attend& op, const Schedule& schedule, int64_t token, float* partials, Scratch& scratch) {
    if (schedule.first_partial[size_t(token)] < 0) return;
    const int64_t size = padded(op.value_dim);
    float* values = at_least(scratch.attention, size_t(size));
    for (int64_t head = 0; head < op.heads; head++) {
        Sum sum;
        std::fill_n(values, size, 0.f);
        for (int64_t i = 0; i < schedule.partials[size_t(token)]; i++) {
            const float* partial = partial_of(op, partials, schedule.first_partial[size_t(token)] + i, head);
            merge(sum, values, Sum{partial[0], partial[1]}, partial + W, op.value_dim);
        }
        finish(op, head, sum, values, op.out + token * op.out_stride + head * op.value_dim);
    }
}

}  // namespace attention
