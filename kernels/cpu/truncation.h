// Draw of a token among the most likely ones: min_p, top_k and top_p each keep a prefix of the tokens in descending
// order of their logits, equal ones by id (engine/sampling/candidates.py), so together they keep one prefix.
//
// The vocabulary is never sorted as a whole. Tokens are counted, and their weights e^(logit - largest) summed, in bins
// of nearly equal logits; only the bin in which the prefix ends is sorted.
#pragma once

#include <algorithm>
#include <vector>

#include "draw.h"

namespace truncation {

constexpr int BITS = 12;  // of a float's order that make its bin
constexpr int BINS = 1 << BITS;

// top_k 0, top_p 1 and log_min_p -infinity do not truncate.
struct Limits {
    int64_t top_k;
    double top_p, log_min_p;
};

// The kept tokens have a logit above `floor`, or equal to it and an id up to `last`.
struct Threshold {
    float floor;
    int64_t last;
};

struct Entry {
    float logit;
    int32_t token;
    double weight;
};

// Maps floats to unsigned integers in the same order; -0 becomes 0.
static inline uint32_t order_of(float x) {
    uint32_t bits = float_to_bits(x + 0.f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Scratch {
    std::vector<int64_t> counts = std::vector<int64_t>(BINS);
    std::vector<double> masses = std::vector<double>(BINS);
    std::vector<uint16_t> bins;
    std::vector<float> weights;
    std::vector<Entry> sorted;
    int in_order = -1;  // the bin that `sorted` has
};

class Row {
  public:
    Row(const float* logits, int64_t vocab, float most, Scratch& scratch) : logits(logits), vocab(vocab), it(scratch) {
        std::fill(it.counts.begin(), it.counts.end(), 0);
        std::fill(it.masses.begin(), it.masses.end(), 0.0);
        it.bins.resize(size_t(vocab));
        it.weights.resize(size_t(vocab + W));
        it.in_order = -1;
        weigh(most);
        for (int64_t i = 0; i < vocab; i++) {
            const uint16_t bin = uint16_t(order_of(logits[i]) >> (32 - BITS));
            it.bins[size_t(i)] = bin;
            it.counts[bin]++;
            it.masses[bin] += it.weights[size_t(i)];
        }
    }

    // Returns the number of tokens that the cuts keep, at least one.
    int64_t kept(const Limits& limits, float most) {
        int64_t keep = vocab;
        if (limits.log_min_p > -INFINITY) {
            int64_t likely = 0;
            for (int64_t i = 0; i < vocab; i++) likely += double(logits[i]) >= double(most) + limits.log_min_p;
            keep = likely;
        }
        if (limits.top_k) keep = std::min(keep, limits.top_k);
        keep = std::max<int64_t>(keep, 1);
        if (limits.top_p < 1) keep = std::min(keep, reaching(limits.top_p * mass_of(keep)));
        return std::max<int64_t>(keep, 1);
    }

    // Returns the best of the first `keep` tokens, by logit and noise. `threshold` becomes the last of these tokens.
    draw::Best best(int64_t keep, const uint32_t* key, Threshold& threshold) {
        int bin = BINS - 1;
        int64_t before = 0;
        for (; before + it.counts[size_t(bin)] < keep; bin--) before += it.counts[size_t(bin)];
        draw::Best found{-INFINITY, 0};
        if (before) {
            // Tokens of higher bins are all kept: their logits are above every logit of this bin.
            vi lane;
            for (int i = 0; i < W; i++) lane[i] = i;
            for (int64_t at = 0; at < vocab; at += W) {
                bool any = false;
                const int64_t end = std::min<int64_t>(at + W, vocab);
                for (int64_t i = at; i < end; i++) any |= it.bins[size_t(i)] > bin;
                if (!any) continue;
                float x[W];
                for (int i = 0; i < W; i++) x[i] = at + i < end ? logits[at + i] : -INFINITY;
                const vf score = load(x) + draw::gumbel(lane + int32_t(at), key[0], key[1]);
                for (int64_t i = at; i < end; i++)
                    if (it.bins[size_t(i)] > bin) take(found, score[i - at], i);
            }
        }
        sort(bin);
        const size_t rest = size_t(keep - before);
        threshold = {it.sorted[rest - 1].logit, it.sorted[rest - 1].token};
        for (size_t first = 0; first < rest; first += W) {
            float x[W];
            vi token = {};
            const size_t count = std::min<size_t>(W, rest - first);
            for (size_t i = 0; i < W; i++) x[i] = -INFINITY;
            for (size_t i = 0; i < count; i++) x[i] = it.sorted[first + i].logit, token[i] = it.sorted[first + i].token;
            const vf score = load(x) + draw::gumbel(token, key[0], key[1]);
            for (size_t i = 0; i < count; i++) take(found, score[i], token[i]);
        }
        return found;
    }

  private:
    const float* logits;
    int64_t vocab;
    Scratch& it;

    static void take(draw::Best& found, float score, int64_t token) {
        if (score > found.score || (score == found.score && token < found.token)) found = {score, token};
    }

    void weigh(float most) {
        int64_t at = 0;
        for (; at + W <= vocab; at += W) store(&it.weights[size_t(at)], exp(load(logits + at) - most));
        for (; at < vocab; at++) it.weights[size_t(at)] = exp(splat(logits[at] - most))[0];
    }

    // Sorts the tokens of a bin in descending order, equal ones by id.
    void sort(int bin) {
        if (it.in_order == bin) return;
        it.in_order = bin;
        it.sorted.clear();
        for (int64_t i = 0; i < vocab; i++)
            if (it.bins[size_t(i)] == bin) it.sorted.push_back({logits[i], int32_t(i), it.weights[size_t(i)]});
        std::sort(it.sorted.begin(), it.sorted.end(), [](const Entry& a, const Entry& b) {
            return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
        });
    }

    // Returns the weight of the first `count` tokens.
    double mass_of(int64_t count) {
        double mass = 0;
        int bin = BINS - 1;
        for (; bin >= 0 && it.counts[size_t(bin)] <= count; bin--) {
            count -= it.counts[size_t(bin)];
            mass += it.masses[size_t(bin)];
        }
        if (count) {
            sort(bin);
            for (int64_t i = 0; i < count; i++) mass += it.sorted[size_t(i)].weight;
        }
        return mass;
    }

    // Returns the number of tokens of the shortest prefix whose weight reaches this.
    int64_t reaching(double wanted) {
        double mass = 0;
        int64_t count = 0;
        for (int bin = BINS - 1; bin >= 0; bin--) {
            if (mass + it.masses[size_t(bin)] < wanted) {
                mass += it.masses[size_t(bin)];
                count += it.counts[size_t(bin)];
                continue;
            }
            sort(bin);
            for (const Entry& entry : it.sorted) {
                count++;
                mass += entry.weight;
                if (mass >= wanted) return count;
            }
        }
        return count;  // rounding left the last sum just below
    }
};

// Draws a token. The score is not finite if a logit is NaN or no token is possible.
static draw::Best drawn(const float* logits, int64_t vocab, const uint32_t* key, const Limits& limits, Scratch& scratch,
                        Threshold& threshold) {
    const draw::Best top = draw::best(logits, vocab, nullptr);
    threshold = {-INFINITY, vocab - 1};
    if (!std::isfinite(top.score)) return top;
    Row row(logits, vocab, top.score, scratch);
    return row.best(row.kept(limits, top.score), key, threshold);
}

}  // namespace truncation
