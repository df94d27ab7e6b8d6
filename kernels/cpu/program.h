// Program of a step: a flat list of descriptors, built once when a model is loaded, and the step's own data.
//
// kernels/cpu/program.py mirrors these structures; both sides compare their sizes when the library is loaded. Sizes and
// strides count elements unless named otherwise; all activations are float; strides are between rows (tokens).
#pragma once

#include <cstdint>

enum Kind : int32_t {
    EMBED, NORM, ADD, ACTIVATE, ROPE_KV, LINEAR, ATTEND, CAP, ROUTE, EXPERTS, COMBINE, ALL_REDUCE, CAUSAL_CONV,
    DELTA_RULE, SELECTIVE_SCAN, GATED_NORM, LATENT_KV, HEADS, SCALE_QUERIES, LORA_SHRINK, LORA_EXPAND, RG_LRU,
    LORA_EXPERTS, SELECT, KINDS
};
enum Type : int32_t { F32, BF16, F16, I8, I4 };  // I8, I4: of pages alone
constexpr int32_t EMBED_BLOCKS = 16;  // type of a table of blocks of ggml: this and its Form
enum NormKind : int32_t { RMS, LAYER };
enum ActKind : int32_t { SILU, GELU, GELU_TANH, RELU, QUICK_GELU };
enum Scores : int32_t { SOFTMAX, SOFTMAX_CHOSEN, SIGMOID };

// out[t] = table[ids[t]] · scale
struct Embed {
    const void* table;  // [vocab, size]
    float* out;
    int64_t out_stride, size;
    int32_t type;
    float scale;
};

// Norm of each of `groups` adjacent pieces of `size`; piece g uses weight + g · weight_stride.
struct Norm {
    const float *x, *weight, *bias;  // bias may be null
    float* y;
    int64_t x_stride, y_stride, groups, size, weight_stride;
    int32_t kind;
    float eps;
};

// x += alpha · y
struct Add {
    const float* y;
    float* x;
    int64_t y_stride, x_stride, size;
    float alpha;
};

// y = act(min(x[:inner], limit)) · (clamp(x[inner:], -limit, limit) + up_offset), or act(min(x, limit)) without a gate,
// for each of `groups` adjacent pieces.
struct Activate {
    const float* x;
    float* y;
    int64_t x_stride, y_stride, inner, groups;
    int32_t act, gated;
    float limit, up_offset;  // limit: infinite where there is none
};

// Rotates q and k by the positions' angles and writes k and v to their pages. qkv: q heads, then k heads, then v heads.
struct RopeKV {
    float* qkv;
    int64_t stride, heads, kv_heads, dim, rotary_dim;  // rotary_dim: rotary dimensions, 0 without positions
    int32_t rope, interleaved, group, layer;
};

enum Form : int32_t {
    TILES_F32, TILES_BF16, AMX_BF16, PAIRS_BF16, TILES_INT4, TILES_INT8,
    BLOCKS_Q2_K, BLOCKS_Q3_K, BLOCKS_Q4_K, BLOCKS_Q5_K, BLOCKS_Q6_K, BLOCKS_IQ4_XS, BLOCKS_IQ4_NL, BLOCKS_MXFP4,  // of ggml
    BLOCKS_Q4_1, BLOCKS_Q5_0, BLOCKS_Q5_1,
    BLOCKS_INT6,  // 6 bits, quantized at load
    FORMS
};

// y = x Wᵀ (+ b)
struct Linear {
    const void* weight;  // packed, see kernels/cpu/packing.py
    const float* bias;   // of each output, or null
    const float* x;
    float* y;
    int64_t x_stride, y_stride, outputs, inputs, group;  // group: inputs that share a scale, of 4 and 8 bits
    int32_t form, zeros, scale_type;                     // zeros: 4-bit weights have zero points, else all have 8
    const int32_t* order;                                // groups hold inputs in this order; null: one after another
};

struct Attend {
    const float* q;
    const float* sinks;   // [heads], a logit more of each, which has no value; null: none
    const float* slopes;  // [heads], ALiBi: slope · (position of the key - of the query) is added to scores; null: none
    const float* biases;  // [heads][2 · reach + 1], added to scores: of the distances -reach … reach from the query to the
                          // key; others have that of the nearest; null: none
    const int32_t* selected;  // [tokens][top_k] positions whose keys a token reads, from Select; null: it reads all
    float* out;
    int64_t q_stride, out_stride, heads, kv_heads, dim, value_dim, reach;
    int64_t window, chunk;  // one of them is 0, both: all positions; chunk: positions since the last multiple are read
    int64_t top_k;          // 0 if all keys are read
    float scale, softcap;   // softcap 0: none
    int32_t group, layer, causal;  // not causal: what follows in the row is read too, and the row is there as a whole
    int32_t latent;  // pages hold latents, whose first value_dim elements are the value; kv_heads divides the work alone
    int32_t cross;   // keys are the positions before Step::starts, all of them; else those from there on
};

// Selects the top_k positions, up to its own, that a token's sparse attention reads: those with the largest
// Σ weights[head] · max(q[head] · key, 0), and the first among equals. They are in ascending order, with -1 after them
// if there are fewer. Pages hold one key for all heads, [token][dim] as latents.
struct Select {
    const float *q, *weights;  // [heads][dim] and [heads] of a token
    int32_t* selected;         // [tokens][top_k]
    int64_t q_stride, weights_stride, heads, dim, top_k;
    int32_t group, layer;
};

// Rotates the last rotary_dim elements of the latent, which is [dim], and of each head of q, which is [heads,
// query_dim]. Those of q also become the end of each head of y, [heads, dim]. Writes the latent to its page.
struct LatentKV {
    float *latent, *q, *y;
    int64_t latent_stride, q_stride, y_stride, heads, query_dim, dim, rotary_dim;
    int32_t rope, interleaved, group, layer;
};

// One linear for each head, all of one form and size, each with its own x and y.
struct Heads {
    const Linear* linears;
    int64_t count;
};

// Multiplies the first `size` elements of a row by 1 + scale · log(1 + floor((position + offset) / length)).
struct ScaleQueries {
    float* qkv;
    int64_t stride, size, length, offset;
    float scale;
};

// x = cap · tanh(scale · x / cap), or scale · x where cap is 0
struct Cap {
    float* x;
    int64_t stride, size;
    float scale, cap;
};

// The `k` of `count` experts that a token takes and their weights, best first: see experts.h.
struct Route {
    const float* logits;  // [tokens][logits_stride]
    int32_t* chosen;      // [tokens][k]
    float* weights;       // [tokens][k]
    const float* correction;  // [count], added to the scores that are compared; null: none
    int64_t logits_stride, count, k, groups, groups_kept;  // groups: equal numbers of experts, in order
    float scale;                                           // of the weights
    int32_t scores, top_two, normalized;                   // top_two: of a group its two largest count, else its largest
};

// One linear for each expert over the rows of the tokens that the last Route assigned to it. Rows of y are sorted by
// expert, and so are rows of x, unless they are `gathered` from one row for each token.
struct Experts {
    const Linear* linears;  // [count], all of one form and size, with the x and y of the whole
    const float* scales;    // [tokens][k], each of which multiplies the input of a pair; null: none
    int64_t count, k;
    int32_t gathered;
};

// y = Σ weight · x over a token's rows of x (+ sigmoid(gate) · shared); weights (all are 1), gate and shared may be null.
// The row of an expert from number `count` on is the input of the token, or 0 if that is null.
struct Combine {
    const float *x, *weights, *gate, *shared, *input;
    float* y;
    int64_t x_stride, gate_stride, shared_stride, input_stride, y_stride, size, k, count;
};

struct ShmCollective;

// All-reduce or all-gather of the ranks of a model (shm_collective.h). Reduce: y = Σ x, with `total` columns. Gather
// (`gathers`): the columns of all ranks one after another; rank r has the columns from total · r / ranks on. y may be x
// in a reduce.
struct AllReduce {
    const float* x;
    float* y;
    int64_t x_stride, y_stride, total;
    ShmCollective* collective;
    int32_t gathers;
};

// Operations of recurrent layers, see kernels/recurrent/. `state` is the layer's part of slot 0; slots are slot_stride
// apart. Outputs may not overlap inputs.

// y[t] = act(bias + Σ_j weight[j] · x[t - (width - 1) + j])
struct CausalConv {
    const float *x, *weight, *bias;  // weight: [width][channels]; bias may be null
    float *y, *state;                // state: [channels][width - 1]; null: every row begins with zeros
    int64_t x_stride, y_stride, slot_stride, channels, width;
    int32_t silu;  // act is silu, else none
};

struct DeltaRule {
    const float *q, *k, *v, *a, *b, *A, *dt_bias;
    float *y, *state;  // state: [heads][key_dim][value_dim]
    int64_t q_stride, k_stride, v_stride, a_stride, b_stride, y_stride, slot_stride;
    int64_t heads, key_heads, key_dim, value_dim;
    float scale, beta_scale, lower_bound;  // lower_bound: 0 for none
    int32_t qk_norm, vector_decay;         // vector_decay: a and dt_bias have key_dim numbers for each head, else one
};

struct SelectiveScan {
    const float *x, *dt, *A, *B, *C, *D, *dt_bias, *gate;  // D: [heads · head_dim]; D, dt_bias and gate may be null
    float *y, *state;                                      // state: [heads][head_dim][state_dim]
    int64_t x_stride, dt_stride, B_stride, C_stride, gate_stride, y_stride, slot_stride;
    int64_t heads, groups, head_dim, state_dim;
    float dt_min, dt_max;
    int32_t vector_A;  // A: [heads][state_dim], else [heads]
};

// Norm and gate of each of `groups` adjacent pieces of `size`; piece g uses weight + g · weight_stride. y may be x.
struct GatedNorm {
    const float *x, *gate, *weight;
    float* y;
    int64_t x_stride, gate_stride, y_stride, groups, size, weight_stride;
    float eps;
    int32_t gate_first, silu;  // the gate is silu, else sigmoid
};

// u = x A of the token's adapter, before the linear of x. Tokens without an adapter are skipped, see lora.h.
struct LoraShrink {
    const float *x, *a;  // a: [adapters][inputs][columns], a multiple of 16 columns
    float* u;
    int64_t x_stride, u_stride, inputs, columns;
};

// Outputs [at, at + rows) come from one source of a fused linear.
struct LoraPiece { int64_t at, rows, source; };

// y += u B of the token's adapter, after the linear. A source has `rank` columns of u; an adapter uses the first `ranks`.
struct LoraExpand {
    const float *u, *b;     // b: [adapters][rank][outputs]
    const int32_t* ranks;   // [adapters][sources]
    const LoraPiece* pieces;
    float* y;
    int64_t u_stride, y_stride, rank, outputs, sources, count;  // count: of pieces
};

// y = h of each token: h = a · h + √(1 - a²) · u, where a = e^(-8 · softplus(rate) · σ(decay + decay_bias)) and
// u = σ(gate + gate_bias) · x; the first token of a sequence has h = u.
struct RgLru {
    const float *x, *gate, *decay, *gate_bias, *decay_bias, *rate;  // the last three: [channels]
    float *y, *state;                                               // state: [channels]
    int64_t x_stride, gate_stride, decay_stride, y_stride, slot_stride, channels;
};

// y += (x A) B of the adapter and the expert of each pair, after the linears of experts. x and y are those of Experts. An
// adapter has the matrices and ranks of its `count` experts one after another. u of both operations is null.
struct LoraExperts {
    LoraShrink shrink;
    LoraExpand expand;
    const float* scales;  // as of Experts
    int64_t count, k;
    int32_t gathered;
};

struct Op {
    int32_t kind;
    const void* params;
};

struct Angles {
    const float *cos, *sin;  // [tokens, rotary_dim], as kernels/rope.py makes them
};

struct Group {
    const int64_t *table, *slot_mapping;  // [rows, table_width] blocks; [tokens] block · block_tokens + offset, or negative
};

struct Step {
    int64_t tokens, rows, table_width;
    const int64_t *ids, *first, *count;  // [tokens]; [rows] first position; [rows] positions
    const int64_t* slots;                // [rows] slot of the state of recurrent layers
    const int32_t* adapters;             // [tokens] adapter of each token, or -1; null: no token has one
    const int64_t* starts;               // [rows] tokens of the encoder input, which come first; null: there is none
    const int64_t* spans;                // [tokens, 2] begin and end of each token's span, equal for none; null: no token has one
    const Angles* angles;
    const Group* groups;
    void* pages;  // [blocks, layers, planes, kv_heads] parts of a page, see pages.h
    int64_t layers, planes, block_tokens, page_kv_heads, page_dim;
    int32_t page_type;
};
