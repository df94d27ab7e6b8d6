// y = x Wᵀ with weights in blocks of ggml, in the layout of block_codes.h. x is quantized as for other integers
// (linear_int.h), in blocks of 32 inputs, or of 64 where a unit has 256.
//
// Sums within a block of x are integers and exact: Σ scale of the sub-block · Σ (code - offset) · q. Scaled sums of blocks
// are added in float in the order of the inputs, each followed by the minimums of its sub-blocks times Σ x; the products
// of outliers are added apart, and last.
//
// Up to three rows read the packed codes as they multiply. With more rows, some units of a tile are unpacked to one byte for
// each code and serve all panels. Both do the same operations in the same order, so a row's result is the same.
//
// A panel of x: [word][R] words of 4 bytes, then [block][R] scales, then [sub-block][R] totals, if the type has an offset or
// a minimum; then the list of outliers of each row. Totals are -offset · Σ q, on AVX2 in two halves of 16 bits for the
// first and the last two inputs of all words, or scale · Σ q for minimums.
#include "linear_blocks.h"

#include "block_codes.h"

namespace blocks {

namespace {

constexpr int64_t DEEP_INPUTS = 512;  // whose unpacked codes stay in the L1 cache
constexpr int FEW = 3;                // most rows that multiply by packed codes

// What the arithmetic of a type depends on.
struct Arithmetic {
    int64_t inputs, sub, block;  // of a unit, of a sub-block, and of a block of x
    int chain;                   // words whose products are summed in 16 bits
    bool offset, minimum, scaled, by_sign;

    constexpr int64_t words() const { return inputs / WORD4; }
    constexpr int64_t subs() const { return inputs / sub; }
    constexpr bool has_totals() const { return offset || minimum; }
    constexpr int64_t wide() const { return words() + (scaled ? subs() : 0) + (minimum ? subs() : 0) + 1; }  // in vectors
};

constexpr Arithmetic arithmetic(const BlockType& type) {
    const bool by_sign = type.table == NONLINEAR && SIGN_BY_X;
    // 16 bits hold 16 products of 4 bits, or 8 of 5 bits; with an offset the sums are as small as those of fewer bits.
    const int words = int(type.sub / 4);
    const int chain = by_sign ? 1 : type.low + type.high == 5 && !type.offset ? 4 : words;
    return {type.inputs, type.sub, type.block(), chain, type.offset != 0, type.has_minimum(), type.is_scaled(), by_sign};
}

// The last unit may have fewer inputs; its other codes multiply 0.
int64_t units_of(const Linear& op) { return (op.inputs + type_of(op).inputs - 1) / type_of(op).inputs; }

// Layout of x.
struct Rows {
    int64_t units, words, blocks, totals, list;
    explicit Rows(const Linear& op) {
        const BlockType& type = type_of(op);
        units = units_of(op);
        words = units * type.words();
        blocks = units * type.inputs / type.block();
        totals = type.offset || type.has_minimum() ? units * type.subs() : 0;
        list = outlier_words(blocks);
    }
    int64_t panel(int64_t rows) const { return (words + blocks + totals + list) * rows; }
    template <class I> I* outliers(I* panel, int64_t rows, int64_t place) const {
        return panel + (words + blocks + totals) * rows + place * list;
    }
};

float ratio_of(const BlockType& type) { return type.low + type.high > 4 ? 1.5f : 2.5f; }

// The total of a sub-block of q.
int32_t total_of(const BlockType& type, const int8_t* q, float scale) {
    int32_t sums[2] = {};
    for (int64_t i = 0; i < type.sub; i += 4) {
        sums[0] += q[i] + q[i + 1];
        sums[1] += q[i + 2] + q[i + 3];
    }
    if (type.has_minimum()) return int32_t(float_to_bits(scale * float(sums[0] + sums[1])));
    if (!SIGN_BY_X) return -type.offset * (sums[0] + sums[1]);
    const uint32_t low = uint16_t(-type.offset * sums[0]), high = uint16_t(-type.offset * sums[1]);
    return int32_t(low | high << 16);
}

// sums[r] += scale · Σ (code - offset) · q over a sub-block, which begins at word `first` of a unit.
template <Arithmetic A, int R, class Source>
inline __attribute__((always_inline)) void
add_sub(const Source& source, int64_t first, int sub, const int32_t* x, const int32_t* totals, vi (&sums)[R]) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    const __m256i scale = A.scaled ? (__m256i)source.scale(sub) : _mm256_set1_epi16(1);
    __m256i narrow[R];
    UNROLL for (int i = 0; i < A.sub / 4; i++) {
        const __m256i w = (__m256i)source.word(first + i);
        [[maybe_unused]] const __m256i size = A.by_sign ? _mm256_abs_epi8(w) : w;
        UNROLL for (int r = 0; r < R; r++) {
            const __m256i each = _mm256_set1_epi32(x[i * R + r]);
            __m256i product;
            if constexpr (A.by_sign) product = _mm256_maddubs_epi16(size, _mm256_sign_epi8(each, w));
            else product = _mm256_maddubs_epi16(w, each);
            if (i % A.chain) narrow[r] = _mm256_add_epi16(narrow[r], product);
            else if (A.offset && i == 0) narrow[r] = _mm256_add_epi16(_mm256_set1_epi32(totals[r]), product);
            else narrow[r] = product;
            IN_ORDER(narrow[r]);
        }
        if (i % A.chain == A.chain - 1)
            UNROLL for (int r = 0; r < R; r++) sums[r] += (vi)_mm256_madd_epi16(narrow[r], scale);
    }
#else
    vi own[R];
    UNROLL for (int r = 0; r < R; r++) own[r] = A.offset ? vi{} + totals[r] : vi{};
    UNROLL for (int i = 0; i < A.sub / WORD4; i++) {
        const vi w = source.word(first + i);
        UNROLL for (int r = 0; r < R; r++) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
            own[r] = dot_bytes(own[r], w, x[i * R + r]);
            IN_ORDER(own[r]);
#elif defined(__ARM_FEATURE_DOTPROD)
            own[r] = (vi)vdotq_s32((int32x4_t)own[r], (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x[i * R + r])));
#else
            own[r] += w * x[i * R + r];
#endif
        }
    }
    if constexpr (A.scaled) {
        const vi scale = source.scale(sub);
        UNROLL for (int r = 0; r < R; r++) sums[r] += own[r] * scale;
    } else {
        UNROLL for (int r = 0; r < R; r++) sums[r] += own[r];
    }
#endif
}

// acc[r] += the products of a unit. x, scales and totals: of its words, blocks and sub-blocks in a panel.
template <Arithmetic A, int R, class Source>
inline __attribute__((always_inline)) void
add_unit(const Source& source, const int32_t* x, const float* scales, const int32_t* totals, vf (&acc)[R]) {
    constexpr int BLOCKS = int(A.inputs / A.block), SUBS = int(A.block / A.sub);
    constexpr int64_t WORDS = A.sub / WORD4;
    const vf d = source.d();
    const auto add_block = [&](int b) __attribute__((always_inline)) {
        vi sums[R] = {};
        UNROLL for (int s = 0; s < SUBS; s++) {
            const int sub = b * SUBS + s;
            add_sub<A, R>(source, sub * WORDS, sub, x + sub * WORDS * R, totals + sub * R, sums);
        }
        UNROLL for (int r = 0; r < R; r++) acc[r] = multiply_add(d * scales[b * R + r], to_float(sums[r]), acc[r]);
        if constexpr (A.minimum)
            UNROLL for (int s = 0; s < SUBS; s++) {
                const int sub = b * SUBS + s;
                const vf minimum = source.minimum(sub);
                UNROLL for (int r = 0; r < R; r++)
                    acc[r] = multiply_add(minimum, splat(((const float*)totals)[sub * R + r]), acc[r]);
            }
    };
    if constexpr (Source::PACKED) UNROLL for (int b = 0; b < BLOCKS; b++) add_block(b);  // places of codes are constants
    else for (int b = 0; b < BLOCKS; b++) add_block(b);
}

// A packed unit.
template <const BlockType& T> struct PackedUnit {
    static constexpr bool PACKED = true;
    const uint8_t* unit;
    SubScales subs;
    vf scale_of_unit, minimum_of_unit;
    explicit __attribute__((always_inline)) PackedUnit(const uint8_t* at) : unit(at), subs(sub_scales<T>(at)), scale_of_unit(unit_scale<T>(at)) {
        if constexpr (T.has_minimum()) minimum_of_unit = unit_minimum<T>(at);
    }
    __attribute__((always_inline)) vi word(int64_t at) const { return code_word<T>(unit, at); }
    __attribute__((always_inline)) vi scale(int sub) const { return product_scale<T>(subs, sub); }
    __attribute__((always_inline)) vf minimum(int sub) const {
        if constexpr (T.is_scaled()) return minimum_of_unit * blocks::minimum_of(subs, sub);
        else return minimum_of_unit;
    }
    __attribute__((always_inline)) vf d() const { return scale_of_unit; }
};

// The same, unpacked: words, scales of sub-blocks, minimums, and the scale of the unit.
template <Arithmetic A> struct WideUnit {
    static constexpr bool PACKED = false;
    const float* at;
    vi word(int64_t i) const { return load((const int32_t*)at + i * W); }
    vi scale(int sub) const { return word(A.words() + sub); }
    vf minimum(int sub) const { return load(at + (A.words() + (A.scaled ? A.subs() : 0) + sub) * W); }
    vf d() const { return load(at + (A.wide() - 1) * W); }
};

template <const BlockType& T> void unpack(const uint8_t* packed, float* out) {
    constexpr Arithmetic A = arithmetic(T);
    constexpr int64_t WORDS = A.words(), SUBS = A.subs();
    const PackedUnit<T> unit(packed);
    _Pragma("GCC unroll 8") for (int64_t i = 0; i < WORDS; i++) store((int32_t*)out + i * W, unit.word(i));
    out += A.words() * W;
    if constexpr (A.scaled) {
        UNROLL for (int s = 0; s < SUBS; s++) store((int32_t*)out + s * W, unit.scale(s));
        out += A.subs() * W;
    }
    if constexpr (A.minimum) {
        UNROLL for (int s = 0; s < SUBS; s++) store(out + s * W, unit.minimum(s));
        out += A.subs() * W;
    }
    store(out, unit.d());
}

// Weights of W outputs for one input of a unit.
template <const BlockType& T> vf weights_of(const uint8_t* unit, int64_t input) {
    const int64_t sub = input / T.sub, byte = sub % 4 * 8;
    const SubScales subs = sub_scales<T>(unit);
    vi code = code_word<T>(unit, input / WORD4);
    const int32_t within = int32_t(input % WORD4 * 8);
    if constexpr (WORD4 == 4) code = T.table && T.offset == 0 ? (code << (24 - within)) >> 24 : (code >> within) & 255;
    code -= T.offset;
    if constexpr (T.is_scaled()) {
        const vi word = subs.scales[sub / 4];
        code *= signed_scales<T> ? (word << int32_t(24 - byte)) >> 24 : (word >> int32_t(byte)) & 255;
    }
    vf weight = unit_scale<T>(unit) * to_float(code);
    if constexpr (T.has_minimum()) {
        const vf minimum = unit_minimum<T>(unit);
        weight += T.is_scaled() ? minimum * minimum_of(subs, int(sub)) : minimum;
    }
    return weight;
}

// sums[W] += the products of the outliers of a row with a tile.
template <const BlockType& T> __attribute__((noinline)) void add_outliers(const int32_t* list, const uint8_t* tile, float* sums) {
    const Outlier* entries = (const Outlier*)(list + 1);
    vf sum = {};
    for (int32_t i = 0; i < list[0]; i++) {
        const int64_t input = entries[i].offset;
        sum = multiply_add(weights_of<T>(tile + input / T.inputs * T.step(), input % T.inputs), splat(entries[i].value), sum);
    }
    store(sums, load(sums) + sum);
}

// Panels [first, first + count) and one tile, of few rows.
template <const BlockType& T, int R>
void few_rows(const Linear& op, int64_t tokens, const Rows& form, const int32_t* panel, int64_t tile) {
    constexpr Arithmetic A = arithmetic(T);
    const int64_t units = form.units;
    const uint8_t* w = (const uint8_t*)op.weight + tile * units * T.step();
    const float* scales = (const float*)(panel + form.words * R);
    const int32_t* totals = panel + (form.words + form.blocks) * R;
    const int64_t subs = form.totals ? T.subs() : 0;
    vf acc[R] = {};
    const uint8_t* at = w;
    for (int64_t u = 0; u < units; u++, at += T.step()) {
        for (int64_t line = 0; line < T.step(); line += 64) __builtin_prefetch(at + FETCH + line);
        add_unit<A, R>(PackedUnit<T>(at), panel + u * A.words() * R, scales + u * (T.inputs / T.block()) * R, totals + u * subs * R, acc);
    }
    float out[R * W];
    UNROLL for (int r = 0; r < R; r++) store(out + r * W, acc[r]);
    for (int64_t row = 0; row < R; row++) {
        const int32_t* list = form.outliers(panel, R, row);
        if (list[0]) add_outliers<T>(list, w, out + row * W);
    }
    put(op, tokens, 0, R, tile * W, W, out);
}

// sums[R][W] (+)= the products of some unpacked units with a panel.
template <Arithmetic A, int R>
__attribute__((noinline)) void add_units(const float* wide, int64_t units, const int32_t* x, const float* scales,
                                         const int32_t* totals, bool begins, float* sums) {
    constexpr int64_t SUBS = A.has_totals() ? A.subs() : 0;
    vf acc[R];
    UNROLL for (int r = 0; r < R; r++) acc[r] = begins ? vf{} : load(sums + r * W);
    for (int64_t u = 0; u < units; u++) {
        add_unit<A, R>(WideUnit<A>{wide}, x, scales, totals, acc);
        wide += A.wide() * W, x += A.words() * R, scales += A.inputs / A.block * R, totals += SUBS * R;
    }
    UNROLL for (int r = 0; r < R; r++) store(sums + r * W, acc[r]);
}

using AddUnits = void (*)(const float*, int64_t, const int32_t*, const float*, const int32_t*, bool, float*);
template <Arithmetic A, int R = MOST_ROWS4> AddUnits add_units_of(int64_t rows) {
    if (rows == R) return add_units<A, R>;
    if constexpr (R > 1) return add_units_of<A, R - 1>(rows);
    else return nullptr;
}

// Some panels and one tile.
template <const BlockType& T>
void tile_of(const Linear& op, int64_t tokens, const Rows& form, int64_t rows, const int32_t* panels, int64_t first,
             int64_t count, int64_t tile, Scratch& scratch) {
    constexpr Arithmetic A = arithmetic(T);
    const AddUnits add = add_units_of<A>(rows);
    const int64_t units = form.units, deep = DEEP_INPUTS / T.inputs;
    const uint8_t* w = (const uint8_t*)op.weight + tile * units * T.step();
    float* sums = at_least(scratch.sums, size_t(CHUNK_PANELS * rows * W));
    float* wide = at_least(scratch.wide, size_t(deep * A.wide() * W));
    const int64_t subs = form.totals ? T.subs() : 0;
    for (int64_t u = 0; u < units; u += deep) {
        const int64_t here = std::min(deep, units - u);
        const uint8_t* at = w + u * T.step();
        for (int64_t line = 0; line < here * T.step(); line += 64) __builtin_prefetch(at + deep * T.step() + line);
        for (int64_t i = 0; i < here; i++) unpack<T>(at + i * T.step(), wide + i * A.wide() * W);
        for (int64_t p = 0; p < count; p++) {
            const int32_t* panel = panels + (first + p) * form.panel(rows);
            const float* scales = (const float*)(panel + (form.words + u * T.inputs / T.block()) * rows);
            const int32_t* totals = panel + (form.words + form.blocks + u * subs) * rows;
            add(wide, here, panel + u * A.words() * rows, scales, totals, u == 0, sums + p * rows * W);
        }
    }
    for (int64_t row = 0; row < count * rows; row++) {
        const int32_t* list = form.outliers(panels + (first + row / rows) * form.panel(rows), rows, row % rows);
        if (list[0]) add_outliers<T>(list, w, sums + row * W);
    }
    put(op, tokens, first * rows, count * rows, tile * W, W, sums);
}

int64_t tiles_of(const Linear& op) { return (op.outputs + W - 1) / W; }

}  // namespace

size_t packed_size(const Linear& op, int64_t rows) {
    const Panels panels(rows, MOST_ROWS4);
    return size_t(panels.count * Rows(op).panel(panels.rows));
}

int64_t chunks(int64_t rows) { return Panels(rows, MOST_ROWS4).chunks; }
int64_t pieces(const Linear& op, int64_t rows) { return tiles_of(op) * chunks(rows); }

void pack_row(const Linear& op, int64_t token, int64_t tokens, float* packed, Scratch& scratch) {
    const Rows form(op);
    const BlockType& type = type_of(op);
    const Panels panels(tokens, MOST_ROWS4);
    const int64_t rows = panels.rows, place = token % rows, block = type.block(), subs = block / type.sub;
    int32_t *panel = (int32_t*)packed + token / rows * form.panel(rows), *list = form.outliers(panel, rows, place);
    int32_t *scales = panel + form.words * rows + place, *totals = scales + form.blocks * rows;
    const float *x = op.x + token * op.x_stride, ratio = ratio_of(type);
    alignas(64) float own[LARGE_BLOCK];
    alignas(64) int8_t q[LARGE_BLOCK];
    list[0] = 0;
    for (int64_t b = 0; b < form.blocks; b++) {
        const int64_t count = std::clamp<int64_t>(op.inputs - b * block, 0, block);
        std::memcpy(own, x + b * block, sizeof(float) * size_t(count));
        std::memset(own + count, 0, sizeof(float) * size_t(block - count));
        const float scale = take_outliers(own, block, b * block, ratio, list, [](int64_t input) { return Outlier{int32_t(input), 0, 0, 0.f}; });
        round_block(own, block, scale, q);
        scales[b * rows] = int32_t(float_to_bits(scale));
        if (form.totals)
            for (int64_t s = 0; s < subs; s++) totals[(b * subs + s) * rows] = total_of(type, q + s * type.sub, scale);
        int32_t* words = panel + b * block / WORD4 * rows + place;
        for (int64_t i = 0; i < block / WORD4; i++)
            if constexpr (WORD4 == 4) std::memcpy(words + i * rows, q + 4 * i, 4);
            else words[i * rows] = q[i];
    }
    if (token != tokens - 1) return;
    for (int64_t after = place + 1; after < rows; after++) {
        for (int64_t i = 0; i < form.words + form.blocks + form.totals; i++) panel[i * rows + after] = 0;
        form.outliers(panel, rows, after)[0] = 0;
    }
}

void run(const Linear& op, int64_t tokens, const float* packed, int64_t begin, int64_t end, Scratch& scratch) {
    const Rows form(op);
    const Panels panels(tokens, MOST_ROWS4);
    const int64_t tiles = tiles_of(op);
    const int32_t* x = (const int32_t*)packed;
    with_type(op.form, [&]<const BlockType& T>() {
        for (int64_t piece = begin; piece < end; piece++) {
            const int64_t first = piece / tiles * panels.chunk, count = std::min(panels.chunk, panels.count - first);
            const int64_t tile = piece % tiles;
            if (tokens == 1) few_rows<T, 1>(op, tokens, form, x, tile);
            else if (tokens == 2) few_rows<T, 2>(op, tokens, form, x, tile);
            else if (tokens == FEW) few_rows<T, FEW>(op, tokens, form, x, tile);
            else tile_of<T>(op, tokens, form, panels.rows, x, first, count, tile, scratch);
        }
    });
}

}  // namespace blocks
