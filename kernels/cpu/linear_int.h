// y = x Wᵀ with weights of 8 or 4 bits. x is quantized to 8 bits in blocks of neighbouring inputs. Each block has its own
// scale, so a large activation costs the precision of its block only, and no row depends on its neighbours. One or two
// activations of a block that are outlier_ratio times larger than the next one are outliers: they stay in float, and the
// others determine the scale. Without this, int8 costs SmolLM2-135M 7 times the KL divergence.
//
// Sums within a block are integers and exact. Scaled sums of blocks are added in float in the order of the inputs, and so
// are the products of outliers, block by block and the largest first, apart from these; both sums are added last.
//
// Weights are unsigned: 8 bits with 128 for zero, 4 bits with 8 or a zero point of each group. With q of x signed,
// Σ (w - zero) q = Σ w q - zero · Σ q, and Σ q is known when x is packed. Where groups hold other inputs than neighbouring
// ones, x is packed in their order.
//
// 8 bits: [tile of NR outputs][group]{[word][NR][WORD8], [NR] scales}. 4 bits: [tile of W outputs][group]{[pair of
// words][W][WORD4] with the first word in the low halves, [W] scales, [W] zero points if there are any}. A group is one
// block of inputs or several. Scales have the type of the checkpoint's. A panel of x: [word][R] words of 4 bytes, which hold
// WORD8 / PARTS8 or WORD4 numbers, then [block][R] scales, then [block][R] totals: -Σ q times the number that represents zero
// in all weights, if there is one; then the list of outliers of each row.
#pragma once

#include <limits>
#include <utility>

#include "linear.h"

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int64_t WORD8 = 4, WORD4 = 4;  // inputs of one word of 8 bits and of 4
#else
constexpr int64_t WORD8 = 1, WORD4 = 1;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int32_t MIDDLE8 = 0;  // dot8 multiplies signed weights
#else
constexpr int32_t MIDDLE8 = 128;  // what was added to the 8 bits of a weight when dot8 multiplies
#endif
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
// Products of bytes would take three instructions of the two ports that multiply, those of 16-bit numbers take two. So a word
// of 8-bit weights has two parts, inputs 0 and 2 and inputs 1 and 3, and a word of x has two numbers.
constexpr int PARTS8 = 2;
#else
constexpr int PARTS8 = 1;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_ROWS4 = 10, MOST_ROWS8 = MOST_ROWS;
#else
constexpr int MOST_ROWS4 = 8, MOST_ROWS8 = MOST_ROWS;
#endif
constexpr int64_t LARGE_BLOCK = 64;   // inputs of a block of x, if groups consist of such blocks; else PART
constexpr int64_t MOST_OUTLIERS = 2;  // of a block
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

// One part of a word of 8-bit weights of W outputs, as dot8 takes it.
static inline vi word8(const uint8_t* w, [[maybe_unused]] int part) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return load((const int32_t*)w);
#elif defined(__AVX2__)
    const vi bytes = load((const int32_t*)w);
    return part ? (vi)_mm256_srli_epi16((__m256i)bytes, 8) : bytes & 0x00ff00ff;
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)veorq_u8(vld1q_u8(w), vdupq_n_u8(128));
#else
    return load(w);
#endif
}

// sum[lane] += Σ_i w[lane][i] · x[i] over one part of a word
static inline vi dot8(vi sum, vi w, int32_t x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return dot_bytes(sum, w, x);
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
    return sum + w * x;
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

// W scales of vector `v` of a tile of outputs.
static inline vf group_scales(const uint8_t* at, int32_t type, int v = 0) {
    const int64_t first = v * W;
    return type == F16 ? load((const fp16*)at + first) : type == BF16 ? load((const bf16*)at + first) : load((const float*)at + first);
}

// Inputs of a block of x; a group is a whole number of blocks.
static inline int64_t block_of(const Linear& op) { return op.group % LARGE_BLOCK ? PART : LARGE_BLOCK; }

// Words of 4 bytes of a row's list of outliers: their number, then an Outlier for each.
constexpr int64_t OUTLIER_WORDS = 4;
static inline int64_t outlier_words(int64_t blocks) { return 1 + OUTLIER_WORDS * MOST_OUTLIERS * blocks; }

// A smaller ratio is more accurate and takes more time. With 4 bits the rounding of the weights dominates.
static inline float outlier_ratio(const Linear& op) { return op.form == TILES_INT4 ? 2.5f : 1.5f; }

// Memory layout of x and of the weights of a quantized linear.
struct Quantised {
    int64_t word, words, block, blocks, width, most_rows;  // inputs of a word of x; words of a row; inputs of a block;
                                                           // blocks of a row; outputs of a tile
    explicit Quantised(const Linear& op) : block(block_of(op)) {
        const bool narrow = op.form == TILES_INT4;
        word = narrow ? WORD4 : WORD8 / PARTS8;
        words = (op.inputs + op.group - 1) / op.group * op.group / word;
        blocks = words * word / block;
        width = narrow ? W : NR;
        most_rows = narrow ? MOST_ROWS4 : MOST_ROWS8;
    }
    int64_t list() const { return outlier_words(blocks); }
    int64_t panel(int64_t rows) const { return (words + 2 * blocks + list()) * rows; }  // in words of 4 bytes
    // The outliers of row `place` of a panel.
    template <class I> I* outliers(I* panel, int64_t rows, int64_t place) const {
        return panel + (words + 2 * blocks) * rows + place * list();
    }
    int64_t tiles(const Linear& op) const { return (op.outputs + width - 1) / width; }
};

static inline int32_t largest(vi x) {
    over_halves([&](auto turn) {
        const vi turned = turn(x);
        x = x > turned ? x : turned;
    });
    return x[0];
}
static inline int32_t total(vi x) {
    over_halves([&](auto turn) { x += turn(x); });
    return x[0];
}

// The three largest |x| of each lane, as bits: without their signs numbers are in the order of their bits.
struct Tops {
    vi first = {}, second = {}, third = {};
    void add(vi x) {
        const vi rest = first < x ? first : x, left = second < rest ? second : rest;
        first = first > x ? first : x;
        second = second > rest ? second : rest;
        third = third > left ? third : left;
    }
    void add_lanes() {  // of all lanes, into the first one
        over_halves([&](auto turn) {
            const vi a = turn(first), b = turn(second), c = turn(third);
            add(a), add(b), add(c);
        });
    }
};

// The last place of |x| with these bits.
static inline int64_t place_of(const float* x, int64_t size, int32_t bits) {
    vi lane, found = {};
    for (int i = 0; i < W; i++) lane[i] = i;
    for (int64_t i = 0; i < size; i += W) {
        const vi same = ((vi)load(x + i) & 0x7fffffff) == bits;
        found = same ? lane + int32_t(i) : found;
    }
    return largest(found);
}

// Entry of a row's list of outliers. A word of the weights is at `offset` in a tile; its value begins at bit `shift`.
struct Outlier { int32_t offset, shift, scale; float value; };  // scale: offset of the group's scale

// The scale of a block whose largest |x| is `size`; 0 if its inverse is not finite.
static inline float scale_of(float size) {
    const float scale = size / 127.f;
    return scale < std::numeric_limits<float>::min() ? 0.f : scale;
}

// Adds the outliers of a block that begins at `input` to a row's list and makes them 0 in x, of `size` numbers, a multiple
// of W. Returns the scale of the others: the largest |x| over 127, NaN if some x is not finite, 0 if its inverse is not.
template <class F>
static inline float take_outliers(float* x, int64_t size, int64_t input, float ratio, int32_t* list, F entry) {
    vi most = {};
    for (int64_t i = 0; i < size; i += W) {
        const vi bits = (vi)load(x + i) & 0x7fffffff;
        most = most > bits ? most : bits;
    }
    const int32_t top = largest(most);
    if (top >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    // With more numbers than that of this size none is an outlier. Most blocks are such.
    vi many = {};
    for (int64_t i = 0; i < size; i += W) many -= (vf)((vi)load(x + i) & 0x7fffffff) * ratio >= bits_to_float(uint32_t(top));
    if (total(many) > MOST_OUTLIERS) return scale_of(bits_to_float(uint32_t(top)));
    Tops tops;
    for (int64_t i = 0; i < size; i += W) tops.add((vi)load(x + i) & 0x7fffffff);
    tops.add_lanes();
    const int32_t found[MOST_OUTLIERS + 1] = {tops.first[0], tops.second[0], tops.third[0]};
    float sizes[MOST_OUTLIERS + 1];
    for (int i = 0; i <= MOST_OUTLIERS; i++) sizes[i] = bits_to_float(uint32_t(found[i]));
    const int count = sizes[1] > ratio * sizes[2] ? 2 : sizes[0] > ratio * sizes[1] ? 1 : 0;
    Outlier made[MOST_OUTLIERS];
    for (int i = 0; i < count; i++) {
        const int64_t place = place_of(x, size, found[i]);
        made[i] = entry(input + place);
        made[i].value = std::exchange(x[place], 0.f);
    }
    std::memcpy(list + 1 + OUTLIER_WORDS * list[0], made, sizeof(Outlier) * size_t(count));
    list[0] += count;
    return scale_of(sizes[count]);
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

// x / scale to the nearest integer, ties to even; zeros for a block that is zero or not finite. The product must be rounded
// first and then converted, which a fused multiply-add would not do. Returns the sum of the integers.
__attribute__((optimize("fp-contract=off"), noinline)) static int32_t
round_block(const float* x, int64_t size, float scale, int8_t* out) {
    if (!(scale > 0)) { std::memset(out, 0, size_t(size)); return 0; }
    const float inverse = 1.f / scale, magic = 12582912.f;
    vi sums = {};
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const vf product = load(x + i) * inverse;
        const vi whole = __builtin_convertvector((product + magic) - magic, vi);
        sums += whole;
        store_bytes(out + i, whole);
    }
    int32_t sum = total(sums);
    for (; i < size; i++) {
        float product = x[i] * inverse;
        out[i] = int8_t((product + magic) - magic);
        sum += out[i];
    }
    return sum;
}

// Layout of a tile of outputs.
struct GroupTile {
    int64_t group, bytes, scale_bytes, step;  // inputs of a group; bytes of its weights, of its scales, and to the next one
    explicit GroupTile(const Linear& op) : group(op.group) {
        const int64_t width = op.form == TILES_INT4 ? W : NR;
        bytes = op.form == TILES_INT4 ? group * W / 2 : group * NR;
        scale_bytes = (op.scale_type == F32 ? 4 : 2) * width;
        step = bytes + scale_bytes + (op.zeros ? W : 0);
    }
};

// Where the weights of an input are in a tile.
static inline auto places_of(const Linear& op) {
    const GroupTile form(op);
    const bool narrow = op.form == TILES_INT4;
    return [=](int64_t input) {
        const int64_t within = input % form.group, start = input / form.group * form.step;
        const int64_t offset = narrow ? within / (2 * WORD4) * W * WORD4 : within / WORD8 * NR * WORD8;
        const int64_t shift = narrow ? within % WORD4 * 8 + within / WORD4 % 2 * 4 : within % WORD8 * 8;
        return Outlier{int32_t(start + offset), int32_t(shift), int32_t(start + form.bytes), 0.f};
    };
}

// Quantizes a row of x: `inputs` integers, whole blocks (0 from op.inputs on), the scale and the sum of the integers of each block,
// `apart` from the next block's, and the list of outliers.
static void quantise_blocks(const Linear& op, const float* x, int64_t inputs, int8_t* row, float* scales, int32_t* sums,
                            int64_t apart, int32_t* list) {
    const int64_t block = block_of(op);
    const float ratio = outlier_ratio(op);
    const auto entry = places_of(op);
    alignas(64) float own[LARGE_BLOCK];
    list[0] = 0;
    for (int64_t at = 0; at < inputs; at += block, scales += apart, sums += apart) {
        const int64_t count = std::clamp<int64_t>(op.inputs - at, 0, block);
        std::memcpy(own, x + at, sizeof(float) * size_t(count));
        std::memset(own + count, 0, sizeof(float) * size_t(LARGE_BLOCK - count));
        *scales = take_outliers(own, block, at, ratio, list, entry);
        *sums = round_block(own, block, *scales, row + at);
    }
}

// W words of weights, each in its place: a word of one input is one byte.
template <int64_t WORD> static inline vi word_at(const uint8_t* at) {
    if constexpr (WORD == 1) return load(at);
    else return load((const int32_t*)at);
}

// sums[n] += Σ x · w over the outliers of a row, for V · W outputs of a tile from vector `first` on. zeros: bytes from a scale
// to its zero point.
template <int V, bool NARROW, bool ZEROS, class S>
__attribute__((noinline)) static void add_outliers(const int32_t* list, const uint8_t* w, int64_t zeros, int first, float* sums) {
    constexpr int64_t WORD = NARROW ? WORD4 : WORD8;
    const Outlier* entries = (const Outlier*)(list + 1);
    vf sum[V] = {};
    for (int32_t i = 0; i < list[0]; i++) {
        const Outlier one = entries[i];
        UNROLL for (int v = 0; v < V; v++) {
            const int64_t output = (first + v) * W;
            const vi value = (word_at<WORD>(w + one.offset + output * WORD) >> one.shift) & (NARROW ? 15 : 255);
            const vi zero = ZEROS ? load(w + one.scale + zeros) : vi{} + (NARROW ? 8 : 128);
            sum[v] += load((const S*)(w + one.scale) + output) * one.value * to_float(value - zero);
        }
    }
    UNROLL for (int v = 0; v < V; v++) store(sums + v * W, load(sums + v * W) + sum[v]);
}
template <int V, bool NARROW, bool ZEROS>
static inline void add_outliers(const Linear& op, const int32_t* list, const uint8_t* w, int first, float* sums) {
    if (!list[0]) return;
    const int64_t zeros = GroupTile(op).scale_bytes;
    if (op.scale_type == F16) add_outliers<V, NARROW, ZEROS, fp16>(list, w, zeros, first, sums);
    else if (op.scale_type == BF16) add_outliers<V, NARROW, ZEROS, bf16>(list, w, zeros, first, sums);
    else add_outliers<V, NARROW, ZEROS, float>(list, w, zeros, first, sums);
}

// A row of x, its inputs in the order in which groups hold them.
static inline const float* row_of(const Linear& op, int64_t token, Scratch& scratch) {
    const float* x = op.x + token * op.x_stride;
    if (!op.order) return x;
    float* ordered = at_least(scratch.sums, size_t(op.inputs));
    for (int64_t i = 0; i < op.inputs; i++) ordered[i] = x[op.order[i]];
    return ordered;
}

// Words of two numbers of 16 bits: inputs 0 and 2, then 1 and 3, of each 4.
static void in_parts(const int8_t* row, int64_t inputs, int32_t* words) {
    for (int64_t i = 0; i < inputs / 4; i++) {
        uint32_t four;
        std::memcpy(&four, row + 4 * i, 4);
        words[2 * i] = (int32_t(four << 24) >> 24 & 0xffff) | int32_t(int32_t(four << 8) >> 24) * 65536;
        words[2 * i + 1] = (int32_t(four << 16) >> 24 & 0xffff) | (int32_t(four) >> 24) * 65536;
    }
}

static void quantise_row(const Linear& op, int64_t token, int64_t tokens, float* packed, Scratch& scratch) {
    const Quantised form(op);
    const Panels panels(tokens, form.most_rows);
    const int64_t rows = panels.rows, place = token % rows, inputs = form.words * form.word;
    int32_t* panel = (int32_t*)packed + token / rows * form.panel(rows);
    const float* x = row_of(op, token, scratch);
    int32_t* wide = (int32_t*)at_least(scratch.wide, size_t(2 * inputs + 32));
    int8_t* row = (int8_t*)(wide + inputs);
    int32_t *scales = panel + form.words * rows + place, *totals = scales + form.blocks * rows;
    quantise_blocks(op, x, inputs, row, (float*)scales, totals, rows, form.outliers(panel, rows, place));
    const int32_t middle = op.form != TILES_INT4 ? MIDDLE8 : op.zeros ? 1 : 8;
    for (int64_t block = 0; block < form.blocks; block++) totals[block * rows] *= -middle;
    const void* words = row;
    if (form.word == 1) std::copy(row, row + inputs, wide), words = wide;
    if (form.word == 2) in_parts(row, inputs, wide), words = wide;
    for (int64_t i = 0; i < form.words; i++) std::memcpy(panel + i * rows + place, (const char*)words + 4 * i, 4);
    if (token != tokens - 1) return;
    for (int64_t after = place + 1; after < rows; after++) {
        for (int64_t i = 0; i < form.words + 2 * form.blocks; i++) panel[i * rows + after] = 0;
        form.outliers(panel, rows, after)[0] = 0;
    }
}

// Neighbouring tiles of 8-bit weights that multiply a piece of a panel in turn, and the inputs of that piece.
constexpr int64_t MOST_TILES = 4, DEEP = 448;
constexpr int64_t FEW_PANELS = 4;  // so many are near anyway, and take one tile at a time, as it comes from memory

// Some groups of a tile of 8-bit weights for a panel, onto sums, `stride` apart. scales and totals: of the blocks of x. BLOCK:
// inputs of a block of x. With each line of weights, 1 / share as much of `next` is fetched. With GCC's tree-ter, all products
// of a word would precede their additions, and sums would move between registers and memory.
template <int R, int64_t BLOCK>
__attribute__((noinline, optimize("no-tree-ter"))) static void
int8_groups(const Linear& op, const uint8_t* w, const int32_t* x, int64_t groups, const float* scales, const int32_t* totals,
            bool begins, const uint8_t* next, int64_t share, float* sums, int64_t stride) {
    constexpr int64_t LINE = NR * WORD8;
    const auto [group, bytes, scale_bytes, step] = GroupTile(op);
    const int64_t blocks = group / BLOCK, ahead = LINE / share;
    vf acc[R][2];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 2; v++) acc[r][v] = begins ? vf{} : load(sums + r * stride + v * W);
    for (; groups > 0; groups--, w += scale_bytes, next += scale_bytes / share) {
        const uint8_t* group_end = w + bytes;
        for (int64_t block = 0; block < blocks; block++, scales += R, totals += R) {
            vi left[R], right[R];
            UNROLL for (int r = 0; r < R; r++) left[r] = right[r] = vi{} + totals[r];
            _Pragma("GCC unroll 2") for (int64_t i = 0; i < BLOCK / WORD8; i++, w += LINE, next += ahead) {
                UNROLL for (int64_t at = 0; at < LINE; at += 64) __builtin_prefetch(next + at);
                UNROLL for (int part = 0; part < PARTS8; part++, x += R) {
                    const vi w0 = word8(w, part), w1 = word8(w + LINE / 2, part);
                    UNROLL for (int r = 0; r < R; r++) {
                        left[r] = dot8(left[r], w0, x[r]);
                        right[r] = dot8(right[r], w1, x[r]);
                    }
                }
            }
            const vf scale0 = group_scales(group_end, op.scale_type), scale1 = group_scales(group_end, op.scale_type, 1);
            UNROLL for (int r = 0; r < R; r++) {
                acc[r][0] += scale0 * scales[r] * to_float(left[r]);
                acc[r][1] += scale1 * scales[r] * to_float(right[r]);
            }
        }
        __builtin_prefetch(next);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 2; v++) store(sums + r * stride + v * W, acc[r][v]);
}

// Some neighbouring tiles of 8-bit weights for the panels of a chunk, which all multiply DEEP inputs before the next ones.
template <int R, int64_t BLOCK>
static void int8_tiles(const Linear& op, const Quantised& form, int64_t tokens, const int32_t* packed, int64_t first,
                       int64_t count, int64_t tile, int64_t tiles, Scratch& scratch) {
    const auto [group, bytes, scale_bytes, step] = GroupTile(op);
    const int64_t groups = form.blocks * BLOCK / group, stride = tiles * NR, apart = groups * step;
    const int64_t deep = count > 1 ? std::max<int64_t>(1, DEEP / group) : groups;
    const uint8_t* w = (const uint8_t*)op.weight + tile * apart;
    float* out = at_least(scratch.sums, size_t(CHUNK_PANELS) * R * MOST_TILES * NR);
    for (int64_t g = 0; g < groups; g += deep) {
        const int64_t depth = std::min(deep, groups - g);
        for (int64_t p = 0; p < count; p++)
            for (int64_t t = 0; t < tiles; t++) {
                const int32_t* panel = packed + (first + p) * form.panel(R);
                const int32_t* scales = panel + (form.words + g * group / BLOCK) * R;
                const uint8_t* piece = w + t * apart + g * step;
                // Each panel prefetches a share of the weights that are multiplied next.
                const uint8_t* after = g + depth < groups ? piece + depth * step : w + (tiles + t) * apart;
                const uint8_t* next = count > 1 ? after + p * depth * step / count : piece + FETCH;
                int8_groups<R, BLOCK>(op, piece, panel + g * group / form.word * R, depth, (const float*)scales,
                                      scales + form.blocks * R, g == 0, next, count, out + p * R * stride + t * NR, stride);
            }
    }
    for (int64_t row = 0; row < count * R; row++) {
        const int32_t* list = form.outliers(packed + (first + row / R) * form.panel(R), R, row % R);
        for (int64_t t = 0; t < tiles; t++)
            add_outliers<2, false, false>(op, list, w + t * apart, 0, out + row * stride + t * NR);
    }
    put(op, tokens, first * R, count * R, tile * NR, stride, out);
}

template <int R>
static void int8_tiles(const Linear& op, const Quantised& form, int64_t tokens, const int32_t* packed, int64_t first,
                       int64_t count, int64_t tile, int64_t tiles, Scratch& scratch) {
    if (form.block == PART) int8_tiles<R, PART>(op, form, tokens, packed, first, count, tile, tiles, scratch);
    else int8_tiles<R, LARGE_BLOCK>(op, form, tokens, packed, first, count, tile, tiles, scratch);
}

// One tile of 4-bit weights for the panels of a chunk. BLOCK: inputs of a block of x.
template <int R, bool ZEROS, int64_t BLOCK>
static void int4_tile(const Linear& op, const Quantised& form, int64_t tokens, const int32_t* packed, int64_t first,
                        int64_t count, int64_t tile, Scratch& scratch) {
    const auto [group, bytes, scale_bytes, step] = GroupTile(op);
    const int64_t blocks = group / BLOCK, groups = form.blocks / blocks;
    const uint8_t* w = (const uint8_t*)op.weight + tile * groups * step;
    float* out = at_least(scratch.sums, size_t(CHUNK_PANELS) * R * W);
    const int64_t deep = count > 1 ? std::max<int64_t>(1, 512 / group) : groups;
    for (int64_t g = 0; g < groups; g += deep) {
        const int64_t last = std::min(groups, g + deep);
        for (int64_t p = 0; p < count; p++) {
            const int32_t* panel = packed + (first + p) * form.panel(R);
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
                const vf scale = group_scales(at + bytes, op.scale_type);
                for (int64_t b = i * blocks; b < (i + 1) * blocks; b++) {
                    const int32_t* scales = panel + (form.words + b) * R;
                    const int32_t* totals = scales + form.blocks * R;
                    vi found[R];
                    UNROLL for (int r = 0; r < R; r++) {
                        found[r] = vi{} + totals[r];
                        if constexpr (ZEROS) found[r] *= load(at + bytes + scale_bytes);
                    }
                    UNROLL for (int64_t part = 0; part < BLOCK; part += PART) {
                        const int64_t input = b * BLOCK + part, within = input - i * group;
                        dot4<R>(at + within * W / 2, panel + input / WORD4 * R, found);
                    }
                    UNROLL for (int r = 0; r < R; r++) acc[r] += scale * ((const float*)scales)[r] * to_float(found[r]);
                }
            }
            UNROLL for (int r = 0; r < R; r++) store(sums + r * W, acc[r]);
        }
    }
    for (int64_t row = 0; row < count * R; row++)
        add_outliers<1, true, ZEROS>(op, form.outliers(packed + (first + row / R) * form.panel(R), R, row % R), w, 0, out + row * W);
    put(op, tokens, first * R, count * R, tile * W, W, out);
}

template <int R, bool ZEROS>
static void int4_tile(const Linear& op, const Quantised& form, int64_t tokens, const int32_t* packed, int64_t first,
                      int64_t count, int64_t tile, Scratch& scratch) {
    if (form.block == PART) int4_tile<R, ZEROS, PART>(op, form, tokens, packed, first, count, tile, scratch);
    else int4_tile<R, ZEROS, LARGE_BLOCK>(op, form, tokens, packed, first, count, tile, scratch);
}

// Pieces [begin, end): chunks of panels × tiles, tiles counting fastest.
template <int R = 1>
static void quantised_pieces(const Linear& op, int64_t tokens, const Quantised& form, const Panels& panels,
                             const float* packed, int64_t begin, int64_t end, Scratch& scratch) {
    if (panels.rows != R) {
        if constexpr (R < std::max(MOST_ROWS8, MOST_ROWS4)) quantised_pieces<R + 1>(op, tokens, form, panels, packed, begin, end, scratch);
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
            if constexpr (R <= MOST_ROWS8) int8_tiles<R>(op, form, tokens, x, first, count, tile, next - piece, scratch);
        } else if constexpr (R <= MOST_ROWS4) {
            if (op.zeros) int4_tile<R, true>(op, form, tokens, x, first, count, tile, scratch);
            else int4_tile<R, false>(op, form, tokens, x, first, count, tile, scratch);
        }
    }
}
