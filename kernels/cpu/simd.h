// One source for every instruction set, with the compiler's vector extension: vectors are as wide as the registers.
//
// A sum never crosses lanes: a lane is one output, and it adds its products in the order of the inputs. A row's result
// is therefore the same bit for bit whatever the other rows are, and the same code serves SSE, NEON, AVX2 and AVX-512.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__) || defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef uint8_t vb_any __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(2), may_alias));

// For loops over registers, which must be unrolled completely.
#define UNROLL _Pragma("GCC unroll 16")

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

static inline vf splat(float x) { return x - vf{}; }  // + would turn -0 to 0, and so cost an addition
static inline float bits_to_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t float_to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

static inline float widen(float x) { return x; }
static inline float widen(int8_t x) { return x; }
static inline float widen(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
static inline float widen(fp16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // 2^112 moves the exponent from a bias of 15 to one of 127, subnormal numbers too.
    return bits_to_float(float_to_bits(bits_to_float(rest << 13) * 0x1p112f) | sign);
}

static inline vf load(const float* p) { return *(const vf_any*)p; }
static inline vf load(const bf16* p) {
    vi wide = __builtin_convertvector(*(const vh_any*)p, vi);
    return (vf)(wide << 16);
}
static inline vf load(const fp16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
    vf x;
    for (int i = 0; i < W; i++) x[i] = widen(p[i]);
    return x;
#endif
}
static inline void store(float* p, vf x) { *(vf_any*)p = x; }
static inline vi load(const int32_t* p) { vi x; std::memcpy(&x, p, sizeof(x)); return x; }
static inline void store(int32_t* p, vi x) { std::memcpy(p, &x, sizeof(x)); }
static inline vi load(const uint8_t* p) { return __builtin_convertvector(*(const vb_any*)p, vi); }
static inline vf load(const int8_t* p) {  // the compiler's own conversion works byte by byte
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vf x;
    for (int i = 0; i < W; i++) x[i] = p[i];
    return x;
#endif
}
static inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// a · b + c, with one rounding where the CPU has such an instruction. Where c is a product too, the compiler would decide
// at each place which of the two it joins with the sum.
static inline vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Rounds to nearest, ties to even, as torch does.
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, bf16* out) {
    uint32_t bits = float_to_bits(x);
    out->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline void narrow(float x, fp16* out) {
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000;
    float size = std::fabs(x);
    if (!(size < 65520.f)) { out->bits = uint16_t(sign | (size >= 65520.f ? 0x7c00 : 0x7e00)); return; }
    if (size < 0x1p-14f) { out->bits = uint16_t(sign | uint32_t(std::nearbyint(size * 0x1p24f))); return; }
    uint32_t rest = (bits & 0x7fffffff) - (112u << 23);
    out->bits = uint16_t(sign | (rest + 0xfff + (rest >> 13 & 1)) >> 13);
}

static inline float sum(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}
static inline vf larger(vf a, vf b) { return a > b ? a : b; }

// Combines lanes in halves: combine(turn) for each half, where turn(x) exchanges the lanes that are combined.
template <int HALF, class V, size_t... LANE> static inline V exchanged(V x, std::index_sequence<LANE...>) {
    return __builtin_shuffle(x, vi{int32_t(LANE ^ HALF)...});
}
template <int HALF = W / 2, class F> static inline void over_halves(F combine) {
    combine([](auto x) { return exchanged<HALF>(x, std::make_index_sequence<W>{}); });
    if constexpr (HALF > 1) over_halves<HALF / 2>(combine);
}
static inline float largest(vf x) {
    over_halves([&](auto turn) { x = larger(x, turn(x)); });
    return x[0];
}

// e^x: 2^n · e^r with |r| ≤ ln 2 / 2, e^r by its series to r^7. Within 2 units in the last place; 0 below -87.
static inline vf exp(vf x) {
    const vf low = splat(-87.f), high = splat(88.f);
    vi gone = x < low;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const vf magic = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to a whole number
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vf p = splat(1.98412698e-4f);
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 0.166666667f;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    vf y = p * (vf)power;
    return gone ? vf{} : y;
}

static inline vf tanh(vf x) {
    // Near 0 the quotient would lose digits, so an odd series replaces it.
    vf square = x * x;
    vf series = x + x * square * (-0.333333333f + square * (0.133333333f + square * -0.0539682540f));
    vf size = x < 0.f ? -x : x;
    vf e = exp(size * -2.f);
    vf y = (1.f - e) / (1.f + e);
    y = x < 0.f ? -y : y;
    return size < 0.1f ? series : y;
}

// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
static inline vf erf(vf x) {
    vf size = x < 0.f ? -x : x;
    vf t = 1.f / (1.f + size * 0.3275911f);
    vf p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    vf y = 1.f - p * t * exp(-(size * size));
    return x < 0.f ? -y : y;
}
