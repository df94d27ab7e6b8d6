// Runs a list of descriptors as one parallel region. Adjacent operations on rows run together, row by row, with one
// barrier after them. A linear first packs its rows (an operation on rows), then hands out tiles. The linears of
// experts do the same, with a common count of all their pieces.
#include "program.h"

#include <memory>
#include <system_error>

#include "attention.h"
#include "experts.h"
#include "linears.h"
#include "lora.h"
#include "recurrent.h"
#include "shm_collective.h"
#include "pool.h"
#include "rows.h"
#include "select.h"

namespace {

struct Runner {
    Runner(int threads, const int32_t* cpus) : team(threads, cpus), scratch(size_t(threads)), orders(size_t(threads)) {}
    Team team;
    std::vector<Scratch> scratch;
    std::vector<experts::Order> orders;
    std::vector<std::vector<int32_t>> counts = std::vector<std::vector<int32_t>>(scratch.size());  // of tokens, zeros
    std::vector<float> packed, partials;
    std::vector<attention::Schedule> schedules;
    std::vector<recurrent::Row> rows;  // with tokens, if the program has recurrent operations
    bool aborted = false;  // another rank is lost: all later results are invalid
};

bool recurs(const Op& op) {
    return op.kind == CAUSAL_CONV || op.kind == DELTA_RULE || op.kind == SELECTIVE_SCAN ||
           op.kind == RG_LRU;
}

const attention::Schedule& schedule_of(const attention::Kind& kind, const std::vector<attention::Schedule>& schedules) {
    size_t i = 0;
    while (schedules[i].kind != kind) i++;
    return schedules[i];
}

template <class T> const attention::Schedule& schedule_of(const T& op, const std::vector<attention::Schedule>& schedules) {
    return schedule_of(attention::kind_of(op), schedules);
}

const attention::Schedule& scheduled(const attention::Kind& kind, const Step& step, std::vector<attention::Schedule>& schedules) {
    for (auto& schedule : schedules)
        if (schedule.kind == kind) return schedule;
    return schedules.emplace_back(attention::schedule(step, kind));
}

// Maximum size of the packed rows of experts for any choice of experts. For each chosen expert, the last tile or panel
// may be incomplete, and its rows start at a cache line.
size_t packed_size(const Experts& op, int64_t tokens) {
    const int64_t pairs = tokens * op.k, taken = std::min(pairs, op.count);
    const size_t row = std::max(packed_size(op.linears[0], 16) / 16, packed_size(op.linears[0], MOST_ROWS4) / MOST_ROWS4) + 1;
    return row * size_t(pairs + pairs / 4 + 16 * taken) + 16 * size_t(taken);
}

// Floats of the packed rows of one head, which start at a cache line.
size_t packed_head(const Heads& op, int64_t tokens) { return (packed_size(op.linears[0], tokens) + 15) / 16 * 16; }

// Allocates everything that a region needs.
void prepare(Runner& runner, const Op* ops, int64_t count, const Step& step) {
    runner.schedules.clear();
    runner.rows.clear();
    size_t packed = 0, partials = 0;
    for (int64_t i = 0; i < count; i++) {
        if (ops[i].kind == LINEAR)
            packed = std::max(packed, packed_size(*static_cast<const Linear*>(ops[i].params), step.tokens));
        if (ops[i].kind == EXPERTS)
            packed = std::max(packed, packed_size(*static_cast<const Experts*>(ops[i].params), step.tokens));
        if (recurs(ops[i]) && runner.rows.empty()) runner.rows = recurrent::rows_of(step);
        if (ops[i].kind == HEADS) {
            const Heads& op = *static_cast<const Heads*>(ops[i].params);
            packed = std::max(packed, packed_head(op, step.tokens) * size_t(op.count));
        }
        if (ops[i].kind == SELECT) {
            const Select& op = *static_cast<const Select*>(ops[i].params);
            const int64_t total = scheduled(attention::kind_of(op), step, runner.schedules).total;
            partials = std::max(partials, size_t(total * attention::SPLIT));
        }
        if (ops[i].kind != ATTEND) continue;
        const Attend& op = *static_cast<const Attend*>(ops[i].params);
        const int64_t total = scheduled(attention::kind_of(op), step, runner.schedules).total;
        partials = std::max(partials, size_t(total * op.heads * (attention::padded(op.value_dim) + W)));
    }
    at_least(runner.packed, packed + 64);
    at_least(runner.partials, partials);
}

float* aligned(std::vector<float>& room) { return (float*)((uintptr_t(room.data()) + 63) / 64 * 64); }

// The linear of one expert over its own rows. Only y is set: x differs for every pair.
Linear of_expert(const Experts& op, int64_t expert, const experts::Order& order) {
    Linear linear = op.linears[expert];
    linear.y += order.begin[size_t(expert)] * linear.y_stride;
    return linear;
}

void pack_pairs(const Experts& op, int64_t token, float* packed, const experts::Order& order, Scratch& scratch) {
    for (int64_t place = token * op.k; place < (token + 1) * op.k; place++) {
        const int64_t expert = order.owner[size_t(place)], row = place - order.begin[size_t(expert)];
        if (expert >= op.count) continue;  // it computes nothing
        Linear linear = op.linears[expert];
        linear.x += (op.gathered ? order.pair[size_t(place)] / op.k : place) * linear.x_stride;
        linear.x_stride = 0;
        if (op.scales) {
            const float scale = op.scales[order.pair[size_t(place)]], *x = linear.x;
            float* scaled = at_least(scratch.scaled, size_t(linear.inputs));
            for (int64_t i = 0; i < linear.inputs; i++) scaled[i] = scale * x[i];
            linear.x = scaled;
        }
        pack(linear, row, order.rows(expert), packed + order.room[size_t(expert)], scratch);
    }
}

void pack_heads(const Heads& op, int64_t token, int64_t tokens, float* packed, Scratch& scratch) {
    const size_t room = packed_head(op, tokens);
    for (int64_t head = 0; head < op.count; head++) pack(op.linears[head], token, tokens, packed + size_t(head) * room, scratch);
}

void row_op(const Op& op, int64_t token, Runner& runner, const Step& step, Scratch& scratch, experts::Order& order) {
    switch (op.kind) {
        case EMBED: return embed_row(*static_cast<const Embed*>(op.params), token, step);
        case NORM: return norm_row(*static_cast<const Norm*>(op.params), token);
        case ADD: return add_row(*static_cast<const Add*>(op.params), token);
        case ACTIVATE: return activate_row(*static_cast<const Activate*>(op.params), token);
        case ROPE_KV: return rope_kv_row(*static_cast<const RopeKV*>(op.params), token, step);
        case LATENT_KV: return latent_kv_row(*static_cast<const LatentKV*>(op.params), token, step);
        case SCALE_QUERIES: return scale_queries_row(*static_cast<const ScaleQueries*>(op.params), token, step);
        case CAP: return cap_row(*static_cast<const Cap*>(op.params), token);
        case ATTEND: {
            const Attend& attend = *static_cast<const Attend*>(op.params);
            const attention::Schedule& schedule = schedule_of(attend, runner.schedules);
            return attention::merge_row(attend, schedule, token, runner.partials.data(), scratch);
        }
        case SELECT: {
            const Select& select = *static_cast<const Select*>(op.params);
            const attention::Schedule& schedule = schedule_of(select, runner.schedules);
            return selection::select_row(select, schedule, token, step, runner.partials.data(), scratch);
        }
        case LINEAR:
            return pack(*static_cast<const Linear*>(op.params), token, step.tokens, aligned(runner.packed), scratch);
        case HEADS:
            return pack_heads(*static_cast<const Heads*>(op.params), token, step.tokens, aligned(runner.packed), scratch);
        case ROUTE: return route_row(*static_cast<const Route*>(op.params), token, order);
        case EXPERTS:
            return pack_pairs(*static_cast<const Experts*>(op.params), token, aligned(runner.packed), order, scratch);
        case ALL_REDUCE: return reduce_row(*static_cast<const AllReduce*>(op.params), token);
        case COMBINE: return combine_row(*static_cast<const Combine*>(op.params), token, order);
        case GATED_NORM: return gated_norm_row(*static_cast<const GatedNorm*>(op.params), token);
        case LORA_SHRINK: return lora_shrink_row(*static_cast<const LoraShrink*>(op.params), token, step);
        case LORA_EXPAND: return lora_expand_row(*static_cast<const LoraExpand*>(op.params), token, step);
        case LORA_EXPERTS:
            return lora_experts_row(*static_cast<const LoraExperts*>(op.params), token, step, order, scratch);
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

// Pieces of all heads are handed out together.
void run_heads(const Heads& op, Runner& runner, const Step& step, Scratch& scratch) {
    const Linear& first = op.linears[0];
    const Pieces pieces = pieces_of(first, step.tokens, runner.team.size);
    const size_t room = packed_head(op, step.tokens);
    int64_t begin, end;
    take_tiles(first, step.tokens);
    while (runner.team.take(pieces.count * op.count, pieces.each, begin, end))
        while (begin < end) {
            const int64_t head = begin / pieces.count, at = begin % pieces.count;
            const int64_t count = std::min(end - begin, pieces.count - at);
            run_pieces(op.linears[head], step.tokens, aligned(runner.packed) + size_t(head) * room, at, at + count, scratch);
            begin += count;
        }
    release_tiles(first, step.tokens);
}

// Computes where the rows and the pieces of each expert begin in this linear.
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
    // Tiles of few rows are taken four at a time, see few_rows; larger portions would unbalance the threads.
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
    const attention::Schedule& schedule = schedule_of(op, runner.schedules);
    int64_t begin, end;
    // The last pieces of a long row read the most keys, so they start first.
    const int64_t pieces = int64_t(schedule.pieces.size()) * op.kv_heads;
    while (runner.team.take(pieces, 1, begin, end)) {
        const int64_t index = pieces - 1 - begin;
        attention::attend_piece<T>(op, step, schedule.pieces[size_t(index / op.kv_heads)], index % op.kv_heads,
                                   runner.partials.data(), scratch);
    }
}

template <class T> void run_select(const Select& op, Runner& runner, const Step& step, Scratch& scratch) {
    const attention::Schedule& schedule = schedule_of(op, runner.schedules);
    const int64_t pieces = int64_t(schedule.pieces.size());
    int64_t begin, end;
    while (runner.team.take(pieces, 1, begin, end))  // the last pieces of a row first, as in run_attention
        selection::score_piece<T>(op, step, schedule.pieces[size_t(pieces - 1 - begin)], runner.partials.data(), scratch);
}

// Writes this rank's rows to shared memory. A later operation on rows reads the rows of all ranks.
void run_all_reduce(const AllReduce& op, Runner& runner, const Step& step, int id) {
    const int64_t each = std::clamp<int64_t>(step.tokens / (runner.team.size * 4), 1, 16);
    int64_t begin, end;
    while (runner.team.take(step.tokens, each, begin, end))
        for (int64_t token = begin; token < end; token++) publish_row(op, token);
    runner.team.wait();
    if (id == 0 && !op.collective->synchronize()) runner.aborted = true;
    runner.team.wait();
}

template <class T> void run_recurrent(const T& op, Runner& runner, Scratch& scratch) {
    const int64_t rows = int64_t(runner.rows.size()), pieces = recurrent::pieces(op, rows, runner.team.size);
    int64_t begin, end;
    while (runner.team.take(rows * pieces, 1, begin, end))
        recurrent::run(op, runner.rows[size_t(begin / pieces)], begin % pieces, pieces, scratch);
    runner.team.wait();
}

// Operations that start with all rows at once and continue row by row.
bool opens(const Op& op) { return op.kind == ATTEND || op.kind == SELECT || op.kind == ALL_REDUCE || recurs(op); }
bool multiplies(const Op& op) { return op.kind == LINEAR || op.kind == EXPERTS || op.kind == HEADS; }
bool gathers(const Op& op) { return op.kind == EXPERTS && static_cast<const Experts*>(op.params)->gathered; }

void region(int id, Runner& runner, const Op* ops, int64_t count, const Step& step) {
    Scratch& scratch = runner.scratch[size_t(id)];
    experts::Order& order = runner.orders[size_t(id)];
    int64_t begin, end;
    for (int64_t first = 0; first < count;) {
        // Operations on rows up to and including the packing of the next linear; the merge of an attention comes first.
        // Rows that are gathered for experts are packed by other threads than computed them, so the packing waits for a
        // barrier, after which all choices are known.
        int64_t last = first;
        while (last < count && !multiplies(ops[last]) && (last == first || !opens(ops[last]))) last++;
        const bool packs = last < count && multiplies(ops[last]) && (last == first || !gathers(ops[last]));
        const bool attends = ops[first].kind == ATTEND;
        if (attends) {
            const Attend& op = *static_cast<const Attend*>(ops[first].params);
            if (step.page_type == F32) run_attention<float>(op, runner, step, scratch);
            else if (step.page_type == BF16) run_attention<bf16>(op, runner, step, scratch);
            else if (step.page_type == F16) run_attention<fp16>(op, runner, step, scratch);
            else if (step.page_type == I8) run_attention<int8_t>(op, runner, step, scratch);
            else run_attention<nibbles>(op, runner, step, scratch);
            runner.team.wait();
        }
        if (ops[first].kind == SELECT) {
            const Select& op = *static_cast<const Select*>(ops[first].params);
            if (step.page_type == F32) run_select<float>(op, runner, step, scratch);
            else if (step.page_type == BF16) run_select<bf16>(op, runner, step, scratch);
            else run_select<fp16>(op, runner, step, scratch);
            runner.team.wait();
        }
        if (ops[first].kind == ALL_REDUCE)
            run_all_reduce(*static_cast<const AllReduce*>(ops[first].params), runner, step, id);
        if (ops[first].kind == CAUSAL_CONV)
            run_recurrent(*static_cast<const CausalConv*>(ops[first].params), runner, scratch);
        if (ops[first].kind == DELTA_RULE)
            run_recurrent(*static_cast<const DeltaRule*>(ops[first].params), runner, scratch);
        if (ops[first].kind == SELECTIVE_SCAN)
            run_recurrent(*static_cast<const SelectiveScan*>(ops[first].params), runner, scratch);
        if (ops[first].kind == RG_LRU)
            run_recurrent(*static_cast<const RgLru*>(ops[first].params), runner, scratch);
        if (recurs(ops[first]) && last == first + 1 && !packs) {  // another such operation follows
            first = last;
            continue;
        }
        if (packs && ops[last].kind == EXPERTS)
            lay_out(*static_cast<const Experts*>(ops[last].params), order, runner.team.size);
        const int64_t each = std::clamp<int64_t>(step.tokens / (runner.team.size * 4), 1, 16);
        while (runner.team.take(step.tokens, each, begin, end))
            for (int64_t token = begin; token < end; token++)
                for (int64_t i = first; i < last + packs; i++) row_op(ops[i], token, runner, step, scratch, order);
        runner.team.wait();
        for (int64_t i = first; i < last; i++)
            if (ops[i].kind == ROUTE) order.sort(*static_cast<const Route*>(ops[i].params), step.tokens);
        if (packs) {
            if (ops[last].kind == LINEAR)
                run_linear(*static_cast<const Linear*>(ops[last].params), runner, step, scratch);
            else if (ops[last].kind == HEADS)
                run_heads(*static_cast<const Heads*>(ops[last].params), runner, step, scratch);
            else
                run_experts(*static_cast<const Experts*>(ops[last].params), runner, order, scratch);
            runner.team.wait();
        }
        first = last + packs;
    }
}

}  // namespace

extern "C" {

// Sizes of the structures, which Python compares with its own, and their number.
int64_t slipway_sizes(int64_t* sizes, int64_t room) {
    const int64_t found[] = {sizeof(Embed), sizeof(Norm), sizeof(Add), sizeof(Activate), sizeof(RopeKV), sizeof(Linear),
                             sizeof(Attend), sizeof(Cap), sizeof(Route), sizeof(Experts), sizeof(Combine), sizeof(AllReduce),
                             sizeof(CausalConv), sizeof(DeltaRule), sizeof(SelectiveScan), sizeof(GatedNorm),
                             sizeof(LatentKV), sizeof(Heads), sizeof(ScaleQueries),
                             sizeof(LoraShrink), sizeof(LoraExpand), sizeof(RgLru), sizeof(LoraPiece), sizeof(LoraExperts),
                             sizeof(Select), sizeof(Op), sizeof(Angles), sizeof(Group), sizeof(Step)};
    const int64_t count = sizeof(found) / sizeof(found[0]);
    for (int64_t i = 0; i < std::min(count, room); i++) sizes[i] = found[i];
    return count;
}

// Tiling of weights: floats of a vector, inputs of a word of 8-bit weights and of 4-bit weights.
void slipway_tiling(int64_t* width, int64_t* word8, int64_t* word4) {
    *width = W;
    *word8 = WORD8;
    *word4 = WORD4;
}

// Requests permission to use matrix tiles from the operating system, and returns whether they can be used.
int slipway_has_amx() {
#ifdef __AMX_BF16__
    return amx::permitted();
#else
    return 0;
#endif
}

// cpus: one for each thread, or null. All threads but the first are pinned here. Returns null if threads cannot start.
void* slipway_start(int threads, const int32_t* cpus) {
    try {
        return new Runner(threads, cpus);
    } catch (const std::system_error&) {
        return nullptr;
    }
}
void slipway_stop(void* runner) { delete static_cast<Runner*>(runner); }

// Runs the operations, in order, on all tokens of the step. One call at a time for each runner. Returns 1 if another
// rank of the model is lost, else 0.
int64_t slipway_run(void* runner, const Op* ops, int64_t count, const Step* step) {
    if (step->tokens == 0) return 0;
    Runner& it = *static_cast<Runner*>(runner);
    prepare(it, ops, count, *step);
    auto work = [&](int id) { region(id, it, ops, count, *step); };
    it.team.run(work);
    return it.aborted;
}

}  // extern "C"

#include "logits.h"
