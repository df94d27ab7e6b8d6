// Log probabilities of a row: of one token, with its rank, and of the most likely tokens. All use the same largest
// logit and the same sum, so a token has the same log probability in every place.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace logprobs {

struct TokenLogprob {
    float logprob;
    int64_t rank;  // 1: no token is more likely
};

// tokens, values: [count], the most likely ones in descending order, equal ones by their number. count ≤ vocab.
static TokenLogprob row(const float* logits, int64_t vocab, int64_t token, int64_t count, int64_t* tokens,
                        float* values) {
    vf tops = splat(-INFINITY);
    vi spoiled = {};
    int64_t at = 0;
    for (; at + W <= vocab; at += W) {
        const vf x = load(logits + at);
        tops = larger(tops, x);
        spoiled |= x != x;
    }
    float most = largest(tops);
    for (; at < vocab; at++) most = logits[at] > most || logits[at] != logits[at] ? logits[at] : most;
    for (int i = 0; i < W; i++) most = spoiled[i] ? NAN : most;
    double sums[W] = {};
    at = 0;
    for (; at + W <= vocab; at += W) {
        vf weight = exp(load(logits + at) - most);
        for (int i = 0; i < W; i++) sums[i] += double(weight[i]);
    }
    double sum = 0;
    for (int i = 0; i < W; i++) sum += sums[i];
    for (; at < vocab; at++) sum += double(exp(splat(logits[at] - most))[0]);
    const double normaliser = std::log(sum);
    auto logprob = [&](float logit) { return float((double(logit) - double(most)) - normaliser); };
    const float own = logits[token];
    vi counts = {};
    for (at = 0; at + W <= vocab; at += W) counts -= load(logits + at) > own;  // a true lane is -1
    int64_t above = 0;
    for (int i = 0; i < W; i++) above += counts[i];
    for (; at < vocab; at++) above += logits[at] > own;

    // The best tokens so far, as a heap with the worst of them at the top.
    typedef std::pair<float, int64_t> Entry;
    auto better = [](const Entry& a, const Entry& b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    std::vector<Entry> heap;
    heap.reserve(size_t(count));
    auto look = [&](int64_t i) {
        const Entry entry{logits[i], i};
        if (int64_t(heap.size()) < count) {
            heap.push_back(entry);
            std::push_heap(heap.begin(), heap.end(), better);
        } else if (better(entry, heap.front())) {
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = entry;
            std::push_heap(heap.begin(), heap.end(), better);
        }
    };
    for (at = 0; at < vocab && count; at += W) {
        if (int64_t(heap.size()) == count && at + W <= vocab) {
            // A later token must be strictly better than the worst so far.
            const vi better_lanes = load(logits + at) > heap.front().first;
            bool any = false;
            for (int i = 0; i < W; i++) any |= better_lanes[i] != 0;
            if (!any) continue;
        }
        for (int64_t i = at; i < std::min<int64_t>(at + W, vocab); i++) look(i);
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    for (size_t i = 0; i < heap.size(); i++) tokens[i] = heap[i].second, values[i] = logprob(heap[i].first);
    return {logprob(own), above + 1};
}

}  // namespace logprobs
