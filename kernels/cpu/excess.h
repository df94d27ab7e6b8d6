// What keeps products of bytes exact where the CPU adds two neighbouring ones in 16 bits, with saturation (AVX2 without
// VNNI). Three instructions multiply 32 bytes that way; widened to 16 bits first they take four.
//
// A weight is at most 255, so neighbouring inputs a, b saturate nothing while |a + b| <= MOST_PAIR: with one sign their
// products are within 255 · 128, with two within 255 · 127. Few pairs of a row are larger, as its scale is that of its
// largest number. Of those the excess e is taken off a when the row is packed, and e times a's weights is added behind
// the rest. A row with more of them than there is room for stays as it is, and its panel is multiplied in two halves, of
// which each takes one of two neighbours.
#pragma once

#include "linear.h"

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define HAS_EXCESS 1

constexpr int32_t MOST_PAIR = 128;
constexpr int32_t TOO_MANY = -1;  // pairs with an excess

struct Excess {
    int32_t word;   // of 4 inputs
    int32_t bytes;  // e in the place of its input, zeros in the others
};

static inline int64_t most_excess(int64_t words) { return std::max<int64_t>(8, words / 2); }

// Takes what is too large off the pairs of a row of whole words and lists it. How many there are, or TOO_MANY.
static int32_t take_excess(int8_t* row, int64_t words, Excess* found) {
    const int32_t most = int32_t(most_excess(words));
    const __m256i one = _mm256_set1_epi8(1), top = _mm256_set1_epi16(MOST_PAIR), bottom = _mm256_set1_epi16(-MOST_PAIR);
    int32_t count = 0;
    for (int64_t word = 0; word < words; word += W) {
        __m256i q = {};
        std::memcpy(&q, row + 4 * word, size_t(4 * std::min<int64_t>(W, words - word)));
        const __m256i sums = _mm256_maddubs_epi16(one, q);
        const __m256i large = _mm256_or_si256(_mm256_cmpgt_epi16(sums, top), _mm256_cmpgt_epi16(bottom, sums));
        for (uint32_t mask = uint32_t(_mm256_movemask_epi8(large)) & 0x55555555; mask; mask &= mask - 1) {
            if (count == most) {
                for (int32_t i = 0; i < count; i++) {
                    const int32_t place = (found[i].bytes & 0xffff) ? 0 : 2;
                    row[4 * found[i].word + place] += int8_t(found[i].bytes >> 8 * place);
                }
                return TOO_MANY;
            }
            const int64_t place = 4 * word + __builtin_ctz(mask);
            const int32_t sum = row[place] + row[place + 1], excess = sum > 0 ? sum - MOST_PAIR : sum + MOST_PAIR;
            row[place] = int8_t(row[place] - excess);
            found[count++] = {int32_t(place / 4), int32_t(uint32_t(uint8_t(excess)) << 8 * (place % 4))};
        }
    }
    return count;
}

// The excess of a row times a tile's weights, onto its sums [NR].
static inline void add_excess(const Excess* found, int32_t count, const uint8_t* w, int32_t* sums) {
    const __m256i one = _mm256_set1_epi16(1);
    vi left = load(sums), right = load(sums + W);
    for (const Excess* end = found + count; found != end; found++) {
        const int32_t* at = (const int32_t*)(w + int64_t(found->word) * NR * 4);
        const __m256i e = _mm256_set1_epi32(found->bytes);
        left += (vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)load(at), e), one);
        right += (vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)load(at + W), e), one);
    }
    store(sums, left);
    store(sums + W, right);
}
#endif
