// Mixtures of experts: choice of experts for each token, the sorted order of an expert's rows, and the weighted sum.
//
// The (token, expert) pairs of a step are sorted by expert, and by token within an expert. The pairs of an expert then
// form an ordinary linear over adjacent rows, with the code and the weight layouts of all other linears. Each thread
// computes that order for itself, which takes less time than waiting for another thread to do it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "program.h"
#include "simd.h"

namespace experts {

// The order of a step's pairs (token · k + rank), and the sizes for the current linear over them. One for each thread.
struct Order {
    std::vector<int64_t> begin;         // [count + 1] place of each expert's first pair
    std::vector<int32_t> pair, owner;   // [places] the pair there and its expert
    std::vector<int32_t> place;         // [pairs]
    std::vector<float> scores, compared, totals;  // of a token's experts and groups of experts
    std::vector<char> kept;                       // [groups]
    std::vector<int64_t> pieces, room;  // [count + 1] of the current linear: work pieces and floats before each expert

    void sort(const Route& op, int64_t tokens) {
        const int64_t pairs = tokens * op.k;
        begin.assign(size_t(op.count + 1), 0);
        pair.resize(size_t(pairs)), owner.resize(size_t(pairs)), place.resize(size_t(pairs));
        for (int64_t p = 0; p < pairs; p++) begin[size_t(op.chosen[p]) + 1]++;
        for (int64_t e = 0; e < op.count; e++) begin[size_t(e) + 1] += begin[size_t(e)];
        next.assign(begin.begin(), begin.end() - 1);
        for (int64_t p = 0; p < pairs; p++) {
            const int32_t expert = op.chosen[p];
            const int64_t at = next[size_t(expert)]++;
            pair[size_t(at)] = int32_t(p), owner[size_t(at)] = expert, place[size_t(p)] = int32_t(at);
        }
    }
    int64_t rows(int64_t expert) const { return begin[size_t(expert) + 1] - begin[size_t(expert)]; }

  private:
    std::vector<int64_t> next;
};

}  // namespace experts

// Keeps the groups of experts whose largest score, or whose sum of the two largest, is largest, the first among equals.
static void keep_groups(const Route& op, const float* compared, experts::Order& order) {
    const int64_t size = op.count / op.groups;
    order.kept.assign(size_t(op.groups), 0);
    order.totals.resize(size_t(op.groups));
    for (int64_t g = 0; g < op.groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (const float* x = compared + g * size; x < compared + (g + 1) * size; x++) {
            second = std::max(second, std::min(first, *x));
            first = std::max(first, *x);
        }
        order.totals[size_t(g)] = op.top_two ? first + second : first;
    }
    for (int64_t n = 0; n < op.groups_kept; n++) {
        int64_t best = -1;
        for (int64_t g = 0; g < op.groups; g++)
            if (!order.kept[size_t(g)] && (best < 0 || order.totals[size_t(g)] > order.totals[size_t(best)])) best = g;
        order.kept[size_t(best)] = 1;
    }
}

// Scores of all experts of a token: softmax or sigmoid of its logits.
static void score_row(const Route& op, const float* logits, float* scores) {
    if (op.scores == SIGMOID) {
        for (int64_t e = 0; e < op.count; e++) scores[e] = 1.f / (1.f + std::exp(-logits[e]));
        return;
    }
    const float top = *std::max_element(logits, logits + op.count);
    float sum = 0;
    for (int64_t e = 0; e < op.count; e++) sum += scores[e] = std::exp(logits[e] - top);
    for (int64_t e = 0; e < op.count; e++) scores[e] /= sum;
}

// Weights of the chosen experts where logits are compared. The first of them has the largest logit.
static void softmax_weights(const Route& op, const float* logits, const int32_t* chosen, float* weights) {
    const float top = logits[chosen[0]];
    float sum = 0;
    if (op.scores == SOFTMAX_CHOSEN)
        for (int64_t j = 0; j < op.k; j++) sum += std::exp(logits[chosen[j]] - top);
    else
        for (int64_t e = 0; e < op.count; e++) sum += std::exp(logits[e] - top);
    for (int64_t j = 0; j < op.k; j++) weights[j] = std::exp(logits[chosen[j]] - top) / sum;
}

// The experts with the largest scores, the first among equals, and their weights, both best first.
static void route_row(const Route& op, int64_t token, experts::Order& order) {
    const float* logits = op.logits + token * op.logits_stride;
    int32_t* chosen = op.chosen + token * op.k;
    float* weights = op.weights + token * op.k;
    const bool by_logits = op.scores != SIGMOID && op.groups == 1 && !op.correction;
    const float* compared = logits;
    if (!by_logits) {
        order.scores.resize(size_t(op.count));
        score_row(op, logits, order.scores.data());
        order.compared = order.scores;
        for (int64_t e = 0; op.correction && e < op.count; e++) order.compared[size_t(e)] += op.correction[e];
        compared = order.compared.data();
        if (op.groups > 1) keep_groups(op, compared, order);
    }
    const int64_t size = op.count / op.groups;
    int64_t seen = 0;
    for (int64_t e = 0; e < op.count; e++) {
        if (op.groups > 1 && !order.kept[size_t(e / size)]) continue;
        // Insert after all that are not smaller. If scores are NaN, some experts are chosen and their weights are NaN.
        if (seen++ >= op.k && !(compared[e] > compared[chosen[op.k - 1]])) continue;
        int64_t at = std::min<int64_t>(seen - 1, op.k - 1);
        for (; at > 0 && compared[e] > compared[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = int32_t(e);
    }
    if (by_logits) softmax_weights(op, logits, chosen, weights);
    else
        for (int64_t j = 0; j < op.k; j++) weights[j] = order.scores[size_t(chosen[j])];
    float divisor = 1;
    if (op.normalized) {
        divisor = 1e-20f;
        for (int64_t j = 0; j < op.k; j++) divisor += weights[j];
    }
    if (op.normalized || op.scale != 1.f)
        for (int64_t j = 0; j < op.k; j++) weights[j] = weights[j] / divisor * op.scale;
}

// y[t] = Σ_j weight[t][j] · x[place of pair j] (+ sigmoid(gate[t]) · shared[t]), in the order of the ranks.
static void combine_row(const Combine& op, int64_t token, const experts::Order& order) {
    float* y = op.y + token * op.y_stride;
    const float* weights = op.weights ? op.weights + token * op.k : nullptr;
    const auto weight = [&](int64_t j) { return weights ? weights[j] : 1.f; };
    const int32_t* places = order.place.data() + token * op.k;
    const int64_t computed = order.begin[size_t(op.count)];  // rows of x; those after them are inputs
    const float* input = op.input ? op.input + token * op.input_stride : nullptr;
    float opened = 1;
    if (op.gate) opened = 1.f / (1.f + std::exp(-op.gate[token * op.gate_stride]));
    const float* shared = op.shared ? op.shared + token * op.shared_stride : nullptr;
    int64_t i = 0;
    for (; i + W <= op.size; i += W) {
        vf sum = {};
        for (int64_t j = 0; j < op.k; j++) {
            if (places[j] < computed) sum += weight(j) * load(op.x + places[j] * op.x_stride + i);
            else if (input) sum += weight(j) * load(input + i);
        }
        store(y + i, shared ? sum + opened * load(shared + i) : sum);
    }
    for (; i < op.size; i++) {
        float sum = 0;
        for (int64_t j = 0; j < op.k; j++) {
            if (places[j] < computed) sum += weight(j) * op.x[places[j] * op.x_stride + i];
            else if (input) sum += weight(j) * input[i];
        }
        y[i] = shared ? sum + opened * shared[i] : sum;
    }
}
