// Attention of ragged rows over paged keys and values: softmax(scale · q kᵀ + mask) v.
//
// A piece of work is a run of a row's queries × one KV head, with all query heads that share it: keys and values are read
// once for all of them. Keys come in chunks of CHUNK positions, chunks in splits of SPLIT; both lie at multiples of their
// sizes, so what is added up in which order depends on a query's position and window alone. A row with one query gives its
// splits to several threads and puts their results together afterwards, in order, as the others do on the way.
#pragma once

#include <limits>

#include "linear.h"
#include "rows.h"

namespace attention {

constexpr int64_t CHUNK = 64, SPLIT = 512, RUN_VECTORS = 64;

struct Piece {
    int64_t token, count, position, row, begin, end, partial;  // keys [begin, end); partial -1: the piece is the whole
};

struct Plan {  // pieces of a step for one window and one number of query heads to a KV head
    int64_t window, share;
    std::vector<Piece> pieces;
    std::vector<int64_t> first_partial, partials;  // per token: -1 where its piece is the whole
    int64_t total = 0;
};

static Plan plan(const Step& step, int64_t window, int64_t share) {
    Plan made{window, share, {}, std::vector<int64_t>(size_t(step.tokens), -1), std::vector<int64_t>(size_t(step.tokens), 0)};
    const int64_t run = std::max<int64_t>(1, RUN_VECTORS / share);
    int64_t token = 0;
    for (int64_t row = 0; row < step.rows; row++) {
        for (int64_t at = 0; at < step.count[row]; at += run) {
            const int64_t count = std::min(run, step.count[row] - at), position = step.first[row] + at;
            const int64_t begin = window ? std::max<int64_t>(0, position - window + 1) : 0, end = position + count;
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

// Of one query head: the largest score, the sum of e^(score - largest), and the weighted values.
struct Sum {
    float top = -std::numeric_limits<float>::infinity(), weight = 0;
};

// result = result and more, both relative to their own largest score.
static inline void join(Sum& sum, float* values, const Sum& more, const float* more_values, int64_t dim) {
    if (more.weight == 0) return;
    const float top = std::max(sum.top, more.top);
    const float old_scale = sum.weight == 0 ? 0.f : std::exp(sum.top - top), new_scale = std::exp(more.top - top);
    sum = {top, sum.weight * old_scale + more.weight * new_scale};
    for (int64_t i = 0; i < dim; i += W)
        store(values + i, load(values + i) * old_scale + load(more_values + i) * new_scale);
}

// c[m][n] (+)= a[m][k] · b[k][n]; n a multiple of W; b's rows are given by their addresses or a stride.
template <int R, class Row>
static inline void product_rows(int64_t depth, int64_t width, const float* a, int64_t a_row, Row b, float* c, int64_t c_row,
                                bool more) {
    auto columns = [&]<int V>(int64_t n) {
        vf acc[R][V];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) acc[r][v] = more ? load(c + r * c_row + n + v * W) : vf{};
        for (int64_t k = 0; k < depth; k++) {
            const float* row = b(k) + n;
            vf w[V];
            UNROLL for (int v = 0; v < V; v++) w[v] = load(row + v * W);
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < V; v++) acc[r][v] += a[r * a_row + k] * w[v];
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) store(c + r * c_row + n + v * W, acc[r][v]);
    };
    int64_t n = 0;
    for (; n + 2 * W <= width; n += 2 * W) columns.template operator()<2>(n);
    if (n < width) columns.template operator()<1>(n);
}

template <class Row>
static inline void product(int64_t rows, int64_t depth, int64_t width, const float* a, int64_t a_row, Row b, float* c,
                           int64_t c_row, bool more) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) product_rows<4>(depth, width, a + r * a_row, a_row, b, c + r * c_row, c_row, more);
    for (; r < rows; r++) product_rows<1>(depth, width, a + r * a_row, a_row, b, c + r * c_row, c_row, more);
}

static inline int64_t padded(int64_t dim) { return (dim + W - 1) / W * W; }

// columns[d][j] = rows[j][d], in squares of W × W
static inline void transpose(const float* const* rows, int64_t size, float* columns) {
    for (int64_t j = 0; j < CHUNK; j += W)
        for (int64_t d = 0; d < size; d += W) {
            vf square[W];
            for (int i = 0; i < W; i++) square[i] = load(rows[j + i] + d);
            // Pairs, then fours …: each pass swaps the off-diagonal halves of squares of twice the size.
            for (int half = 1; half < W; half *= 2)
                for (int i = 0; i < W; i++) {
                    if (i & half) continue;
                    vi low, high;
                    for (int lane = 0; lane < W; lane++) {
                        low[lane] = lane & half ? W + lane - half : lane;
                        high[lane] = lane & half ? W + lane : lane + half;
                    }
                    vf a = square[i], b = square[i + half];
                    square[i] = __builtin_shuffle(a, b, low);
                    square[i + half] = __builtin_shuffle(a, b, high);
                }
            for (int i = 0; i < W; i++) store(columns + (d + i) * CHUNK + j, square[i]);
        }
}

struct Room {  // one thread's working memory for a piece
    float *queries, *keys, *columns, *values, *scores, *sums, *split_sums, *zeros;
    const float *key_rows[CHUNK], *value_rows[CHUNK];
    std::vector<Sum> whole, split;
    Room(Scratch& scratch, int64_t vectors, int64_t size) : whole(size_t(vectors)), split(size_t(vectors)) {
        const int64_t chunk = CHUNK * size, all = vectors * size;
        float* at = at_least(scratch.attention, size_t(3 * chunk + 3 * all + vectors * CHUNK + size));
        for (float** part : {&keys, &columns, &values}) { *part = at; at += chunk; }
        for (float** part : {&queries, &sums, &split_sums}) { *part = at; at += all; }
        scores = at;
        zeros = at + vectors * CHUNK;
        std::fill_n(zeros, size, 0.f);
    }
};

// rows[j]: key or value of position start + j, of `size` floats: in its page where that is float and whole vectors, else
// widened into `room`. Positions outside [low, high) are zeros. The chunk after this one is called from memory.
template <class T> static void fetch(const Attend& op, const Step& step, const Piece& piece, int64_t head, int64_t value,
                                     int64_t low, int64_t high, const Room& room, float* wide, const float** rows, int64_t size) {
    const int64_t* table = step.groups[op.group].table + piece.row * step.table_width;
    const int64_t start = low / CHUNK * CHUNK, tokens = step.block_tokens, stride = step.page_kv_heads * step.page_dim;
    for (int64_t j = 0; j < CHUNK; j++) rows[j] = room.zeros;
    for (int64_t at = low; at < high;) {
        const int64_t end = std::min(high, (at / tokens + 1) * tokens);
        const T* page = page_of<T>(step, table[at / tokens], op.layer, value, at % tokens, head);
        for (; at < end; at++, page += stride) {
            if (sizeof(T) == 4 && op.dim == size) { rows[at - start] = (const float*)page; continue; }
            float* out = wide + (at - start) * size;
            int64_t i = 0;
            for (; i + W <= op.dim; i += W) store(out + i, load(page + i));
            for (; i < op.dim; i++) out[i] = widen(page[i]);
            for (; i < size; i++) out[i] = 0;
            rows[at - start] = out;
        }
    }
    for (int64_t at = start + CHUNK; at < std::min(start + 2 * CHUNK, piece.end); at++) {
        const char* page = (const char*)page_of<T>(step, table[at / tokens], op.layer, value, at % tokens, head);
        for (int64_t line = 0; line < op.dim * int64_t(sizeof(T)); line += 64) __builtin_prefetch(page + line);
    }
}

// Scores of one chunk into weights, in place, and the sums scaled to the new largest score.
static inline void soften(const Attend& op, float* scores, Sum& sum, float* values, int64_t size, int64_t from, int64_t to) {
    // Positions [from, to) of the chunk are read.
    constexpr int V = CHUNK / W;
    vf weights[V], top = splat(-std::numeric_limits<float>::infinity());
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    UNROLL for (int v = 0; v < V; v++) {
        vf x = load(scores + v * W) * op.scale;
        if (op.softcap != 0) x = tanh(x / op.softcap) * op.softcap;
        vi at = lane + v * W;
        x = (at < int32_t(from)) | (at >= int32_t(to)) ? splat(-std::numeric_limits<float>::infinity()) : x;
        weights[v] = x;
        top = larger(top, x);
    }
    const float now = std::max(sum.top, largest(top));
    vf total = {};
    UNROLL for (int v = 0; v < V; v++) {
        vf w = exp(weights[v] - now);
        store(scores + v * W, w);
        total += w;
    }
    const float scale = sum.weight == 0 ? 0.f : std::exp(sum.top - now);
    sum = {now, sum.weight * scale + ::sum(total)};
    if (scale != 1.f)
        for (int64_t i = 0; i < size; i += W) store(values + i, load(values + i) * scale);
}

// One split of a piece: room.split and room.split_sums become its sums.
template <class T> static void attend_split(const Attend& op, const Step& step, const Piece& piece, int64_t head, int64_t low,
                                            int64_t high, Room& room) {
    const int64_t share = op.heads / op.kv_heads, vectors = piece.count * share, size = padded(op.dim);
    std::fill_n(room.split.begin(), vectors, Sum{});
    std::fill_n(room.split_sums, vectors * size, 0.f);
    for (int64_t start = low / CHUNK * CHUNK; start < high; start += CHUNK) {
        const int64_t from = std::max(low, start), to = std::min(high, start + CHUNK);
        fetch<T>(op, step, piece, head, 0, from, to, room, room.keys, room.key_rows, size);
        transpose(room.key_rows, size, room.columns);
        fetch<T>(op, step, piece, head, 1, from, to, room, room.values, room.value_rows, size);
        product(vectors, size, CHUNK, room.queries, size, [&](int64_t d) { return room.columns + d * CHUNK; }, room.scores,
                CHUNK, false);
        for (int64_t i = 0; i < vectors; i++) {
            const int64_t position = piece.position + i / share;
            const int64_t first = op.window ? std::max(from, position - op.window + 1) : from, last = std::min(to, position + 1);
            if (first >= last) std::fill_n(room.scores + i * CHUNK, CHUNK, 0.f);
            else soften(op, room.scores + i * CHUNK, room.split[size_t(i)], room.split_sums + i * size, size, first - start, last - start);
        }
        product(vectors, CHUNK, size, room.scores, CHUNK, [&](int64_t j) { return room.value_rows[j]; }, room.split_sums,
                size, true);
    }
}

static inline void finish(const Attend& op, const Sum& sum, const float* values, float* out) {
    const float scale = 1.f / sum.weight;
    for (int64_t i = 0; i < op.dim; i++) out[i] = values[i] * scale;
}

// Partial results: per partial and query head, its Sum, then its values.
static inline float* partial_of(const Attend& op, float* partials, int64_t partial, int64_t head) {
    return partials + (partial * op.heads + head) * (padded(op.dim) + W);
}

template <class T> static void attend_piece(const Attend& op, const Step& step, const Piece& piece, int64_t head,
                                            float* partials, Scratch& scratch) {
    const int64_t share = op.heads / op.kv_heads, vectors = piece.count * share, size = padded(op.dim);
    Room room(scratch, vectors, size);
    for (int64_t i = 0; i < vectors; i++) {
        float* q = room.queries + i * size;
        std::memcpy(q, op.q + (piece.token + i / share) * op.q_stride + (head * share + i % share) * op.dim, sizeof(float) * size_t(op.dim));
        std::fill(q + op.dim, q + size, 0.f);
    }
    if (piece.partial >= 0) {
        attend_split<T>(op, step, piece, head, piece.begin, piece.end, room);
        for (int64_t i = 0; i < share; i++) {
            float* out = partial_of(op, partials, piece.partial, head * share + i);
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
            join(room.whole[size_t(i)], room.sums + i * size, room.split[size_t(i)], room.split_sums + i * size, op.dim);
    }
    for (int64_t i = 0; i < vectors; i++)
        finish(op, room.whole[size_t(i)], room.sums + i * size,
               op.out + (piece.token + i / share) * op.out_stride + (head * share + i % share) * op.dim);
}

// Puts the splits of a row with one query together.
static void join_row(const Attend& op, const Plan& plan, int64_t token, float* partials, Scratch& scratch) {
    if (plan.first_partial[size_t(token)] < 0) return;
    const int64_t size = padded(op.dim);
    float* values = at_least(scratch.attention, size_t(size));
    for (int64_t head = 0; head < op.heads; head++) {
        Sum sum;
        std::fill_n(values, size, 0.f);
        for (int64_t i = 0; i < plan.partials[size_t(token)]; i++) {
            const float* partial = partial_of(op, partials, plan.first_partial[size_t(token)] + i, head);
            join(sum, values, Sum{partial[0], partial[1]}, partial + W, op.dim);
        }
        finish(op, sum, values, op.out + token * op.out_stride + head * op.dim);
    }
}

}  // namespace attention
