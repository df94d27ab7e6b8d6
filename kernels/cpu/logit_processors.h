// Logit processors: the operations of kernels/sampling/*.py, which change a row of logits in place before the draw.
//
// Rounding follows the formulas there: a product is rounded first and subtracted afterwards. A compiler may fuse the two,
// so products are computed in double.
#pragma once

#include "simd.h"

namespace logit_processors {

// Tokens whose bit is 0 become impossible. bits: bit i of a word is token 32 · word + i.
static void mask(float* logits, int64_t vocab, const uint32_t* bits) {
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    for (int64_t word = 0; 32 * word < vocab; word++) {
        if (bits[word] == ~0u) continue;
        const int64_t at = 32 * word;
        if (at + 32 <= vocab) {
            for (int part = 0; part < 32; part += W) {
                const vi own = vi{} + int32_t(bits[word] >> part);
                store(logits + at + part, (own >> lane & 1) == 0 ? splat(-INFINITY) : load(logits + at + part));
            }
        } else {
            for (int64_t i = at; i < vocab; i++)
                if (!(bits[word] >> (i - at) & 1)) logits[i] = -INFINITY;
        }
    }
}

// Makes tokens that end a reply impossible, unless no other token is possible. stops: [most], padded at the end with
// -1.
static void min_tokens(float* logits, int64_t vocab, const int32_t* stops, int64_t most) {
    auto is_stop = [&](int64_t token) {
        for (int64_t i = 0; i < most; i++)
            if (stops[i] == token) return true;
        return false;
    };
    int64_t token = 0;
    while (token < vocab && (logits[token] == -INFINITY || is_stop(token))) token++;
    if (token == vocab) return;
    for (int64_t i = 0; i < most; i++)
        if (stops[i] >= 0 && stops[i] < vocab) logits[stops[i]] = -INFINITY;
}

struct Strength {
    float repetition, frequency, presence;
};

// Applies penalties for the known tokens, `prompt` tokens of the prompt first. counts: [vocab], zero before and after.
static void penalties(float* logits, int64_t vocab, const int32_t* tokens, int64_t length, int64_t prompt,
                      Strength with, int32_t* counts) {
    const bool repeats = with.repetition != 1.f;
    if (!repeats && with.frequency == 0.f && with.presence == 0.f) return;
    const int64_t begin = repeats ? 0 : prompt;
    for (int64_t i = begin; i < length; i++) {
        const int32_t token = tokens[i];
        if (token < 0 || token >= vocab) continue;
        if (i < prompt) counts[token] |= 1;
        else counts[token] += 2;
    }
    for (int64_t i = begin; i < length; i++) {
        const int32_t token = tokens[i];
        if (token < 0 || token >= vocab || !counts[token]) continue;
        const int32_t times = counts[token] >> 1;
        counts[token] = 0;
        float x = logits[token];
        x = x > 0 ? x / with.repetition : float(double(x) * double(with.repetition));
        if (times) x = x - float(double(with.frequency) * double(times)) - with.presence;
        logits[token] = x;
    }
}

// Returns whether the reply, the tokens from `prompt` to `length`, ends with this prefix. Its leading -1 match
// anything.
static bool ends_with(const int32_t* tokens, int64_t length, int64_t prompt, const int32_t* prefix, int64_t longest) {
    for (int64_t i = 0; i < longest; i++) {
        if (prefix[i] < 0) continue;
        const int64_t place = length - longest + i;
        if (place < prompt || place < 0 || tokens[place] != prefix[i]) return false;
    }
    return true;
}

static void divide(float* logits, int64_t vocab, float divisor) {
    int64_t i = 0;
    for (; i + W <= vocab; i += W) store(logits + i, load(logits + i) / divisor);
    for (; i < vocab; i++) logits[i] /= divisor;
}

}  // namespace logit_processors
