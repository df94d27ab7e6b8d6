// Runs a list of descriptors as one parallel region. Neighbouring operations on rows go together, row by row, with one
// barrier after them; a linear first packs its rows (an operation on rows), then hands out tiles.
#include "program.h"

#include <memory>
#include <system_error>

#include "attention.h"
#include "linear.h"
#include "linear_amx.h"
#include "linear_int.h"
#include "pool.h"
#include "rows.h"

namespace {

struct Runner {
    Runner(int threads, const int32_t* cpus) : team(threads, cpus), scratch(size_t(threads)) {}
    Team team;
    std::vector<Scratch> scratch;
    std::vector<std::vector<int32_t>> counts = std::vector<std::vector<int32_t>>(scratch.size());  // of tokens, zeros
    std::vector<float> packed, partials;
    std::vector<attention::Plan> plans;
};

const attention::Plan& plan_of(const Attend& op, const std::vector<attention::Plan>& plans) {
    size_t i = 0;
    while (plans[i].window != op.window || plans[i].share != op.heads / op.kv_heads) i++;
    return plans[i];
}

size_t packed_size(const Linear& op, int64_t tokens) {
#ifdef __AMX_BF16__
    if (op.form == AMX_BF16 || op.form == AMX_INT8) return amx::packed_floats(op, tokens);
#endif
    if (op.form == TILES_INT8 || op.form == TILES_INT4) {
        const Quantised form(op);
        const Panels panels(tokens, form.most_rows);
        return size_t(panels.count * form.panel(panels.rows));
    }
    Panels panels(tokens);
    return size_t(panels.count * panels.rows * op.inputs);
}

// What a region needs is made before it starts.
void prepare(Runner& runner, const Op* ops, int64_t count, const Step& step) {
    runner.plans.clear();
    size_t packed = 0, partials = 0;
    for (int64_t i = 0; i < count; i++) {
        if (ops[i].kind == LINEAR) packed = std::max(packed, packed_size(*static_cast<const Linear*>(ops[i].what), step.tokens));
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

void row_op(const Op& op, int64_t token, Runner& runner, const Step& step, Scratch& scratch) {
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
        case LINEAR: {
            const Linear& linear = *static_cast<const Linear*>(op.what);
#ifdef __AMX_BF16__
            if (linear.form == AMX_BF16) return amx::pack_row<amx::Bf16>(linear, token, step.tokens, aligned(runner.packed), scratch);
            if (linear.form == AMX_INT8) return amx::pack_row<amx::Int8>(linear, token, step.tokens, aligned(runner.packed), scratch);
#endif
            if (linear.form >= TILES_INT8) return quantise_row(linear, token, step.tokens, aligned(runner.packed), scratch);
            return pack_row(linear, token, step.tokens, aligned(runner.packed));
        }
        default: return;
    }
}

void run_linear(const Linear& op, Runner& runner, const Step& step, Scratch& scratch) {
    Team& team = runner.team;
    const float* packed = aligned(runner.packed);
    int64_t begin, end;
#ifdef __AMX_BF16__
    if (op.form == AMX_BF16 || op.form == AMX_INT8) {
        const amx::Work work(op, step.tokens);
        amx::configure(step.tokens);
        const int64_t each = std::clamp<int64_t>(work.pieces / (team.size * 8), 1, 16);
        while (team.take(work.pieces, each, begin, end))
            for (int64_t index = begin; index < end; index++) {
                if (op.form == AMX_BF16) amx::piece<amx::Bf16>(op, step.tokens, work, packed, index, scratch);
                else amx::piece<amx::Int8>(op, step.tokens, work, packed, index, scratch);
            }
        _tile_release();
        return;
    }
#endif
    if (op.form == TILES_INT8 || op.form == TILES_INT4) {
        const Quantised form(op);
        const Panels panels(step.tokens, form.most_rows);
        const int64_t pieces = form.tiles(op) * panels.chunks;
        const int64_t each = panels.count > 1 ? 1 : std::clamp<int64_t>(pieces / (team.size * 8), 1, 32);
        while (team.take(pieces, each, begin, end))
            quantised_pieces(op, step.tokens, form, panels, packed, begin, end, scratch);
        return;
    }
    const Panels panels(step.tokens);
    const int64_t pieces = linear_tiles(op) * panels.chunks;
    const int64_t each = panels.count > 1 ? 1 : std::clamp<int64_t>(pieces / (team.size * 8) / 4 * 4, 4, 32);
    while (team.take(pieces, each, begin, end)) {
        if (op.form == TILES_F32) linear_rows<float>(op, step.tokens, panels, packed, begin, end, scratch);
        else linear_rows<bf16>(op, step.tokens, panels, packed, begin, end, scratch);
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

void region(int id, Runner& runner, const Op* ops, int64_t count, const Step& step) {
    Scratch& scratch = runner.scratch[size_t(id)];
    int64_t begin, end;
    for (int64_t first = 0; first < count;) {
        // Operations on rows up to and with the packing of the next linear; the joining of an attention comes first.
        int64_t last = first;
        while (last < count && ops[last].kind != LINEAR && (last == first || ops[last].kind != ATTEND)) last++;
        const bool packs = last < count && ops[last].kind == LINEAR;
        const bool attends = ops[first].kind == ATTEND;
        if (attends) {
            const Attend& op = *static_cast<const Attend*>(ops[first].what);
            if (step.page_type == F32) run_attention<float>(op, runner, step, scratch);
            else if (step.page_type == BF16) run_attention<bf16>(op, runner, step, scratch);
            else run_attention<fp16>(op, runner, step, scratch);
            runner.team.wait();
        }
        const int64_t each = std::clamp<int64_t>(step.tokens / (runner.team.size * 4), 1, 16);
        while (runner.team.take(step.tokens, each, begin, end))
            for (int64_t token = begin; token < end; token++)
                for (int64_t i = first; i < last + packs; i++) row_op(ops[i], token, runner, step, scratch);
        runner.team.wait();
        if (packs) {
            run_linear(*static_cast<const Linear*>(ops[last].what), runner, step, scratch);
            runner.team.wait();
        }
        first = last + packs;
    }
}

}  // namespace

extern "C" {

// Sizes of the structures, for the other side to compare; their number.
int64_t slipway_sizes(int64_t* sizes, int64_t room) {
    const int64_t found[] = {sizeof(Embed), sizeof(Norm), sizeof(Add), sizeof(Activate), sizeof(Heads), sizeof(Linear),
                             sizeof(Attend), sizeof(Cap), sizeof(Op), sizeof(Angles), sizeof(Group), sizeof(Step)};
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

}  // extern "C"

#include "logits.h"
