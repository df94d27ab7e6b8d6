// y = x Wᵀ with weights of 8 or 4 bits. A row of x is rounded to 8 bits by its own largest number, so that no row depends
// on its neighbours; sums are whole numbers and exact, of a whole row (8 bits) or a group of inputs (4 bits, whose scaled
// sums are added in float in the order of the groups).
//
// Weights are unsigned: 8 bits with 128 for zero, 4 bits with 8 or a zero point of each group. With q of x signed,
// Σ (w - zero) q = Σ w q - zero · Σ q, and Σ q is known when x is packed. Where groups hold other inputs than neighbouring
// ones, x is packed in their order.
//
// 8 bits: [tile of NR outputs][word][NR][WORD8]. 4 bits: [tile of W outputs][group]{[pair of words][W][WORD4] with the
// first word in the low halves, [W] scales, [W] zero points if there are any}. 8 bits in groups: [tile of W outputs]
// [group]{[word][W][WORD8], [W] scales}. Scales of groups are of the type that the checkpoint has them in. A panel of x:
// [word][R] words of 4 bytes, then the R scales, then the sums Σ q, [R] or [group][R], times the number that stands for
// zero in all weights, where there is one; then, where 8 bits have an excess (excess.h), how many [R] and room for them.
#pragma once

#include <limits>

#include "excess.h"
#include "linear.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int64_t WORD8 = 4, WORD4 = 4, GROUP8 = 4;  // inputs of one word of 8 bits, of 4, and of 8 in groups
#elif defined(__AVX2__)
constexpr int64_t WORD8 = 4, WORD4 = 4, GROUP8 = 2;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int64_t WORD8 = 4, WORD4 = 4, GROUP8 = 4;
#else
constexpr int64_t WORD8 = 1, WORD4 = 1, GROUP8 = 1;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int32_t MIDDLE8 = 0;  // what was added to the 8 bits of a weight when dot8 multiplies: its products are signed
#else
constexpr int32_t MIDDLE8 = 128;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_ROWS4 = 10;
#else
constexpr int MOST_ROWS4 = 8;
#endif
constexpr int64_t BLOCK8 = 64;  // inputs of a matrix tile of 8-bit weights, see linear_amx.h
constexpr int64_t PART = 32;  // inputs whose products with 4 bits can be summed in 16 bits: 8 · 2 · 15 · 127 < 2^15

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// sum[lane] += Σ_i w[lane][i] · x[i] over 4 unsigned bytes of w and signed ones of x
static inline vi dot_bytes(vi sum, vi w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(x));
#endif
}
#endif

// One word of 8-bit weights of W outputs, as dot8 takes it.
static inline vi word8(const uint8_t* w) {
#if defined(__AVX2__)
    return load((const int32_t*)w);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)veorq_u8(vld1q_u8(w), vdupq_n_u8(128));
#else
    return load(w);
#endif
}

// sum[lane] += Σ_i w[lane][i] · x[i] over one word
static inline vi dot8(vi sum, vi w, int32_t x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return dot_bytes(sum, w, x);
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x)), _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
    return sum + w * x;
#endif
}

// The same with the words of groups, whose sums are too many for an excess each.
static inline vi group_word8(const uint8_t* w) {
#ifdef HAS_EXCESS
    return (vi)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)w));
#else
    return word8(w);
#endif
}
static inline vi group_dot8(vi sum, vi w, int32_t x) {
#ifdef HAS_EXCESS
    return sum + (vi)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#else
    return dot8(sum, w, x);
#endif
}

// sums[r] += Σ w · x over PART inputs of 4 bits; x: the words of PART inputs for R rows.
template <int R> static inline __attribute__((always_inline)) void dot4(const uint8_t* w, const int32_t* x, vi (&sums)[R]) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    UNROLL for (int pair = 0; pair < PART / 8; pair++) {
        const vi both = load((const int32_t*)(w + pair * W * WORD4)), low = both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
        UNROLL for (int r = 0; r < R; r++) {
            sums[r] = dot_bytes(sums[r], low, x[(2 * pair) * R + r]);
            sums[r] = dot_bytes(sums[r], high, x[(2 * pair + 1) * R + r]);
        }
    }
#elif defined(__AVX2__)
    const __m256i low_half = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    __m256i narrow_sums[R];
    UNROLL for (int pair = 0; pair < PART / 8; pair++) {
        __m256i both = _mm256_loadu_si256((const __m256i*)(w + pair * W * WORD4));
        __m256i low = _mm256_and_si256(both, low_half), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
        UNROLL for (int r = 0; r < R; r++) {
            __m256i product = _mm256_maddubs_epi16(low, _mm256_set1_epi32(x[(2 * pair) * R + r]));
            narrow_sums[r] = pair ? _mm256_add_epi16(narrow_sums[r], product) : product;
            IN_ORDER(narrow_sums[r]);
        }
        UNROLL for (int r = 0; r < R; r++) {
            __m256i product = _mm256_maddubs_epi16(high, _mm256_set1_epi32(x[(2 * pair + 1) * R + r]));
            narrow_sums[r] = _mm256_add_epi16(narrow_sums[r], product);
            IN_ORDER(narrow_sums[r]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) sums[r] += (vi)_mm256_madd_epi16(narrow_sums[r], one);
#elif defined(__ARM_FEATURE_DOTPROD)
    UNROLL for (int pair = 0; pair < PART / 8; pair++) {
        const uint8x16_t both = vld1q_u8(w + pair * W * WORD4);
        const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        UNROLL for (int r = 0; r < R; r++) {
            const int32x4_t sum = vdotq_s32((int32x4_t)sums[r], low, vreinterpretq_s8_s32(vdupq_n_s32(x[(2 * pair) * R + r])));
            sums[r] = (vi)vdotq_s32(sum, high, vreinterpretq_s8_s32(vdupq_n_s32(x[(2 * pair + 1) * R + r])));
        }
    }
#else
    for (int pair = 0; pair < PART / 2; pair++) {
        vi both = load(w + pair * W), low = both & 15, high = both >> 4;
        for (int r = 0; r < R; r++) sums[r] += low * x[(2 * pair) * R + r] + high * x[(2 * pair + 1) * R + r];
    }
#endif
}

// The same with 8 bits.
template <int R> static inline __attribute__((always_inline)) void dot8_part(const uint8_t* w, const int32_t* x, vi (&sums)[R]) {
    UNROLL for (int i = 0; i < PART / GROUP8; i++)
        UNROLL for (int r = 0; r < R; r++) {
            sums[r] = group_dot8(sums[r], group_word8(w + i * W * GROUP8), x[i * R + r]);
            IN_ORDER(sums[r]);
        }
}

static inline vf group_scales(const uint8_t* at, int32_t type) {
    return type == F16 ? load((const fp16*)at) : type == BF16 ? load((const bf16*)at) : load((const float*)at);
}

// How x and the weights of a quantised linear lie in memory.
struct Quantised {
    int64_t word, words, sums, width, most_rows;  // inputs of a word; words and sums of a row; outputs of a tile
    int64_t excess = 0;                           // words of a row for its excess, their number among them
    explicit Quantised(const Linear& op) {
        const bool groups = op.form == TILES_INT4 || op.form == GROUPS_INT8;
        word = op.form == TILES_INT4 ? WORD4 : groups ? GROUP8 : WORD8;
        const int64_t unit = groups ? op.group : op.form == AMX_INT8 ? BLOCK8 : word;
        words = (op.inputs + unit - 1) / unit * unit / word;
        sums = groups ? words * word / op.group : 1;
        width = groups ? W : NR;
        most_rows = groups ? MOST_ROWS4 : MOST_ROWS;
#ifdef HAS_EXCESS
        if (op.form == TILES_INT8) most_rows = 4, excess = 1 + most_excess(words) * int64_t(sizeof(Excess) / 4);
#endif
    }
    int64_t panel(int64_t rows) const { return (words + 1 + sums + excess) * rows; }  // in words of 4 bytes
    int64_t tiles(const Linear& op) const { return (op.outputs + width - 1) / width; }
};

// The largest |x| over 127, or NaN if some x is not finite. Without their signs numbers are in the order of their bits.
static inline float row_scale(const float* x, int64_t size) {
    const int32_t unsign = 0x7fffffff, infinite = 0x7f800000;
    vi tops = {};
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const vi bits = (vi)load(x + i) & unsign;
        tops = tops > bits ? tops : bits;
    }
    int32_t top = 0;
    for (int lane = 0; lane < W; lane++) top = std::max(top, tops[lane]);
    for (; i < size; i++) top = std::max(top, int32_t(float_to_bits(x[i])) & unsign);
    return top >= infinite ? std::numeric_limits<float>::quiet_NaN() : bits_to_float(uint32_t(top)) / 127.f;
}

static inline void store_bytes(int8_t* out, vi whole) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // what the compiler makes of a conversion goes byte by byte
    const __m128i low = _mm256_castsi256_si128((__m256i)whole), high = _mm256_extracti128_si256((__m256i)whole, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    _mm_storel_epi64((__m128i*)out, _mm_packs_epi16(words, words));
#else
    const vb bytes = __builtin_convertvector(whole, vb);
    std::memcpy(out, &bytes, W);
#endif
}

// x / scale to the nearest whole number, ties to even; zeros for a row that is not finite. The product must be rounded
// before it becomes whole, which a fused multiply-add would not do.
__attribute__((optimize("fp-contract=off"), noinline)) static void
round_row(const float* x, int64_t size, float scale, int8_t* out) {
    const float inverse = scale > 0 ? 1.f / scale : 0.f, magic = 12582912.f;
    if (!(scale > 0)) { std::memset(out, 0, size_t(size)); return; }
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        vf product = load(x + i) * inverse;
        store_bytes(out + i, __builtin_convertvector((product + magic) - magic, vi));
    }
    for (; i < size; i++) {
        float product = x[i] * inverse;
        out[i] = int8_t((product + magic) - magic);
    }
}

// A row of x, its inputs in the order in which groups hold them.
static inline const float* row_of(const Linear& op, int64_t token, Scratch& scratch) {
    const float* x = op.x + token * op.x_stride;
    if (!op.order) return x;
    float* ordered = at_least(scratch.sums, size_t(op.inputs));
    for (int64_t i = 0; i < op.inputs; i++) ordered[i] = x[op.order[i]];
    return ordered;
}

// Whole numbers of 8 bits as words of `word` = 1 or 2 of them.
static const void* widened(const int8_t* row, int64_t count, int64_t word, void* out) {
    if (word == 1) std::copy(row, row + count, (int32_t*)out);
    else std::copy(row, row + count, (int16_t*)out);
    return out;
}

static void quantise_row(const Linear& op, int64_t token, int64_t tokens, float* packed, Scratch& scratch) {
    const Quantised form(op);
    const Panels panels(tokens, form.most_rows);
    const int64_t rows = panels.rows, place = token % rows, inputs = form.words * form.word;
    int32_t* panel = (int32_t*)packed + token / rows * form.panel(rows);
    const float* x = row_of(op, token, scratch);
    const float scale = row_scale(x, op.inputs);
    int8_t* row = (int8_t*)at_least(scratch.wide, size_t(inputs / 4 + inputs + 32));
    round_row(x, op.inputs, scale, row);
    std::memset(row + op.inputs, 0, size_t(inputs - op.inputs));
    int32_t* sums = panel + (form.words + 1) * rows;
    const int32_t middle = op.form != TILES_INT4 ? MIDDLE8 : op.zeros ? 1 : 8;
    const int64_t each = inputs / form.sums;
    for (int64_t part = 0; part < form.sums; part++) {
        int32_t total = 0;
        for (int64_t i = part * each; i < (part + 1) * each; i++) total += row[i];
        sums[part * rows + place] = total * middle;
    }
#ifdef HAS_EXCESS
    if (form.excess) {
        int32_t* counts = sums + form.sums * rows;
        counts[place] = take_excess(row, form.words, (Excess*)(counts + rows) + place * most_excess(form.words));
    }
#endif
    const void* words = row;
    if (form.word < 4) words = widened(row, inputs, form.word, (int8_t*)row + (inputs + 63) / 64 * 64);
    for (int64_t i = 0; i < form.words; i++) std::memcpy(panel + i * rows + place, (const char*)words + 4 * i, 4);
    ((float*)panel)[form.words * rows + place] = scale;
    if (token != tokens - 1) return;
    for (int64_t after = place + 1; after < rows; after++)
        for (int64_t i = 0; i < form.words + 1 + form.sums + (form.excess > 0); i++) panel[i * rows + after] = 0;
}

// Neighbouring tiles of 8-bit weights that multiply a piece of a panel in turn, and its words.
#ifdef HAS_EXCESS
constexpr int64_t MOST_TILES = 2, DEEP = 224;
#else
constexpr int64_t MOST_TILES = 4, DEEP = 112;
#endif
constexpr int64_t FEW_PANELS = 4;  // so many are near anyway, and take one tile at a time, as it comes from memory

// Whether a row of the panel has more pairs with an excess than were taken off.
template <int R> static inline bool too_many([[maybe_unused]] const Quantised& form, [[maybe_unused]] const int32_t* panel) {
#ifdef HAS_EXCESS
    const int32_t* counts = panel + (form.words + 2) * R;
    return std::find(counts, counts + R, TOO_MANY) != counts + R;
#else
    return false;
#endif
}

// How some words are multiplied: as they lie; as they were widened before; each of two neighbours by itself (excess.h).
enum class Words { LYING, WIDENED, HALVES };

// Some words of a tile of 8-bit weights for a panel, onto sums, `stride` apart. With each word, `ahead` bytes more of `next`
// are fetched.
template <int R, Words HOW>
__attribute__((noinline)) static void int8_words(const void* weights, const int32_t* x, int64_t words, bool begins,
                                                 const uint8_t* next, int64_t ahead, int32_t* sums, int64_t stride) {
    constexpr int64_t BYTES = W * (HOW == Words::WIDENED ? int64_t(sizeof(int32_t)) : WORD8);
    const uint8_t* w = (const uint8_t*)weights;
    vi left[R], right[R];
    UNROLL for (int r = 0; r < R; r++) {
        left[r] = begins ? vi{} : load(sums + r * stride);
        right[r] = begins ? vi{} : load(sums + r * stride + W);
    }
    for (int64_t i = 0; i < words; i++, w += 2 * BYTES, x += R, next += ahead) {
        __builtin_prefetch(next);
        if (ahead > 64) __builtin_prefetch(next + 64);
        const vi w0 = HOW == Words::WIDENED ? load((const int32_t*)w) : word8(w);
        const vi w1 = HOW == Words::WIDENED ? load((const int32_t*)w + W) : word8(w + BYTES);
        UNROLL for (int r = 0; r < R; r++) {
            if constexpr (HOW == Words::HALVES) {
                for (const int32_t half : {int32_t(0x00ff00ff), int32_t(0xff00ff00)}) {
                    left[r] = dot8(left[r], w0 & half, x[r]);
                    right[r] = dot8(right[r], w1 & half, x[r]);
                }
            } else {
                left[r] = dot8(left[r], w0, x[r]);
                right[r] = dot8(right[r], w1, x[r]);
            }
            IN_ORDER(left[r]);
            IN_ORDER(right[r]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        store(sums + r * stride, left[r]);
        store(sums + r * stride + W, right[r]);
    }
}

// Some neighbouring tiles of 8-bit weights for the panels of a chunk, which all multiply DEEP words before the next ones.
// Weights that lie narrower than they are multiplied are widened once for many panels.
template <int R>
static void int8_tiles(const Linear& op, const Quantised& form, int64_t tokens, const int32_t* packed, int64_t first,
                       int64_t count, int64_t tile, int64_t tiles, Scratch& scratch) {
    constexpr int64_t BYTES = NR * WORD8;
    const bool widens = W * WORD8 < int64_t(sizeof(vi)) && count > FEW_PANELS;
    const int64_t stride = tiles * NR, apart = form.words * BYTES, deep = count > 1 ? DEEP : form.words;
    const uint8_t* w = (const uint8_t*)op.weight + tile * apart;
    float* out = at_least(scratch.sums, size_t(CHUNK_PANELS) * R * MOST_TILES * NR);
    int32_t* wide = (int32_t*)((uintptr_t(at_least(scratch.wide, MOST_TILES * DEEP * NR + 16)) + 63) / 64 * 64);
    for (int64_t k = 0; k < form.words; k += deep) {
        const int64_t depth = std::min(deep, form.words - k);
        for (int64_t t = 0; widens && t < tiles; t++)
            for (int64_t i = 0; i < 2 * depth; i++)
                store(wide + (t * 2 * DEEP + i) * W, word8(w + t * apart + k * BYTES + i * W * WORD8));
        for (int64_t p = 0; p < count; p++)
            for (int64_t t = 0; t < tiles; t++) {
                const int32_t* x = packed + (first + p) * form.panel(R) + k * R;
                const uint8_t* piece = w + t * apart + k * BYTES;
                int32_t* sums = (int32_t*)out + p * R * stride + t * NR;
                // A share of what is multiplied after this is fetched with each panel.
                const uint8_t* after = k + depth < form.words ? piece + depth * BYTES : w + (tiles + t) * apart;
                const uint8_t* next = count > 1 ? after + p * depth * BYTES / count : piece + FETCH;
                const int64_t ahead = BYTES / count;
                if (widens) int8_words<R, Words::WIDENED>(wide + t * 2 * DEEP * W, x, depth, k == 0, next, ahead, sums, stride);
                else if (too_many<R>(form, x - k * R)) int8_words<R, Words::HALVES>(piece, x, depth, k == 0, next, ahead, sums, stride);
                else int8_words<R, Words::LYING>(piece, x, depth, k == 0, next, ahead, sums, stride);
            }
    }
#ifdef HAS_EXCESS
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t p = 0; p < count; p++) {
            const int32_t* counts = packed + (first + p) * form.panel(R) + (form.words + 2) * R;
            const Excess* found = (const Excess*)(counts + R);
            for (int r = 0; r < R; r++, found += most_excess(form.words))
                if (counts[r] > 0) add_excess(found, counts[r], w + t * apart, (int32_t*)out + (p * R + r) * stride + t * NR);
        }
#endif
    float scales[MOST_TILES * NR] = {};
    std::memcpy(scales, op.scales + tile * NR, sizeof(float) * size_t(std::min(stride, op.outputs - tile * NR)));
    for (int64_t p = 0; p < count; p++) {
        const int32_t* tail = packed + (first + p) * form.panel(R) + form.words * R;
        for (int r = 0; r < R; r++) {
            float* at = out + (p * R + r) * stride;
            for (int64_t n = 0; n < stride; n += W) {
                const vi whole = load((const int32_t*)at + n) - tail[R + r];
                store(at + n, to_float(whole) * (load(scales + n) * ((const float*)tail)[r]));
            }
        }
    }
    put(op, tokens, first * R, count * R, tile * NR, stride, out);
}

// One tile of weights in groups for the panels of a chunk.
template <int R, bool NARROW, bool ZEROS>
static void groups_tile(const Linear& op, const Quantised& form, int64_t tokens, const int32_t* packed, int64_t first,
                      int64_t count, int64_t tile, Scratch& scratch) {
    const int64_t group = op.group, bytes = NARROW ? group * W / 2 : group * W;
    const int64_t scale_bytes = (op.scale_type == F32 ? 4 : 2) * W, step = bytes + scale_bytes + (ZEROS ? W : 0);
    const uint8_t* w = (const uint8_t*)op.weight + tile * form.sums * step;
    float* out = at_least(scratch.sums, size_t(CHUNK_PANELS) * R * W);
    const int64_t deep = count > 1 ? std::max<int64_t>(1, 512 / group) : form.sums;
    for (int64_t g = 0; g < form.sums; g += deep) {
        const int64_t last = std::min(form.sums, g + deep);
        for (int64_t p = 0; p < count; p++) {
            const int32_t* panel = packed + (first + p) * form.panel(R);
            const int32_t* row_sums = panel + (form.words + 1) * R;
            float* sums = out + p * R * W;
            vf acc[R];
            UNROLL for (int r = 0; r < R; r++) acc[r] = g ? load(sums + r * W) : vf{};
            for (int64_t i = g, fetched = g + p; i < last; i++) {
                const uint8_t* at = w + i * step;
                const uint8_t* ahead = at + (count > 1 ? deep * step : FETCH);
                if (i == fetched) {  // a share of the next groups with each panel
                    for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(ahead + line);
                    fetched += count;
                }
                vi found[R] = {};
                for (int64_t part = 0; part < group; part += PART) {
                    if constexpr (NARROW) dot4<R>(at + part * W / 2, panel + (i * group + part) / WORD4 * R, found);
                    else dot8_part<R>(at + part * W, panel + (i * group + part) / GROUP8 * R, found);
                }
                const vf scale = group_scales(at + bytes, op.scale_type);
                UNROLL for (int r = 0; r < R; r++) {
                    vi middle = vi{} + row_sums[i * R + r];
                    if constexpr (ZEROS) middle *= load(at + bytes + scale_bytes);
                    acc[r] += scale * to_float(found[r] - middle);
                }
            }
            UNROLL for (int r = 0; r < R; r++) store(sums + r * W, acc[r]);
        }
    }
    for (int64_t p = 0; p < count; p++) {
        const float* scales = (const float*)(packed + (first + p) * form.panel(R)) + form.words * R;
        for (int r = 0; r < R; r++) store(out + (p * R + r) * W, load(out + (p * R + r) * W) * scales[r]);
    }
    put(op, tokens, first * R, count * R, tile * W, W, out);
}

// Pieces [begin, end): chunks of panels × tiles, tiles counting fastest.
template <int R = 1>
static void quantised_pieces(const Linear& op, int64_t tokens, const Quantised& form, const Panels& panels,
                             const float* packed, int64_t begin, int64_t end, Scratch& scratch) {
    if (panels.rows != R) {
        if constexpr (R < std::max(MOST_ROWS, MOST_ROWS4)) quantised_pieces<R + 1>(op, tokens, form, panels, packed, begin, end, scratch);
        return;
    }
    const int64_t tiles = form.tiles(op);
    for (int64_t piece = begin, next; piece < end; piece = next) {
        const int64_t first = piece / tiles * panels.chunk, count = std::min(panels.chunk, panels.count - first);
        const int32_t* x = (const int32_t*)packed;
        const int64_t tile = piece % tiles;
        next = piece + 1;
        if (op.form == TILES_INT8 && count > FEW_PANELS) next = std::min({piece + MOST_TILES, piece - tile + tiles, end});
        if (op.form == TILES_INT8) {
            if constexpr (R <= MOST_ROWS) int8_tiles<R>(op, form, tokens, x, first, count, tile, next - piece, scratch);
        } else if constexpr (R <= MOST_ROWS4) {
            if (op.form == GROUPS_INT8) groups_tile<R, false, false>(op, form, tokens, x, first, count, tile, scratch);
            else if (op.zeros) groups_tile<R, true, true>(op, form, tokens, x, first, count, tile, scratch);
            else groups_tile<R, true, false>(op, form, tokens, x, first, count, tile, scratch);
        }
    }
}
