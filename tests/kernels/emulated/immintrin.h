// Instructions of AVX-512 and AMX that the CPU kernels use, computed by plain loops, so that the AVX-512 and AMX kernels
// can be tested on a CPU that has only AVX2. Compile with -I of this folder, -mavx2 -mfma -mf16c and EMULATE_AVX512,
// EMULATE_AVX512BF16 or EMULATE_AMX defined. Semantics: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
#pragma once
#include_next <immintrin.h>

#if defined(EMULATE_AVX512) || defined(EMULATE_AVX512BF16) || defined(EMULATE_AMX)
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512VNNI__ 1

namespace emulated {

template <class T> struct Lanes { T at[64 / sizeof(T)]; };
template <class T, class V> static inline Lanes<T> lanes(const V& v) { Lanes<T> x; std::memcpy(&x, &v, 64); return x; }
template <class V, class T> static inline V vector(const Lanes<T>& x) { V v; std::memcpy(&v, &x, 64); return v; }

static inline __m512i dpbusd(__m512i sum, __m512i w, __m512i x) {
    auto sums = lanes<int32_t>(sum);
    const auto unsigned_bytes = lanes<uint8_t>(w);
    const auto signed_bytes = lanes<int8_t>(x);
    for (int i = 0; i < 64; i++) sums.at[i / 4] += int32_t(unsigned_bytes.at[i]) * signed_bytes.at[i];
    return vector<__m512i>(sums);
}
static inline __m512i set1_epi8(int x) {
    __m512i v;
    std::memset(&v, x, 64);
    return v;
}
static inline __m512i set1_epi32(int32_t x) {
    Lanes<int32_t> v;
    for (auto& lane : v.at) lane = x;
    return vector<__m512i>(v);
}
static inline __m512i srli_epi16(__m512i x, int count) {
    auto v = lanes<uint16_t>(x);
    for (auto& lane : v.at) lane = uint16_t(lane >> count);
    return vector<__m512i>(v);
}
static inline __m512i sub_epi8(__m512i a, __m512i b) {
    auto v = lanes<uint8_t>(a);
    const auto other = lanes<uint8_t>(b);
    for (int i = 0; i < 64; i++) v.at[i] = uint8_t(v.at[i] - other.at[i]);
    return vector<__m512i>(v);
}
static inline __m512i and_si512(__m512i a, __m512i b) { return a & b; }
static inline __m512i xor_si512(__m512i a, __m512i b) { return a ^ b; }
static inline __m512i loadu(const void* from) {
    __m512i v;
    std::memcpy(&v, from, 64);
    return v;
}
static inline void storeu(void* to, __m512i v) { std::memcpy(to, &v, 64); }
static inline __m512i bytes_to_ints(__m128i x) {
    int8_t bytes[16];
    std::memcpy(bytes, &x, 16);
    Lanes<int32_t> v;
    for (int i = 0; i < 16; i++) v.at[i] = bytes[i];
    return vector<__m512i>(v);
}
static inline __m512 ints_to_floats(__m512i x) {
    const auto ints = lanes<int32_t>(x);
    Lanes<float> v;
    for (int i = 0; i < 16; i++) v.at[i] = float(ints.at[i]);
    return vector<__m512>(v);
}
static inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
    const auto first = lanes<float>(a), second = lanes<float>(b);
    auto sums = lanes<float>(c);
    for (int i = 0; i < 16; i++) sums.at[i] = __builtin_fmaf(first.at[i], second.at[i], sums.at[i]);
    return vector<__m512>(sums);
}
static inline __m512 halves_to_floats(__m256i x) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(x)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    __m512 v;
    std::memcpy(&v, &low, 32);
    std::memcpy((char*)&v + 32, &high, 32);
    return v;
}

static inline __m512i shuffle_epi8(__m512i x, __m512i places) {
    const auto from = lanes<uint8_t>(x);
    auto at = lanes<uint8_t>(places);
    for (int i = 0; i < 64; i++) at.at[i] = at.at[i] & 128 ? 0 : from.at[i / 16 * 16 + at.at[i] % 16];
    return vector<__m512i>(at);
}
static inline __m512i broadcast_i32x4(__m128i x) {
    __m512i v;
    for (int i = 0; i < 4; i++) std::memcpy((char*)&v + 16 * i, &x, 16);
    return v;
}

static inline void stream(float* out, __m512 x) { std::memcpy(out, &x, sizeof x); }

}  // namespace emulated

#define _mm512_stream_ps emulated::stream
#define _mm512_dpbusd_epi32 emulated::dpbusd
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_sub_epi8 emulated::sub_epi8
#define _mm512_and_si512 emulated::and_si512
#define _mm512_xor_si512 emulated::xor_si512
#define _mm512_loadu_si512 emulated::loadu
#define _mm512_storeu_si512 emulated::storeu
#define _mm512_maskz_cvtepi8_epi32(mask, x) emulated::bytes_to_ints(x)
#define _mm512_maskz_cvtepi32_ps(mask, x) emulated::ints_to_floats(x)
#define _mm512_maskz_cvtph_ps(mask, x) emulated::halves_to_floats(x)
#define _mm512_fmadd_ps emulated::fmadd
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_maskz_broadcast_i32x4(mask, x) emulated::broadcast_i32x4(x)
#endif

#ifdef EMULATE_AVX512BF16
#define __AVX512BF16__ 1

namespace emulated {

// The odd elements of the pairs first, each sum rounded to float. Subnormal numbers count as zero.
static inline __m512 dpbf16(__m512 sum, __m512i a, __m512i b) {
    const unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | 0x8040);
    auto sums = lanes<float>(sum);
    const auto first = lanes<uint32_t>(a), second = lanes<uint32_t>(b);
    const auto value = [](uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    };
    for (int i = 0; i < 16; i++) {
        volatile float odd = sums.at[i] + value(first.at[i] & 0xffff0000) * value(second.at[i] & 0xffff0000);
        volatile float even = odd + value(first.at[i] << 16) * value(second.at[i] << 16);
        sums.at[i] = even;
    }
    _mm_setcsr(modes);
    return vector<__m512>(sums);
}

}  // namespace emulated

#define __m512bh __m512i
#define _mm512_dpbf16_ps emulated::dpbf16
#endif

#ifdef EMULATE_AMX
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace emulated {

struct Tiles {
    uint8_t at[8][16][64];
    uint16_t bytes[16];
    uint8_t rows[16];
};
static thread_local Tiles tiles;

static inline void load_config(const void* from) {
    tiles = {};
    std::memcpy(tiles.bytes, (const char*)from + 16, 32);
    std::memcpy(tiles.rows, (const char*)from + 48, 16);
}
static inline void release() { tiles = {}; }
static inline void zero(int tile) { std::memset(tiles.at[tile], 0, sizeof(tiles.at[tile])); }
static inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy(tiles.at[tile][row], (const char*)from + row * stride, tiles.bytes[tile]);
}
static inline void store(int tile, void* to, int64_t stride) {
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy((char*)to + row * stride, tiles.at[tile][row], tiles.bytes[tile]);
}
static inline void dpbssd(int sum, int a, int b) {
    for (int m = 0; m < tiles.rows[sum]; m++) {
        int32_t sums[16];
        std::memcpy(sums, tiles.at[sum][m], 64);
        for (int k = 0; k < tiles.bytes[a] / 4; k++)
            for (int n = 0; n < tiles.bytes[sum] / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += int32_t(int8_t(tiles.at[a][m][4 * k + i])) * int8_t(tiles.at[b][k][4 * n + i]);
        std::memcpy(tiles.at[sum][m], sums, 64);
    }
}
// Even and odd inputs are summed apart, and both are added to the sum last. Subnormal numbers count as zero.
static inline void dpbf16ps(int sum, int a, int b) {
    const unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | 0x8040);
    const auto value = [](const uint8_t* at) {
        uint16_t half;
        std::memcpy(&half, at, 2);
        const uint32_t bits = uint32_t(half) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    };
    for (int m = 0; m < tiles.rows[sum]; m++) {
        float sums[16];
        std::memcpy(sums, tiles.at[sum][m], 64);
        for (int n = 0; n < tiles.bytes[sum] / 4; n++) {
            volatile float even = 0, odd = 0;
            for (int k = 0; k < tiles.bytes[a] / 4; k++) {
                even = even + value(&tiles.at[a][m][4 * k]) * value(&tiles.at[b][k][4 * n]);
                odd = odd + value(&tiles.at[a][m][4 * k + 2]) * value(&tiles.at[b][k][4 * n + 2]);
            }
            sums[n] += even + odd;
        }
        std::memcpy(tiles.at[sum][m], sums, 64);
    }
    _mm_setcsr(modes);
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbssd emulated::dpbssd
#define _tile_dpbf16ps emulated::dpbf16ps
#endif
