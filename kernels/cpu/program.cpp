// Runs a list of descriptors as one parallel region. Neighbouring operations on rows go together, row by row, with one
// barrier after them; a linear first packs its rows (an operation on rows), then hands out tiles. The linears of experts
// do the same, with the pieces of all of them counted as one.
#include "program.h"

#include <memory>
#include <system_error>

#include "attention.h"
#include "cut.h"
#include "draw.h"
#include "edits.h"
#include "experts.h"
#include "linears.h"
#include "pool.h"
#include "rows.h"
#include "scores.h"

namespace {

struct Runner {
    Runner(int threads, const int32_t* cpus) : team(threads, cpus), scratch(size_t(threads)), orders(size_t(threads)) {}
    Team team;
    std::vector<Scratch> scratch;
    std::vector<experts::Order> orders;
    std::vector<std::vector<int32_t>> counts = std::vector<std::vector<int32_t>>(scratch.size());  // of tokens, zeros
    std::vector<float> packed, partials;
    std::vector<attention::Plan> plans;
};

const attention::Plan& plan_of(const Attend& op, const std::vector<attention::Plan>& plans) {
    size_t i = 0;
    while (plans[i].window != op.window || plans[i].share != op.heads / op.kv_heads) i++;
    return plans[i];
}

// The most that rows of experts take packed, however the tokens choose. Of each expert that somebody took, the last tile
// may lack rows, or each panel one; and it starts at a whole line.
size_t packed_size(const Experts& op, int64_t tokens) {
    const int64_t pairs = tokens * op.k, taken = std::min(pairs, op.count);
    const size_t row = std::max(packed_size(op.linears[0], 16) / 16, packed_size(op.linears[0], MOST_ROWS4) / MOST_ROWS4) + 1;
    return row * size_t(pairs + pairs / 4 + 16 * taken) + 16 * size_t(taken);
}

// What a region needs is made before it starts.
void prepare(Runner& runner, const Op* ops, int64_t count, const Step& step) {
    runner.plans.clear();
    size_t packed = 0, partials = 0;
    for (int64_t i = 0; i < count; i++) {
        if (ops[i].kind == LINEAR) packed = std::max(packed, packed_size(*static_cast<const Linear*>(ops[i].what), step.tokens));
        if (ops[i].kind == EXPERTS) packed = std::max(packed, packed_size(*static_cast<const Experts*>(ops[i].what), step.tokens));
        if (ops[i].kind != ATTEND) continue;
        const Attend& op = *static_cast<const Attend*>(ops[i].what);
        const int64_t share = op.heads / op.kv_heads;
        bool known = false;
        for (auto& plan : runner.plans) known = known || (plan.window == op.window && plan.share == share);
        if (!known) runner.plans.push_back(attention::plan(step, op.window, share));
        partials = std::max(partials, size_t(plan_of(op, runner.plans).total * op.heads * (attention::padded(op.dim) + W)));
    }
    at_least(runner.packed, packed + 64);
    at_least(runner.partials, partials);
}

float* aligned(std::vector<float>& room) { return (float*)((uintptr_t(room.data()) + 63) / 64 * 64); }

// The linear of one expert over its own rows. y only: x is another row for every pair.
Linear of_expert(const Experts& op, int64_t expert, const experts::Order& order) {
    Linear linear = op.linears[expert];
    linear.y += order.begin[size_t(expert)] * linear.y_stride;
    return linear;
}

void pack_pairs(const Experts& op, int64_t token, float* packed, const experts::Order& order, Scratch& scratch) {
    for (int64_t place = token * op.k; place < (token + 1) * op.k; place++) {
        const int64_t expert = order.owner[size_t(place)], row = place - order.begin[size_t(expert)];
        Linear linear = op.linears[expert];
        linear.x += (op.gathered ? order.pair[size_t(place)] / op.k : place) * linear.x_stride;
        linear.x_stride = 0;
        pack(linear, row, order.rows(expert), packed + order.room[size_t(expert)], scratch);
    }
}

void row_op(const Op& op, int64_t token, Runner& runner, const Step& step, Scratch& scratch, const experts::Order& order) {
    switch (op.kind) {
        case EMBED: return embed_row(*static_cast<const Embed*>(op.what), token, step);
        case NORM: return norm_row(*static_cast<const Norm*>(op.what), token);
        case ADD: return add_row(*static_cast<const Add*>(op.what), token);
        case ACTIVATE: return activate_row(*static_cast<const Activate*>(op.what), token);
        case HEADS: return heads_row(*static_cast<const Heads*>(op.what), token, step);
        case CAP: return cap_row(*static_cast<const Cap*>(op.what), token);
        case ATTEND: {
            const Attend& attend = *static_cast<const Attend*>(op.what);
            return attention::join_row(attend, plan_of(attend, runner.plans), token, runner.partials.data(), scratch);
        }
        case LINEAR: return pack(*static_cast<const Linear*>(op.what), token, step.tokens, aligned(runner.packed), scratch);
        case ROUTE: return route_row(*static_cast<const Route*>(op.what), token);
        case EXPERTS: return pack_pairs(*static_cast<const Experts*>(op.what), token, aligned(runner.packed), order, scratch);
        case COMBINE: return combine_row(*static_cast<const Combine*>(op.what), token, order);
        default: return;
    }
}

void run_linear(const Linear& op, Runner& runner, const Step& step, Scratch& scratch) {
    const Pieces pieces = pieces_of(op, step.tokens, runner.team.size);
    int64_t begin, end;
    take_tiles(op, step.tokens);
    while (runner.team.take(pieces.count, pieces.each, begin, end))
        run_pieces(op, step.tokens, aligned(runner.packed), begin, end, scratch);
    release_tiles(op, step.tokens);
}

// Where the rows and the pieces of each expert begin in this linear.
void lay_out(const Experts& op, experts::Order& order, int64_t threads) {
    order.pieces.assign(1, 0), order.room.assign(1, 0);
    for (int64_t e = 0; e < op.count; e++) {
        const int64_t rows = order.rows(e);
        const int64_t room = rows ? int64_t(packed_size(op.linears[0], rows) + 15) / 16 * 16 : 0;
        order.room.push_back(order.room.back() + room);
        order.pieces.push_back(order.pieces.back() + (rows ? pieces_of(op.linears[0], rows, threads).count : 0));
    }
}

void run_experts(const Experts& op, Runner& runner, const experts::Order& order, Scratch& scratch) {
    const int64_t pieces = order.pieces.back();
    // Tiles of few rows go by fours, see few_rows; more at once would leave the last thread too much.
    const int64_t each = std::clamp<int64_t>(pieces / (runner.team.size * 8) / 4 * 4, 1, 8);
    int64_t expert = 0, begin, end;
    while (runner.team.take(pieces, each, begin, end))
        while (begin < end) {
            while (order.pieces[size_t(expert) + 1] <= begin) expert++;
            const int64_t first = order.pieces[size_t(expert)], last = std::min(end, order.pieces[size_t(expert) + 1]);
            const Linear linear = of_expert(op, expert, order);
            take_tiles(linear, order.rows(expert));
            run_pieces(linear, order.rows(expert), aligned(runner.packed) + order.room[size_t(expert)], begin - first,
                       last - first, scratch);
            release_tiles(linear, order.rows(expert));
            begin = last;
        }
}

template <class T> void run_attention(const Attend& op, Runner& runner, const Step& step, Scratch& scratch) {
    const attention::Plan& plan = plan_of(op, runner.plans);
    int64_t begin, end;
    // The last pieces of a long row read most: they go first.
    const int64_t pieces = int64_t(plan.pieces.size()) * op.kv_heads;
    while (runner.team.take(pieces, 1, begin, end)) {
        const int64_t index = pieces - 1 - begin;
        attention::attend_piece<T>(op, step, plan.pieces[size_t(index / op.kv_heads)], index % op.kv_heads,
                                   runner.partials.data(), scratch);
    }
}

bool multiplies(const Op& op) { return op.kind == LINEAR || op.kind == EXPERTS; }
bool gathers(const Op& op) { return op.kind == EXPERTS && static_cast<const Experts*>(op.what)->gathered; }

void region(int id, Runner& runner, const Op* ops, int64_t count, const Step& step) {
    Scratch& scratch = runner.scratch[size_t(id)];
    experts::Order& order = runner.orders[size_t(id)];
    int64_t begin, end;
    for (int64_t first = 0; first < count;) {
        // Operations on rows up to and with the packing of the next linear; the joining of an attention comes first. What
        // is gathered for experts is packed by other threads than made it: after a barrier, with all rows' choices known.
        int64_t last = first;
        while (last < count && !multiplies(ops[last]) && (last == first || ops[last].kind != ATTEND)) last++;
        const bool packs = last < count && multiplies(ops[last]) && (last == first || !gathers(ops[last]));
        const bool attends = ops[first].kind == ATTEND;
        if (attends) {
            const Attend& op = *static_cast<const Attend*>(ops[first].what);
            if (step.page_type == F32) run_attention<float>(op, runner, step, scratch);
            else if (step.page_type == BF16) run_attention<bf16>(op, runner, step, scratch);
            else if (step.page_type == F16) run_attention<fp16>(op, runner, step, scratch);
            else run_attention<int8_t>(op, runner, step, scratch);
            runner.team.wait();
        }
        if (packs && ops[last].kind == EXPERTS) lay_out(*static_cast<const Experts*>(ops[last].what), order, runner.team.size);
        const int64_t each = std::clamp<int64_t>(step.tokens / (runner.team.size * 4), 1, 16);
        while (runner.team.take(step.tokens, each, begin, end))
            for (int64_t token = begin; token < end; token++)
                for (int64_t i = first; i < last + packs; i++) row_op(ops[i], token, runner, step, scratch, order);
        runner.team.wait();
        for (int64_t i = first; i < last; i++)
            if (ops[i].kind == ROUTE) order.sort(*static_cast<const Route*>(ops[i].what), step.tokens);
        if (packs) {
            if (ops[last].kind == LINEAR) run_linear(*static_cast<const Linear*>(ops[last].what), runner, step, scratch);
            else run_experts(*static_cast<const Experts*>(ops[last].what), runner, order, scratch);
            runner.team.wait();
        }
        first = last + packs;
    }
}

// work(row, id) for each row, id being that of the thread; without waking the team for one row.
template <class Work> void each_row(Runner& runner, int64_t count, Work work) {
    if (count == 1) return work(0, 0);
    auto all = [&](int id) {
        int64_t begin, end;
        while (runner.team.take(count, 1, begin, end)) work(begin, id);
    };
    if (count) runner.team.run(all);
}

}  // namespace

extern "C" {

// Sizes of the structures, for the other side to compare; their number.
int64_t slipway_sizes(int64_t* sizes, int64_t room) {
    const int64_t found[] = {sizeof(Embed), sizeof(Norm), sizeof(Add), sizeof(Activate), sizeof(Heads), sizeof(Linear),
                             sizeof(Attend), sizeof(Cap), sizeof(Route), sizeof(Experts), sizeof(Combine), sizeof(Op),
                             sizeof(Angles), sizeof(Group), sizeof(Step)};
    const int64_t count = sizeof(found) / sizeof(found[0]);
    for (int64_t i = 0; i < std::min(count, room); i++) sizes[i] = found[i];
    return count;
}

// How weights are tiled: floats of a vector, inputs of a word of 8-bit weights, and of 4-bit weights.
void slipway_tiling(int64_t* width, int64_t* word8, int64_t* word4) {
    *width = W;
    *word8 = WORD8;
    *word4 = WORD4;
}

// Whether matrix tiles can be used here; asks the kernel for them.
int slipway_has_amx() {
#ifdef __AMX_BF16__
    return amx::permitted();
#else
    return 0;
#endif
}

// cpus: one for each thread, of which all but the first are pinned here, or null. Null if the system has no more threads.
void* slipway_start(int threads, const int32_t* cpus) {
    try {
        return new Runner(threads, cpus);
    } catch (const std::system_error&) {
        return nullptr;
    }
}
void slipway_stop(void* runner) { delete static_cast<Runner*>(runner); }

// Runs the operations, in order, on all tokens of the step. One call at a time for each runner.
void slipway_run(void* runner, const Op* ops, int64_t count, const Step* step) {
    if (step->tokens == 0) return;
    Runner& it = *static_cast<Runner*>(runner);
    prepare(it, ops, count, *step);
    auto work = [&](int id) { region(id, it, ops, count, *step); };
    it.team.run(work);
}

// The best token of each of these rows of logits, [.., vocab], and its score. keys: two words a row, or null for none.
void slipway_draw(void* runner, const float* logits, int64_t vocab, const int64_t* rows, int64_t count,
                  const uint32_t* keys, int64_t* tokens, float* scores) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        const draw::Best found = draw::best(logits + rows[i] * vocab, vocab, keys ? keys + 2 * i : nullptr);
        tokens[i] = found.token;
        scores[i] = found.score;
    });
}

// The same among the tokens that the cuts leave, with noise, and where they end. top_k, top_p, drop: [count], see cut.h.
void slipway_draw_cut(void* runner, const float* logits, int64_t vocab, const int64_t* rows, int64_t count,
                      const uint32_t* keys, const int64_t* top_k, const double* top_p, const double* drop,
                      int64_t* tokens, float* scores, float* floors, int64_t* lasts) {
    Runner& it = *static_cast<Runner*>(runner);
    std::vector<cut::Scratch> scratch(size_t(it.team.size));
    each_row(it, count, [&](int64_t i, int id) {
        const cut::Cuts cuts{top_k[i], top_p[i], drop[i]};
        cut::Border border;
        const draw::Best found =
            cut::drawn(logits + rows[i] * vocab, vocab, keys + 2 * i, cuts, scratch[size_t(id)], border);
        tokens[i] = found.token;
        scores[i] = found.score;
        floors[i] = border.floor;
        lasts[i] = border.last;
    });
}

// Of rows `at` of [.., vocab] the log probability and rank of one token, and the `count` most likely ones: [rows, count].
// Of a row's logits / divisor only those within the border are possible; divisors null: all, as they are.
void slipway_scores(void* runner, const float* logits, int64_t stride, int64_t vocab, const int64_t* at, int64_t rows,
                    const int64_t* chosen, int64_t count, const float* divisors, const float* floors,
                    const int64_t* lasts, float* logprobs, int64_t* ranks, int64_t* tokens, float* values) {
    Runner& it = *static_cast<Runner*>(runner);
    std::vector<std::vector<float>> left(size_t(it.team.size));
    each_row(it, rows, [&](int64_t i, int id) {
        const float* row = logits + at[i] * stride;
        if (divisors) {
            auto& own = left[size_t(id)];
            own.resize(size_t(vocab));
            for (int64_t token = 0; token < vocab; token++) {
                const float x = row[token] / divisors[i];
                own[size_t(token)] = x > floors[i] || (x == floors[i] && token <= lasts[i]) || x != x ? x : -INFINITY;
            }
            row = own.data();
        }
        const scores::Found found = scores::row(row, vocab, chosen[i], count, tokens + i * count, values + i * count);
        logprobs[i] = found.logprob;
        ranks[i] = found.rank;
    });
}

// The edits of edits.h. logits: rows of `vocab`, `stride` apart; rows: those that are edited, all different.

void slipway_mask(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                  const uint32_t* words, int64_t words_stride) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        edits::mask(logits + rows[i] * stride, vocab, words + i * words_stride);
    });
}

void slipway_bar(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                 const int32_t* stops, int64_t most, int64_t stops_stride) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        edits::bar(logits + rows[i] * stride, vocab, stops + i * stops_stride, most);
    });
}

void slipway_divide(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                    const float* divisors) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        edits::divide(logits + rows[i] * stride, vocab, divisors[i]);
    });
}

// logits[rows[i], ids[i]] += values[i], in order.
void slipway_bias(void*, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                  const int32_t* ids, const float* values) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] >= 0 && ids[i] < vocab) logits[rows[i] * stride + ids[i]] += values[i];
}

// slots, lengths: of each row; prompts and strengths: of each slot, as lines of `tokens`.
void slipway_penalise(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                      const int32_t* slots, const int32_t* lengths, const int32_t* tokens, int64_t tokens_stride,
                      const int32_t* prompts, const float* repetition, const float* frequency, const float* presence) {
    Runner& it = *static_cast<Runner*>(runner);
    each_row(it, count, [&](int64_t i, int id) {
        auto& counts = it.counts[size_t(id)];
        if (int64_t(counts.size()) < vocab) counts.assign(size_t(vocab), 0);
        const int64_t row = rows[i], slot = slots[row];
        edits::penalise(logits + row * stride, vocab, tokens + slot * tokens_stride, lengths[row], prompts[slot],
                        {repetition[slot], frequency[slot], presence[slot]}, counts.data());
    });
}

// Of each word its row, its last token, and the others: [count, longest], -1 in front.
void slipway_ban(void*, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                 const int32_t* slots, const int32_t* lengths, const int32_t* tokens, int64_t tokens_stride,
                 const int32_t* prompts, const int32_t* lasts, const int32_t* prefixes, int64_t longest) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows[i], slot = slots[row];
        if (lasts[i] < 0 || lasts[i] >= vocab) continue;
        if (edits::ends_with(tokens + slot * tokens_stride, lengths[row], prompts[slot], prefixes + i * longest, longest))
            logits[row * stride + lasts[i]] = -INFINITY;
    }
}

}  // extern "C"
