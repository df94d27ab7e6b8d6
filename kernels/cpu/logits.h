// Functions on rows of logits outside of a step's program: logit processors, draws, log probabilities. Part of
// program.cpp, whose Runner they use; kernels/cpu/library.py declares them to Python.
#pragma once

#include "draw.h"
#include "logit_processors.h"
#include "logprobs.h"
#include "truncation.h"

namespace {

// Calls work(row, id) for each row, where id is the number of the thread. One row does not wake the team.
template <class Work> void each_row(Runner& runner, int64_t count, Work work) {
    if (count == 1) return work(0, 0);
    auto all = [&](int id) {
        int64_t begin, end;
        while (runner.team.take(count, 1, begin, end)) work(begin, id);
    };
    if (count) runner.team.run(all);
}

}  // namespace

extern "C" {

// Draws the best token of each of these rows of logits, [.., vocab]. keys: two words for each row, or null for no
// noise.
void slipway_draw(void* runner, const float* logits, int64_t vocab, const int64_t* rows, int64_t count,
                  const uint32_t* keys, int64_t* tokens, float* scores) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        const draw::Best found = draw::best(logits + rows[i] * vocab, vocab, keys ? keys + 2 * i : nullptr);
        tokens[i] = found.token;
        scores[i] = found.score;
    });
}

// Draws with noise among the tokens that the limits keep, and returns the threshold. top_k, top_p, log_min_p: [count],
// see truncation.h.
void slipway_draw_truncated(void* runner, const float* logits, int64_t vocab, const int64_t* rows, int64_t count,
                            const uint32_t* keys, const int64_t* top_k, const double* top_p, const double* log_min_p,
                            int64_t* tokens, float* scores, float* floors, int64_t* lasts) {
    Runner& it = *static_cast<Runner*>(runner);
    std::vector<truncation::Scratch> scratch(size_t(it.team.size));
    each_row(it, count, [&](int64_t i, int id) {
        const truncation::Limits limits{top_k[i], top_p[i], log_min_p[i]};
        truncation::Threshold threshold;
        const draw::Best found =
            truncation::drawn(logits + rows[i] * vocab, vocab, keys + 2 * i, limits, scratch[size_t(id)], threshold);
        tokens[i] = found.token;
        scores[i] = found.score;
        floors[i] = threshold.floor;
        lasts[i] = threshold.last;
    });
}

// Returns for the rows `at` of [.., vocab] the log probability and rank of one token, and the `count` most likely
// tokens: [rows, count]. Only tokens with logits / divisor that pass the threshold are possible. divisors null: all
// tokens, undivided.
void slipway_logprobs(void* runner, const float* logits, int64_t stride, int64_t vocab, const int64_t* at, int64_t rows,
                      const int64_t* chosen, int64_t count, const float* divisors, const float* floors,
                      const int64_t* lasts, float* logprobs, int64_t* ranks, int64_t* tokens, float* values) {
    Runner& it = *static_cast<Runner*>(runner);
    std::vector<std::vector<float>> left(size_t(it.team.size));
    each_row(it, rows, [&](int64_t i, int id) {
        const float* row = logits + at[i] * stride;
        if (divisors) {
            auto& own = left[size_t(id)];
            own.resize(size_t(vocab));
            for (int64_t token = 0; token < vocab; token++) {
                const float x = row[token] / divisors[i];
                own[size_t(token)] = x > floors[i] || (x == floors[i] && token <= lasts[i]) || x != x ? x : -INFINITY;
            }
            row = own.data();
        }
        const logprobs::TokenLogprob found =
            logprobs::row(row, vocab, chosen[i], count, tokens + i * count, values + i * count);
        logprobs[i] = found.logprob;
        ranks[i] = found.rank;
    });
}

// Logit processors of logit_processors.h. logits: rows of `vocab` with this stride; rows: different rows to change.

void slipway_token_mask(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                        const uint32_t* words, int64_t words_stride) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        logit_processors::mask(logits + rows[i] * stride, vocab, words + i * words_stride);
    });
}

void slipway_min_tokens(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                        const int32_t* stops, int64_t most, int64_t stops_stride) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        logit_processors::min_tokens(logits + rows[i] * stride, vocab, stops + i * stops_stride, most);
    });
}

void slipway_divide(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                    const float* divisors) {
    each_row(*static_cast<Runner*>(runner), count, [&](int64_t i, int) {
        logit_processors::divide(logits + rows[i] * stride, vocab, divisors[i]);
    });
}

// logits[rows[i], ids[i]] += values[i], in order.
void slipway_logit_bias(void*, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                        const int32_t* ids, const float* values) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] >= 0 && ids[i] < vocab) logits[rows[i] * stride + ids[i]] += values[i];
}

// slots, lengths: of each row; prompts and strengths: of each slot, as lines of `tokens`.
void slipway_penalties(void* runner, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                       const int32_t* slots, const int32_t* lengths, const int32_t* tokens, int64_t tokens_stride,
                       const int32_t* prompts, const float* repetition, const float* frequency, const float* presence) {
    Runner& it = *static_cast<Runner*>(runner);
    each_row(it, count, [&](int64_t i, int id) {
        auto& counts = it.counts[size_t(id)];
        if (int64_t(counts.size()) < vocab) counts.assign(size_t(vocab), 0);
        const int64_t row = rows[i], slot = slots[row];
        logit_processors::penalties(logits + row * stride, vocab, tokens + slot * tokens_stride, lengths[row],
                                    prompts[slot], {repetition[slot], frequency[slot], presence[slot]}, counts.data());
    });
}

// rows, lasts, prefixes: the row of each word, its last token, and its other tokens, [count, longest], padded with -1
// at the start.
void slipway_bad_words(void*, float* logits, int64_t stride, int64_t vocab, const int32_t* rows, int64_t count,
                       const int32_t* slots, const int32_t* lengths, const int32_t* tokens, int64_t tokens_stride,
                       const int32_t* prompts, const int32_t* lasts, const int32_t* prefixes, int64_t longest) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows[i], slot = slots[row];
        if (lasts[i] < 0 || lasts[i] >= vocab) continue;
        const int32_t *known = tokens + slot * tokens_stride, *prefix = prefixes + i * longest;
        if (logit_processors::ends_with(known, lengths[row], prompts[slot], prefix, longest))
            logits[row * stride + lasts[i]] = -INFINITY;
    }
}

}  // extern "C"
