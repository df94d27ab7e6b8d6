// A linear of any form: the packing of its rows, and its division into pieces of work.
#pragma once

#include "linear.h"
#include "linear_amx.h"
#include "linear_amx_few.h"
#include "linear_amx_groups.h"
#include "linear_blocks.h"
#include "linear_int.h"
#include "linear_pairs.h"

// Implementation of a product. On CPUs with matrix tiles it depends on the number of rows.
enum class Way { VECTORS, PAIRS, WHOLE, BLOCKS, FEW_BF16, FEW_ROUNDED, TILES_BF16, TILES_ROUNDED, TILES_WHOLE };

static inline Way way_of(const Linear& op, [[maybe_unused]] int64_t rows) {
    if (blocks::is_form(op)) return Way::BLOCKS;
#ifdef __AMX_BF16__
    if (op.form == AMX_BF16) return rows <= amx::MOST_FEW ? Way::FEW_BF16 : Way::TILES_BF16;
    if (op.form == PAIRS_BF16) return rows <= amx::MOST_FEW ? Way::FEW_ROUNDED : Way::TILES_ROUNDED;
    if (op.form >= TILES_INT4 && rows >= amx::LEAST_ROWS) return Way::TILES_WHOLE;
#endif
#ifdef __AVX512BF16__
    if (op.form == PAIRS_BF16) return Way::PAIRS;
#endif
    return op.form >= TILES_INT4 ? Way::WHOLE : Way::VECTORS;
}

// Number of floats of the packed rows.
static inline size_t packed_size(const Linear& op, int64_t rows) {
    switch (way_of(op, rows)) {
#ifdef __AMX_BF16__
        case Way::TILES_BF16:
        case Way::TILES_ROUNDED:
        case Way::TILES_WHOLE: return amx::packed_floats(op, rows);
        case Way::FEW_BF16: return amx::few_floats<amx::Exact>(op, rows);
        case Way::FEW_ROUNDED: return amx::few_floats<amx::Rounded>(op, rows);
#endif
#ifdef __AVX512BF16__
        case Way::PAIRS: {
            const Panels panels(rows);
            return size_t(panels.count * panels.rows * pairs::words(op));
        }
#endif
        case Way::WHOLE: {
            const Quantised form(op);
            const Panels panels(rows, form.most_rows);
            return size_t(panels.count * form.panel(panels.rows));
        }
        case Way::BLOCKS: return blocks::packed_size(op, rows);
        default: {
            const Panels panels(rows);
            return size_t(panels.count * panels.rows * op.inputs);
        }
    }
}

static inline void pack(const Linear& op, int64_t row, int64_t rows, float* packed, Scratch& scratch) {
    switch (way_of(op, rows)) {
#ifdef __AMX_BF16__
        case Way::TILES_BF16: return amx::pack_row<amx::Exact>(op, row, rows, packed, scratch);
        case Way::TILES_ROUNDED: return amx::pack_row<amx::Rounded>(op, row, rows, packed, scratch);
        case Way::TILES_WHOLE: return amx::pack_row<amx::Int8>(op, row, rows, packed, scratch);
        case Way::FEW_BF16: return amx::pack_few<amx::Exact>(op, row, rows, packed, scratch);
        case Way::FEW_ROUNDED: return amx::pack_few<amx::Rounded>(op, row, rows, packed, scratch);
#endif
#ifdef __AVX512BF16__
        case Way::PAIRS: return pairs::pack_row(op, row, rows, packed);
#endif
        case Way::BLOCKS: return blocks::pack_row(op, row, rows, packed, scratch);
        case Way::WHOLE: return quantise_row(op, row, rows, packed, scratch);
        default: return pack_row(op, row, rows, packed);
    }
}

// count: number of pieces of work over these rows. each: number of pieces that a thread takes at once.
struct Pieces { int64_t count, each; };

static inline Pieces pieces_of(const Linear& op, int64_t rows, int64_t threads) {
    auto some = [&](int64_t pieces, int64_t most) { return std::clamp<int64_t>(pieces / (threads * 8), 1, most); };
    switch (way_of(op, rows)) {
#ifdef __AMX_BF16__
        case Way::TILES_BF16:
        case Way::TILES_ROUNDED: {
            const int64_t pieces = amx::Work(op, rows).pieces;
            return {pieces, some(pieces, 16)};
        }
        case Way::FEW_BF16:
        case Way::FEW_ROUNDED: {
            const int64_t pieces = amx::few_pieces(op, amx::few_width(rows));
            return {pieces, some(pieces, 16)};
        }
        case Way::TILES_WHOLE: {
            const int64_t pieces = amx::GroupsWork(op, rows).pieces;
            return {pieces, some(pieces, 16)};
        }
#endif
        case Way::WHOLE: {
            const Quantised form(op);
            const Panels panels(rows, form.most_rows);
            const int64_t pieces = form.tiles(op) * panels.chunks;
            return {pieces, panels.chunks > 1 ? MOST_TILES : some(pieces, 32)};
        }
        case Way::BLOCKS: {
            const int64_t pieces = blocks::pieces(op, rows);
            return {pieces, blocks::chunks(rows) > 1 ? 1 : some(pieces, 32)};
        }
        default: {
            const Panels panels(rows);
            const int64_t pieces = linear_tiles(op) * panels.chunks;
            // Four at a time, see few_rows.
            return {pieces, panels.chunks > 1 ? 1 : std::clamp<int64_t>(pieces / (threads * 8) / 4 * 4, 4, 32)};
        }
    }
}

// Computes pieces [begin, end) over the packed rows.
static inline void run_pieces(const Linear& op, int64_t rows, const float* packed, int64_t begin, int64_t end, Scratch& scratch) {
    switch (way_of(op, rows)) {
#ifdef __AMX_BF16__
        case Way::TILES_BF16: return amx::pieces<amx::Exact>(op, rows, packed, begin, end, scratch);
        case Way::TILES_ROUNDED: return amx::pieces<amx::Rounded>(op, rows, packed, begin, end, scratch);
        case Way::TILES_WHOLE: return amx::groups_pieces(op, rows, packed, begin, end, scratch);
        case Way::FEW_BF16: return amx::few_rows<amx::Exact>(op, rows, packed, begin, end);
        case Way::FEW_ROUNDED: return amx::few_rows<amx::Rounded>(op, rows, packed, begin, end);
#endif
#ifdef __AVX512BF16__
        case Way::PAIRS: return pairs::pieces(op, rows, Panels(rows), packed, begin, end, scratch);
#endif
        case Way::WHOLE: {
            const Quantised form(op);
            return quantised_pieces(op, rows, form, Panels(rows, form.most_rows), packed, begin, end, scratch);
        }
        case Way::BLOCKS: return blocks::run(op, rows, packed, begin, end, scratch);
        default:
            if (op.form == TILES_F32) return linear_rows<float>(op, rows, Panels(rows), packed, begin, end, scratch);
            return linear_rows<bf16>(op, rows, Panels(rows), packed, begin, end, scratch);
    }
}

// Configures matrix tiles for this number of rows, or the CPU's float mode where vectors must round as tiles do.
static inline void take_tiles([[maybe_unused]] const Linear& op, [[maybe_unused]] int64_t rows) {
#ifdef __AMX_BF16__
    const Way way = way_of(op, rows);
    if (way == Way::TILES_BF16 || way == Way::TILES_ROUNDED) amx::configure(rows);
    if (way == Way::FEW_BF16 || way == Way::FEW_ROUNDED) amx::flush_subnormal(true);
    if (way == Way::TILES_WHOLE) amx::configure_groups(amx::GroupForm(op).span);
#endif
}
static inline void release_tiles([[maybe_unused]] const Linear& op, [[maybe_unused]] int64_t rows) {
#ifdef __AMX_BF16__
    const Way way = way_of(op, rows);
    if (way == Way::FEW_BF16 || way == Way::FEW_ROUNDED) amx::flush_subnormal(false);
    if (way >= Way::TILES_BF16) _tile_release();
#endif
}
