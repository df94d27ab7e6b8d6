// Blocks of ggml in the order of block_codes.h. Source of the layouts of blocks: ggml-common.h and ggml-quants.c of
// llama.cpp.
//
// The codes of a block become bytes in the order of the inputs, [W outputs][inputs]. Words of these are then joined, as
// registers of the packed weights have them.
#include "linear_blocks.h"

#include "block_codes.h"

namespace blocks {

namespace {

constexpr int64_t MOST_INPUTS = 256, MOST_SUBS = 16;

// A block of a file: its codes, and for each sub-block the scale and the minimum as they are packed, apart from the unit's.
struct Block {
    uint8_t codes[MOST_INPUTS];
    uint8_t scales[MOST_SUBS], minimums[MOST_SUBS];
    uint8_t unit[4];
};

// Codes of 4 bits, half of each `count` in the low and half in the high halves of the bytes.
void read_halves(const uint8_t* from, int64_t count, uint8_t* out) {
    for (int64_t i = 0; i < count / 2; i++) out[i] = from[i] & 15;
    for (int64_t i = 0; i < count / 2; i++) out[count / 2 + i] = from[i] >> 4;
}

// 8 scales and minimums of 6 bits in 12 bytes
void read_six(const uint8_t* from, Block& out) {
    for (int i = 0; i < 4; i++) {
        out.scales[i] = from[i] & 63;
        out.minimums[i] = from[4 + i] & 63;
        out.scales[4 + i] = uint8_t((from[8 + i] & 15) | from[i] >> 6 << 4);
        out.minimums[4 + i] = uint8_t(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
    }
}

template <const BlockType& T> void read(const uint8_t* from, Block& out) {
    const auto unit = [&](int64_t at, size_t bytes) { std::memcpy(out.unit, from + at, bytes); };
    if constexpr (&T == &Q2_K) {
        for (int part = 0; part < 2; part++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++) out.codes[128 * part + 32 * j + i] = from[16 + 32 * part + i] >> 2 * j & 3;
        for (int i = 0; i < 16; i++) out.scales[i] = from[i] & 15, out.minimums[i] = from[i] >> 4;
        unit(80, 4);
    }
    if constexpr (&T == &Q3_K) {
        const uint8_t *high = from, *low = from + 32, *scales = from + 96;
        for (int part = 0; part < 2; part++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++)
                    out.codes[128 * part + 32 * j + i] = uint8_t((low[32 * part + i] >> 2 * j & 3) | (high[i] >> (4 * part + j) & 1) << 2);
        for (int i = 0; i < 16; i++)
            out.scales[i] = uint8_t((scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4);
        unit(108, 2);
    }
    if constexpr (&T == &Q4_K || &T == &Q5_K) {
        const uint8_t *high = from + 16, *low = from + (&T == &Q4_K ? 16 : 48);
        for (int j = 0; j < 4; j++) read_halves(low + 32 * j, 64, out.codes + 64 * j);
        if constexpr (&T == &Q5_K)
            for (int j = 0; j < 8; j++)
                for (int i = 0; i < 32; i++) out.codes[32 * j + i] |= uint8_t((high[i] >> j & 1) << 4);
        read_six(from + 4, out);
        unit(0, 4);
    }
    if constexpr (&T == &Q6_K) {
        for (int part = 0; part < 2; part++) {
            const uint8_t *low = from + 64 * part, *high = from + 128 + 32 * part;
            uint8_t* codes = out.codes + 128 * part;
            for (int i = 0; i < 64; i++) codes[i] = low[i] & 15, codes[64 + i] = low[i] >> 4;
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++) codes[32 * j + i] |= uint8_t((high[i] >> 2 * j & 3) << 4);
        }
        std::memcpy(out.scales, from + 192, 16);
        unit(208, 2);
    }
    if constexpr (&T == &IQ4_XS) {
        uint16_t high;
        std::memcpy(&high, from + 2, 2);
        for (int j = 0; j < 8; j++) {
            read_halves(from + 8 + 16 * j, 32, out.codes + 32 * j);
            out.scales[j] = uint8_t((from[4 + j / 2] >> j % 2 * 4 & 15) | (high >> 2 * j & 3) << 4);
        }
        unit(0, 2);
    }
    if constexpr (&T == &INT6) {
        read_halves(from, 64, out.codes);
        for (int i = 0; i < 64; i++) out.codes[i] |= uint8_t((from[32 + i % 16] >> i / 16 * 2 & 3) << 4);
        unit(48, 2);
    }
    if constexpr (T.inputs == 32) {
        const int64_t at = T.unit == Unit::POWER_OF_TWO ? 1 : T.has_minimum() ? 4 : 2;
        unit(0, size_t(at));
        read_halves(from + at + (T.high ? 4 : 0), 32, out.codes);
        if constexpr (T.high == 1) {
            uint32_t bits;
            std::memcpy(&bits, from + at, 4);
            for (int i = 0; i < 32; i++) out.codes[i] |= uint8_t((bits >> i & 1) << 4);
        }
    }
}

using Word = std::conditional_t<WORD4 == 4, uint32_t, uint8_t>;  // codes of one output in a register
constexpr Word ONE = Word(EACH);

// Writes the scales of the blocks of outputs `first` to `last` - 1 of a unit after their codes.
template <const BlockType& T> void write_scales(const Block* blocks, int first, int last, uint8_t* out) {
    const auto word = [](auto byte) {
        uint32_t made = 0;
        for (int k = 0; k < 4; k++) made |= uint32_t(byte(k) & 255) << 8 * k;
        return made;
    };
    uint8_t* at = out + T.scales_at();
    const auto put_word = [&](int64_t number, int o, uint32_t made) { std::memcpy(at + (number * W + o) * 4, &made, 4); };
    for (int o = first; o < last; o++) {
        const uint8_t *s = blocks[o].scales, *m = blocks[o].minimums;
        if constexpr (T.scales == Scales::SIX_AND_MINIMUM) {
            put_word(0, o, word([&](int k) { return s[k] | (m[k] & 3) << 6; }));
            put_word(1, o, word([&](int k) { return s[4 + k] | (m[4 + k] & 3) << 6; }));
            put_word(2, o, word([&](int k) { return m[k] >> 2 | m[4 + k] >> 2 << 4; }));
        }
        if constexpr (T.scales == Scales::FOUR_AND_MINIMUM)
            for (int q = 0; q < 4; q++) put_word(q, o, word([&](int k) { return s[4 * q + k] | m[4 * q + k] << 4; }));
        if constexpr (T.scales == Scales::SIGNED_EIGHT)
            for (int q = 0; q < 4; q++) put_word(q, o, word([&](int k) { return s[4 * q + k]; }));
        if constexpr (T.scales == Scales::SIGNED_SIX_16) {
            put_word(0, o, word([&](int k) { return (s[k] & 15) | (s[4 + k] & 15) << 4; }));
            put_word(1, o, word([&](int k) { return (s[8 + k] & 15) | (s[12 + k] & 15) << 4; }));
            put_word(2, o, word([&](int k) { return s[k] >> 4 | s[4 + k] >> 4 << 2 | s[8 + k] >> 4 << 4 | s[12 + k] >> 4 << 6; }));
        }
        if constexpr (T.scales == Scales::SIGNED_SIX_8) {
            put_word(0, o, word([&](int k) { return (s[k] & 15) | (s[4 + k] & 15) << 4; }));
            uint32_t high = 0;
            for (int q = 0; q < 2; q++)
                for (int k = 0; k < 4; k++) high |= uint32_t(s[4 * q + k] >> 4) << (8 * (k / 2) + 2 * (k % 2) + 4 * q);
            std::memcpy(at + 4 * W + 2 * o, &high, 2);
        }
        uint8_t* unit = out + T.unit_at();
        if constexpr (T.unit == Unit::POWER_OF_TWO) unit[o] = blocks[o].unit[0];
        else std::memcpy(unit + 2 * o, blocks[o].unit, 2);
        if constexpr (T.unit == Unit::HALF_AND_MINIMUM) std::memcpy(unit + 2 * W + 2 * o, blocks[o].unit + 2, 2);
    }
}

// Writes the blocks of outputs `first` to `last` - 1 of a unit.
template <const BlockType& T> void write_unit(const Block* blocks, int first, int last, uint8_t* out) {
    for (int o = first; o < last; o++) {
        Word codes[MOST_INPUTS / WORD4];
        std::memcpy(codes, blocks[o].codes, size_t(T.inputs));
        const auto registers = [&](int64_t at, int shift, int bits, int count) {  // `count` words with `bits` of each code
            const Word mask = Word(ONE * ((1 << bits) - 1));
            for (int64_t i = 0; i < T.words() / count; i++) {
                Word made = 0;
                for (int j = 0; j < count; j++) made |= Word((codes[i * count + j] >> shift & mask) << j * 8 / count);
                std::memcpy(out + at + i * REGISTER + o * WORD4, &made, sizeof(Word));
            }
        };
        registers(0, 0, T.low, 8 / T.low);
        if constexpr (T.high > 0) registers(T.high_at(), T.low, T.high, 8 / T.high);
    }
    write_scales<T>(blocks, first, last, out);
}

template <const BlockType& T> void restore_block(const Block& block, float scale, float* out) {
    const auto half = [&](int at) { fp16 x; std::memcpy(&x, block.unit + at, 2); return widen(x); };
    const float d = T.unit == Unit::POWER_OF_TWO ? std::ldexp(1.f, int(block.unit[0]) - 128) : half(0);
    const float minimum = T.has_minimum() ? (T.adds_minimum ? half(2) : -half(2)) : 0.f;
    for (int64_t i = 0; i < T.inputs; i++) {
        const int64_t sub = i / T.sub;
        int code = block.codes[i];
        if constexpr (T.table != nullptr) code = T.table == NONLINEAR ? int8_t(T.table[code] - SHIFT) : T.table[code] - T.offset;
        else code -= T.offset;
        int factor = 1;
        if (T.scales == Scales::SIGNED_EIGHT) factor = int8_t(block.scales[sub]);
        else if (signed_scales<T>) factor = block.scales[sub] - 32;
        else if (T.is_scaled()) factor = block.scales[sub];
        const float least = T.has_minimum() ? minimum * (T.is_scaled() ? float(block.minimums[sub]) : 1.f) : 0.f;
        out[i] = (d * float(factor) * float(code) + least) * scale;
    }
}

}  // namespace

int64_t row_bytes(int32_t form, int64_t size) {
    const BlockType& type = *TYPES[form - BLOCKS_Q2_K];
    return size / type.inputs * type.bytes;
}

void restore(int32_t form, const uint8_t* row, int64_t size, float scale, float* out) {
    with_type(form, [&]<const BlockType& T>() {
        Block block;
        for (int64_t i = 0; i < size; i += T.inputs, row += T.bytes) {
            read<T>(row, block);
            restore_block<T>(block, scale, out + i);
        }
    });
}

void pack(int32_t form, const uint8_t* rows, int64_t stride, int64_t at, int64_t count, int64_t inputs, uint8_t* out) {
    with_type(form, [&]<const BlockType& T>() {
        const int64_t units = (inputs + T.inputs - 1) / T.inputs, end = at + count;
        Block blocks[W];
        for (int64_t tile = at / W; tile * W < end; tile++) {
            const int64_t start = tile * W;
            const int first = int(start < at ? at - start : 0), last = int(end - start < W ? end - start : W);
            for (int64_t u = 0; u < units; u++) {
                for (int o = first; o < last && o < W; o++) read<T>(rows + (start + o - at) * stride + u * T.bytes, blocks[o]);
                write_unit<T>(blocks, first, last, out + (tile * units + u) * T.step());
            }
        }
    });
}

}  // namespace blocks

extern "C" {

// Packs weights in blocks of ggml for this variant, `count` outputs from `at` on. stride: bytes from a row to the next.
void slipway_pack_blocks(int64_t form, const uint8_t* rows, int64_t stride, int64_t at, int64_t count, int64_t inputs, uint8_t* out) {
    blocks::pack(int32_t(form), rows, stride, at, count, inputs, out);
}

// Writes `count` rows of such blocks as float.
void slipway_restore_blocks(int64_t form, const uint8_t* rows, int64_t count, int64_t inputs, float* out) {
    for (int64_t row = 0; row < count; row++)
        blocks::restore(int32_t(form), rows + row * blocks::row_bytes(int32_t(form), inputs), inputs, 1.f, out + row * inputs);
}

}  // extern "C"
