// Types of blocks of ggml, and of 6 bits quantized at load: where the codes and scales of a block are, in a file and in the packed weights.
//
// A unit is a block of the file for W outputs. Its codes come first, then the scales of sub-blocks of inputs, then those of
// the unit. A register of codes has a byte for each input of a word and each output, [W][WORD4]:
//
// LOW4    two words, the first one in the low halves of the bytes
// LOW2    four words of two bits
// HIGH2   the same, added to LOW4
// HIGH1   eight words of one bit, added to LOW4 or LOW2
//
// Scales of sub-blocks are in words of 4 bytes for each output: byte k of word q belongs to sub-block 4 q + k. Those of 6
// bits are divided, so that the packed weights have as many bytes as the file. w = d · scale · (code - offset) - dmin · min.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"  // only the quantization of x is used
#include "linear_int.h"
#pragma GCC diagnostic pop

namespace blocks {

// Scales of sub-blocks. NONE: sub-blocks have the scale of the unit.
enum class Scales { NONE, SIX_AND_MINIMUM, FOUR_AND_MINIMUM, SIGNED_SIX_16, SIGNED_SIX_8, SIGNED_EIGHT };
enum class Unit { HALF, HALF_AND_MINIMUM, POWER_OF_TWO };  // scales of a unit

struct BlockType {
    int low, high;          // bits in LOW and HIGH
    int64_t inputs, sub, bytes;  // inputs of a unit and of a sub-block; bytes of a block in the file
    Scales scales;
    Unit unit;
    int offset = 0;
    const int8_t* table = nullptr;  // of the numbers of codes, + offset
    bool adds_minimum = false;      // else the minimum is subtracted

    constexpr bool has_minimum() const { return unit == Unit::HALF_AND_MINIMUM; }
    constexpr bool is_scaled() const { return scales != Scales::NONE; }
    constexpr int64_t block() const { return inputs < LARGE_BLOCK ? PART : LARGE_BLOCK; }  // inputs of a block of x
    constexpr int64_t subs() const { return inputs / sub; }
    constexpr int64_t words() const { return inputs / WORD4; }
    // Bytes of a unit before its high bits, before the scales of sub-blocks, before the scales of the unit, and all.
    constexpr int64_t high_at() const { return inputs * W * low / 8; }
    constexpr int64_t scales_at() const { return high_at() + inputs * W * high / 8; }
    constexpr int64_t scale_bytes() const {
        switch (scales) {
            case Scales::SIX_AND_MINIMUM:
            case Scales::SIGNED_SIX_16: return 12;
            case Scales::FOUR_AND_MINIMUM:
            case Scales::SIGNED_EIGHT: return 16;
            case Scales::SIGNED_SIX_8: return 6;
            default: return 0;
        }
    }
    constexpr int64_t unit_at() const { return scales_at() + W * scale_bytes(); }
    constexpr int64_t step() const {
        return unit_at() + W * (unit == Unit::HALF ? 2 : unit == Unit::HALF_AND_MINIMUM ? 4 : 1);
    }
};

// The numbers of codes. On CPUs whose products take unsigned weights, they are shifted to be so.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int SHIFT = 128;
#else
constexpr int SHIFT = 0;
#endif
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool SIGN_BY_X = true;  // numbers of tables are signed, and x takes their signs
#else
constexpr bool SIGN_BY_X = false;
#endif
#define S(x) int8_t((x) + SHIFT)
alignas(16) constexpr int8_t NONLINEAR[16] = {  // kvalues_iq4nl of ggml
    S(-127), S(-104), S(-83), S(-65), S(-49), S(-35), S(-22), S(-10), S(1), S(13), S(25), S(38), S(53), S(69), S(89), S(113)};
#undef S
// Twice the numbers of e2m1, and 12 more.
alignas(16) constexpr int8_t DOUBLED[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr BlockType Q2_K = {2, 0, 256, 16, 84, Scales::FOUR_AND_MINIMUM, Unit::HALF_AND_MINIMUM};
constexpr BlockType Q3_K = {2, 1, 256, 16, 110, Scales::SIGNED_SIX_16, Unit::HALF, 4};
constexpr BlockType Q4_K = {4, 0, 256, 32, 144, Scales::SIX_AND_MINIMUM, Unit::HALF_AND_MINIMUM};
constexpr BlockType Q5_K = {4, 1, 256, 32, 176, Scales::SIX_AND_MINIMUM, Unit::HALF_AND_MINIMUM};
constexpr BlockType Q6_K = {4, 2, 256, 16, 210, Scales::SIGNED_EIGHT, Unit::HALF, 32};
constexpr BlockType IQ4_XS = {4, 0, 256, 32, 136, Scales::SIGNED_SIX_8, Unit::HALF, SHIFT, NONLINEAR};
constexpr BlockType IQ4_NL = {4, 0, 32, 32, 18, Scales::NONE, Unit::HALF, SHIFT, NONLINEAR};
constexpr BlockType MXFP4 = {4, 0, 32, 32, 17, Scales::NONE, Unit::POWER_OF_TWO, 12, DOUBLED};
constexpr BlockType Q4_1 = {4, 0, 32, 32, 20, Scales::NONE, Unit::HALF_AND_MINIMUM, 0, nullptr, true};
constexpr BlockType Q5_0 = {4, 1, 32, 32, 22, Scales::NONE, Unit::HALF, 16};
constexpr BlockType Q5_1 = {4, 1, 32, 32, 24, Scales::NONE, Unit::HALF_AND_MINIMUM, 0, nullptr, true};
// Not a type of ggml (kernels/int6.py). 16 bits hold the products of 16 inputs.
constexpr BlockType INT6 = {4, 2, 64, 16, 50, Scales::NONE, Unit::HALF, 32};

// In the order of Form.
constexpr const BlockType* TYPES[] = {&Q2_K, &Q3_K, &Q4_K, &Q5_K, &Q6_K, &IQ4_XS, &IQ4_NL, &MXFP4, &Q4_1, &Q5_0, &Q5_1, &INT6};
static inline const BlockType& type_of(const Linear& op) { return *TYPES[op.form - BLOCKS_Q2_K]; }

// Calls f with the type of a form as a template argument.
template <class F> static inline void with_type(int32_t form, F f) {
    switch (form) {
        case BLOCKS_Q2_K: return f.template operator()<Q2_K>();
        case BLOCKS_Q3_K: return f.template operator()<Q3_K>();
        case BLOCKS_Q4_K: return f.template operator()<Q4_K>();
        case BLOCKS_Q5_K: return f.template operator()<Q5_K>();
        case BLOCKS_Q6_K: return f.template operator()<Q6_K>();
        case BLOCKS_IQ4_XS: return f.template operator()<IQ4_XS>();
        case BLOCKS_IQ4_NL: return f.template operator()<IQ4_NL>();
        case BLOCKS_MXFP4: return f.template operator()<MXFP4>();
        case BLOCKS_Q4_1: return f.template operator()<Q4_1>();
        case BLOCKS_Q5_0: return f.template operator()<Q5_0>();
        case BLOCKS_Q5_1: return f.template operator()<Q5_1>();
        default: return f.template operator()<INT6>();
    }
}

// Reading of a unit

constexpr int64_t REGISTER = W * WORD4;                    // bytes of a register of codes
constexpr int32_t EACH = WORD4 == 4 ? 0x01010101 : 1;      // one in each byte of a word

static inline vi codes(const uint8_t* at) { return word_at<WORD4>(at); }

// The codes of word `word` of a unit, or the numbers of its table.
template <const BlockType& T> static inline __attribute__((always_inline)) vi code_word(const uint8_t* unit, int64_t word) {
    vi code;
    if constexpr (T.low == 4) {
        const vi both = codes(unit + word / 2 * REGISTER);
        code = (word % 2 ? both >> 4 : both) & (15 * EACH);
    } else {
        code = (codes(unit + word / 4 * REGISTER) >> int32_t(word % 4 * 2)) & (3 * EACH);
    }
    if constexpr (T.high == 2) {
        const vi high = codes(unit + T.high_at() + word / 4 * REGISTER);
        const int32_t by = int32_t(word % 4 * 2) - T.low;
        code |= (by < 0 ? high << -by : high >> by) & (3 * EACH << T.low);
    }
    if constexpr (T.high == 1) {
        const vi high = codes(unit + T.high_at() + word / 8 * REGISTER);
        const int32_t by = int32_t(word % 8) - T.low;
        code |= (by < 0 ? high << -by : high >> by) & (EACH << T.low);
    }
    if constexpr (T.table != nullptr) {
#if defined(__AVX512F__)
        const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, _mm_load_si128((const __m128i*)T.table));
        code = (vi)_mm512_shuffle_epi8(table, (__m512i)code);
#elif defined(__AVX2__)
        const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)T.table));
        code = (vi)_mm256_shuffle_epi8(table, (__m256i)code);
#elif defined(__ARM_FEATURE_DOTPROD)
        code = (vi)vqtbl1q_s8(vld1q_s8(T.table), (uint8x16_t)code);
#else
        for (int i = 0; i < W; i++) code[i] = T.table[code[i]];
#endif
    }
    return code;
}

// Scales of sub-blocks and minimums of a unit: byte k of lane o of word q belongs to output o and sub-block 4 q + k.
struct SubScales {
    vi scales[4], minimums[4];
};

static inline vi scale_word(const uint8_t* at, int64_t word) { return load((const int32_t*)(at + word * 4 * W)); }

template <const BlockType& T> static inline __attribute__((always_inline)) SubScales sub_scales(const uint8_t* unit) {
    constexpr int32_t FOUR = 0x0f0f0f0f, TWO = 0x03030303;
    const uint8_t* at = unit + T.scales_at();
    SubScales found;
    if constexpr (T.scales == Scales::SIX_AND_MINIMUM) {
        const vi first = scale_word(at, 0), second = scale_word(at, 1), high = scale_word(at, 2);
        found.scales[0] = first & 0x3f3f3f3f;
        found.scales[1] = second & 0x3f3f3f3f;
        found.minimums[0] = ((first >> 6) & TWO) | ((high & FOUR) << 2);
        found.minimums[1] = ((second >> 6) & TWO) | ((high >> 2) & (FOUR << 2));
    }
    if constexpr (T.scales == Scales::FOUR_AND_MINIMUM)
        UNROLL for (int q = 0; q < 4; q++) {
            const vi both = scale_word(at, q);
            found.scales[q] = both & FOUR;
            found.minimums[q] = (both >> 4) & FOUR;
        }
    if constexpr (T.scales == Scales::SIGNED_SIX_16) {
        const vi first = scale_word(at, 0), second = scale_word(at, 1), high = scale_word(at, 2);
        found.scales[0] = (first & FOUR) | ((high & TWO) << 4);
        found.scales[1] = ((first >> 4) & FOUR) | ((high << 2) & (TWO << 4));
        found.scales[2] = (second & FOUR) | (high & (TWO << 4));
        found.scales[3] = ((second >> 4) & FOUR) | ((high >> 2) & (TWO << 4));
    }
    if constexpr (T.scales == Scales::SIGNED_SIX_8) {
        // 16 bits for each output: those of byte k of word q begin at bit 8 (k / 2) + 2 (k % 2) + 4 q.
        const vi low = scale_word(at, 0), bits = __builtin_convertvector(*(const vh_any*)(at + 4 * W), vi);
        const vi apart = (bits & 0xff) | ((bits & 0xff00) << 8), high = apart | (apart << 6);
        found.scales[0] = (low & FOUR) | ((high & TWO) << 4);
        found.scales[1] = ((low >> 4) & FOUR) | (high & (TWO << 4));
    }
    // 6 bits less 32, without borrowing from the next byte
    if constexpr (T.scales == Scales::SIGNED_SIX_16 || T.scales == Scales::SIGNED_SIX_8) {
        constexpr int WORDS = int(T.subs() / 4);
        UNROLL for (int q = 0; q < WORDS; q++) {
            const vi flipped = found.scales[q] ^ 0x20202020, sign = flipped & 0x20202020;
            found.scales[q] = flipped | (sign << 1) | (sign << 2);
        }
    }
    if constexpr (T.scales == Scales::SIGNED_EIGHT)
        UNROLL for (int q = 0; q < 4; q++) found.scales[q] = scale_word(at, q);
    return found;
}

template <const BlockType& T> constexpr bool signed_scales = T.scales >= Scales::SIGNED_SIX_16;

// The scale of a sub-block for its products: an integer for each output, on AVX2 twice in 16 bits.
template <const BlockType& T> static inline __attribute__((always_inline)) vi product_scale(const SubScales& of, int sub) {
    const int k = sub % 4;
    const vi word = of.scales[sub / 4];
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    const int8_t a = int8_t(k), b = int8_t(4 + k), c = int8_t(8 + k), d = int8_t(12 + k);
    if constexpr (signed_scales<T>) {
        const __m128i high = _mm_setr_epi8(-1, a, -1, a, -1, b, -1, b, -1, c, -1, c, -1, d, -1, d);
        return (vi)_mm256_srai_epi16(_mm256_shuffle_epi8((__m256i)word, _mm256_broadcastsi128_si256(high)), 8);
    }
    const __m128i low = _mm_setr_epi8(a, -1, a, -1, b, -1, b, -1, c, -1, c, -1, d, -1, d, -1);
    return (vi)_mm256_shuffle_epi8((__m256i)word, _mm256_broadcastsi128_si256(low));
#else
    if constexpr (signed_scales<T>) return (word << (24 - 8 * k)) >> 24;
    return (word >> (8 * k)) & 255;
#endif
}

static inline vf minimum_of(const SubScales& of, int sub) { return to_float((of.minimums[sub / 4] >> (8 * (sub % 4))) & 255); }

// Scales of a unit.
template <const BlockType& T> static inline __attribute__((always_inline)) vf unit_scale(const uint8_t* unit) {
    const uint8_t* at = unit + T.unit_at();
    if constexpr (T.unit == Unit::POWER_OF_TWO) {
        // 2^(byte - 128), subnormal for 0 and 1
        const vi byte = load(at), normal = (byte - 1) << 23;
        return (vf)(byte == 0 ? vi{} + 0x00200000 : byte == 1 ? vi{} + 0x00400000 : normal);
    }
    return load((const fp16*)at);
}
template <const BlockType& T> static inline __attribute__((always_inline)) vf unit_minimum(const uint8_t* unit) {
    const vf found = load((const fp16*)(unit + T.unit_at()) + W);
    return T.adds_minimum ? found : -found;
}

}  // namespace blocks
