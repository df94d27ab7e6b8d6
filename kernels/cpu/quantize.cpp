// Search of the scales of weights that are quantized at load (`search_scales` in kernels/quantisation.py).
//
// A lane is one group, and it adds in the order of the inputs. Products and sums are rounded separately. Therefore each
// machine finds the same scales.
#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

constexpr float NEAREST = 12582912;  // 1.5 · 2^23: adding it rounds small numbers to integers

// Smallest and largest integer.
struct Range {
    vf low, high;
};

// Hides from the compiler that the number is a product, which it would join with a sum to one instruction.
vf product(vf a, vf b) {
    vf found = a * b;
#if defined(__aarch64__)
    asm("" : "+w"(found));
#else
    asm("" : "+x"(found));
#endif
    return found;
}

vf rounded(vf x, vf inverse, const Range& range) {
    const vf near = (product(x, inverse) + NEAREST) - NEAREST, above = near < range.low ? range.low : near;
    return above > range.high ? range.high : above;
}

vf inverse_of(vf scale) { return scale != 0.f ? 1.f / scale : vf{}; }

void to_half(vf x, fp16* out) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)out, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
    float lanes[W];
    store(lanes, x);
    for (int lane = 0; lane < W; lane++) narrow(lanes[lane], out + lane);
#endif
}

vf halved(vf x) {
    fp16 halves[W];
    to_half(x, halves);
    return load(halves);
}

// W groups: x is [size][W]. Returns their square errors with these scales, and in `next` the least-squares scales for
// their integers.
vf errors_of(const float* x, int64_t size, vf scale, const Range& range, vf& next) {
    const vf inverse = inverse_of(scale);
    vf errors{}, squares{}, products{};
    for (int64_t i = 0; i < size; i++) {
        const vf own = load(x + i * W), value = rounded(own, inverse, range), error = product(value, scale) - own;
        errors += product(error, error);
        squares += product(value, value);
        products += product(value, own);
    }
    next = halved(squares > 0.f ? products / squares : vf{});
    return errors;
}

// W groups; the values are [W][size]. GCC 12 fails to inline it for AVX-512.
__attribute__((noinline)) void search(const float* x, int64_t size, const float* farthest, int64_t count, const Range& range, int8_t* values, fp16* scales) {
    vf largest{}, best{}, least = splat(INFINITY);
    for (int64_t i = 0; i < size; i++) {
        const vf own = load(x + i * W);
        largest = larger(own, -own) > larger(largest, -largest) ? own : largest;
    }
    for (int64_t i = 0; i < count; i++) {
        vf found = halved(largest / farthest[i]);
        for (int round = 0; round < 2; round++) {
            vf next;
            const vf errors = errors_of(x, size, found, range, next);
            best = errors < least ? found : best;
            least = errors < least ? errors : least;
            found = next;
        }
    }
    const vf inverse = inverse_of(best);
    for (int64_t i = 0; i < size; i++) {
        float lanes[W];
        store(lanes, rounded(load(x + i * W), inverse, range));
        for (int lane = 0; lane < W; lane++) values[lane * size + i] = int8_t(lanes[lane]);
    }
    to_half(best, scales);
}

}  // namespace

extern "C" {

// groups: [count][size]. Writes integers from `low` to `high`, [count][size], and the scales, [count].
void slipway_search_scales(const float* groups, int64_t count, int64_t size, const float* farthest, int64_t candidates, int64_t low, int64_t high, int8_t* values, fp16* scales) {
    const Range range{splat(float(low)), splat(float(high))};
    std::vector<float> lanes;
    std::vector<int8_t> found;
    lanes.resize(size_t(size) * W), found.resize(size_t(size) * W);
    for (int64_t group = 0; group < count; group += W) {
        const int64_t taken = std::min<int64_t>(W, count - group);
        for (int64_t lane = 0; lane < W; lane++) {
            const float* from = groups + (group + std::min(lane, taken - 1)) * size;
            for (int64_t i = 0; i < size; i++) lanes[size_t(i * W + lane)] = from[i];
        }
        fp16 own[W];
        search(lanes.data(), size, farthest, candidates, range, found.data(), own);
        std::memcpy(values + group * size, found.data(), size_t(taken * size));
        std::memcpy(scales + group, own, size_t(taken) * sizeof(fp16));
    }
}

}  // extern "C"
