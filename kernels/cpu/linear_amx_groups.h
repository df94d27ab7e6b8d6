// y = x Wᵀ by matrix tiles (Intel AMX) with weights of 8 or 4 bits (linear_int.h), where there are enough rows.
//
// Weights are packed for the vector kernels. Some groups of 16 outputs at a time are unpacked to signed bytes without their
// zero points, [word][output][4 inputs], the format of a matrix tile, and serve all row tiles of the piece. A tile of 8-bit
// weights has 32 outputs, so it makes two such tiles.
// One instruction multiplies a block of x, whose sums are integers and exact. Blocks are added in the same order by the
// same operations as in the vector kernels: the results are the same bit for bit, so that the number of rows may decide.
#pragma once
#ifdef __AMX_INT8__

#include "linear_amx.h"

namespace amx {

constexpr int64_t LEAST_ROWS = MOST_ROWS4 + 1;  // fewer are faster by vectors
constexpr int64_t DEPTH_INPUTS = 512;           // inputs whose unpacked weights and x stay in the first-level cache
constexpr int64_t OUTPUT_TILES = 4;             // of a piece of work where there are many rows
constexpr int64_t ENOUGH_PIECES = 32;          // of twice the usual number of rows
constexpr int64_t FLIGHTS = 4;                  // blocks whose sums are on their way at once

// Layout of the weights of 16 outputs.
struct GroupForm : GroupTile {
    int64_t count, span, parts;  // groups; inputs of a tile, which are a block of x; parts of 16 outputs of a packed tile
    explicit GroupForm(const Linear& op) : GroupTile(op), count((op.inputs + group - 1) / group), span(block_of(op)) {
        parts = op.form == TILES_INT8 ? NR / W : 1;
    }
    int64_t offset(int64_t tile) const { return tile / parts * count * step; }
    int part(int64_t tile) const { return int(tile % parts); }
};

// Tiles 4 and 5 hold x, 6 and 7 weights, the others sums.
static void configure_groups(int64_t span) {
    Config config;
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? span : LINE);
        config.rows[tile] = uint8_t(tile < 6 ? SIDE : span / 4);
    }
    config.load();
}

// Groups [first, last) of 16 outputs, part `part` of the packed tile `w`: [group][word][16 outputs][4 inputs].
// Meanwhile the same groups `ahead` bytes further on are fetched.
static void unpack(const Linear& op, const GroupForm& form, const uint8_t* w, int part, int64_t first, int64_t last,
                   int64_t ahead, uint8_t* out, float* scales) {
    const __m512i low_half = _mm512_set1_epi8(15);
    const int64_t share = form.step / form.parts;
    for (int64_t g = first; g < last; g++) {
        const uint8_t* at = w + g * form.step;
        const vf scale = group_scales(at + form.bytes, op.scale_type, part);
        for (int64_t block = 0; block < form.group; block += form.span, scales += SIDE) store(scales, scale);
        for (int64_t line = part * share; line < (part + 1) * share; line += LINE) _mm_prefetch((const char*)(at + ahead + line), _MM_HINT_T1);
        if (op.form == TILES_INT8) {
            for (int64_t i = part * LINE; i < form.bytes; i += form.parts * LINE, out += LINE)
                _mm512_storeu_si512(out, _mm512_xor_si512(_mm512_loadu_si512(at + i), _mm512_set1_epi8(-128)));
            continue;
        }
        __m512i zero = _mm512_set1_epi8(8);
        if (op.zeros) zero = (__m512i)(load(at + form.step - W) * 0x01010101);  // one to each input of a word
        for (int64_t i = 0; i < form.bytes; i += LINE, out += 2 * LINE) {
            const __m512i both = _mm512_loadu_si512(at + i);
            _mm512_storeu_si512(out, _mm512_sub_epi8(_mm512_and_si512(both, low_half), zero));
            _mm512_storeu_si512(out + LINE, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), low_half), zero));
        }
    }
}

// Sums of blocks [block, block + flights) of one row tile and 16 outputs, to whole[block][16 rows][16 outputs].
template <int64_t SPAN>
static inline void multiply_blocks(const uint8_t* x, const uint8_t* w, int64_t block, int64_t flights, int32_t (*whole)[SIDE * SIDE]) {
    w += block * SPAN * SIDE;
    x += SPAN == Int8::INPUTS ? block * TILE : block / 2 * TILE;
#define FLIGHT(number, sum, a, b)                                                                                 \
    if (number < flights) {                                                                                       \
        _tile_zero(sum);                                                                                          \
        _tile_loadd(a, x + (SPAN == Int8::INPUTS ? number * TILE : number / 2 * TILE + number % 2 * SPAN), LINE); \
        _tile_loadd(b, w + number * SPAN * SIDE, LINE);                                                           \
        _tile_dpbssd(sum, a, b);                                                                                  \
        _tile_stored(sum, whole[number], LINE);                                                                   \
    }
    FLIGHT(0, 0, 4, 6) FLIGHT(1, 1, 5, 7) FLIGHT(2, 2, 4, 6) FLIGHT(3, 3, 5, 7)
#undef FLIGHT
}

// One tile of 16 rows and 16 outputs: sums[16][stride] (+)= Σ scale · x_scale · (x · w) over `count` blocks of SPAN inputs.
// x: the row tile; x_scales, scales: [block][16]; w: signed weights. The vectors scale the sums of some blocks while the
// tiles multiply the next ones.
template <int64_t SPAN>
static void add_blocks(const uint8_t* x, const float* x_scales, const uint8_t* w, const float* scales, int64_t count, bool more,
                       float* sums, int64_t stride) {
    vf acc[SIDE];
    UNROLL for (int r = 0; r < SIDE; r++) acc[r] = more ? load(sums + r * stride) : vf{};
    alignas(64) int32_t whole[2][FLIGHTS][SIDE * SIDE];
    multiply_blocks<SPAN>(x, w, 0, std::min(FLIGHTS, count), whole[0]);
    for (int64_t first = 0, side = 0; first < count; first += FLIGHTS, side ^= 1) {
        const int64_t flights = std::min(FLIGHTS, count - first);
        multiply_blocks<SPAN>(x, w, first + FLIGHTS, count - first - FLIGHTS, whole[side ^ 1]);
        for (int64_t number = 0; number < flights; number++, x_scales += SIDE, scales += SIDE) {
            const vf scale = load(scales);
            UNROLL for (int r = 0; r < SIDE; r++) acc[r] += scale * x_scales[r] * to_float(load(whole[side][number] + r * SIDE));
        }
    }
    UNROLL for (int r = 0; r < SIDE; r++) store(sums + r * stride, acc[r]);
}

// Pieces of work: (chunk of row tiles) × (a few output tiles), output tiles counting fastest. Each chunk unpacks the
// weights; larger chunks leave fewer pieces for the threads.
struct GroupsWork {
    int64_t row_tiles, width, across, chunk, pieces;
    GroupsWork(const Linear& op, int64_t tokens) : row_tiles(amx::row_tiles(tokens)) {
        width = row_tiles == 1 ? 1 : OUTPUT_TILES;
        across = (output_tiles(op) + width - 1) / width;
        chunk = across * row_tiles >= ENOUGH_PIECES * 2 * CHUNK ? 2 * CHUNK : CHUNK;
        pieces = across * ((row_tiles + chunk - 1) / chunk);
    }
};

static void groups_piece(const Linear& op, int64_t tokens, const GroupsWork& work, const float* x_tiles, int64_t index,
                         Scratch& scratch) {
    const GroupForm form(op);
    const int64_t tile = index % work.across * work.width, tiles = std::min(work.width, output_tiles(op) - tile);
    const int64_t first = index / work.across * work.chunk, rows = std::min(work.chunk, work.row_tiles - first);
    const int64_t stride = work.width * SIDE, x_apart = blocks<Int8>(op) * TILE;
    const uint8_t *x = (const uint8_t*)x_tiles + first * x_apart, *w = (const uint8_t*)op.weight;
    const float* x_scales = (const float*)((const uint8_t*)x_tiles + packed_tiles<Int8>(op, tokens) * TILE);
    const int64_t half = form.group % Int8::INPUTS ? 2 : 1;  // groups that fill whole tiles of x
    const int64_t deep = std::max<int64_t>(1, DEPTH_INPUTS / form.group / half) * half, unpacked = deep * form.group * SIDE;
    float* sums = at_least(scratch.sums, size_t(work.chunk * SIDE * stride));
    const int64_t deep_blocks = deep * form.group / form.span;
    uint8_t* wide = (uint8_t*)at_least(scratch.wide, size_t(OUTPUT_TILES * (unpacked / 4 + deep_blocks * SIDE) + SIDE));
    wide = (uint8_t*)((uintptr_t(wide) + LINE - 1) / LINE * LINE);
    float* scales = (float*)(wide + OUTPUT_TILES * unpacked);
    for (int64_t g = 0; g < form.count; g += deep) {
        const int64_t last = std::min(form.count, g + deep);
        // The next groups of these tiles, or the first ones of those that come next.
        const int64_t ahead = last < form.count ? deep * form.step : form.offset(tile + tiles) - form.offset(tile) - g * form.step;
        for (int64_t n = tile; n < tile + tiles; n++)
            unpack(op, form, w + form.offset(n), form.part(n), g, last, ahead, wide + (n - tile) * unpacked,
                   scales + (n - tile) * deep_blocks * SIDE);
        const int64_t begin = g * form.group / form.span, count = (last - g) * form.group / form.span;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t n = 0; n < tiles; n++) {
                const uint8_t* own = x + row * x_apart + g * form.group / Int8::INPUTS * TILE;
                const float* own_scales = x_scales + ((first + row) * x_blocks(op) + begin) * SIDE;
                float* out = sums + row * SIDE * stride + n * SIDE;
                if (form.span == Int8::INPUTS)
                    add_blocks<Int8::INPUTS>(own, own_scales, wide + n * unpacked, scales + n * deep_blocks * SIDE, count, g > 0, out, stride);
                else
                    add_blocks<PART>(own, own_scales, wide + n * unpacked, scales + n * deep_blocks * SIDE, count, g > 0, out, stride);
            }
    }
    const int32_t *lists = (const int32_t*)x_scales, *counts = outlier_counts(op, tokens, lists);
    for (int64_t row = 0; row < std::min(rows * SIDE, tokens - first * SIDE); row++) {
        if (!counts[first * SIDE + row]) continue;
        const int32_t* list = outliers(op, tokens, first * SIDE + row, lists);
        for (int64_t n = 0; n < tiles; n++) {
            const uint8_t* packed = w + form.offset(tile + n);
            float* at = sums + row * stride + n * SIDE;
            if (op.form == TILES_INT8 && form.part(tile + n) == 0 && n + 1 < tiles) {  // the whole packed tile
                add_outliers<2, false, false>(op, list, packed, 0, at);
                n++;
            } else if (op.form == TILES_INT8) add_outliers<1, false, false>(op, list, packed, form.part(tile + n), at);
            else if (op.zeros) add_outliers<1, true, true>(op, list, packed, 0, at);
            else add_outliers<1, true, false>(op, list, packed, 0, at);
        }
    }
    put_far(op, tokens, first * SIDE, rows * SIDE, tile * SIDE, stride, sums);
}

static void groups_pieces(const Linear& op, int64_t rows, const float* packed, int64_t begin, int64_t end, Scratch& scratch) {
    const GroupsWork work(op, rows);
    for (int64_t index = begin; index < end; index++) groups_piece(op, rows, work, packed, index, scratch);
}

}  // namespace amx
#endif
