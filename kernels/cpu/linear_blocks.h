// y = x Wᵀ with weights in blocks of ggml (kernels/ggml_layout.py), which linear_blocks.cpp compiles on its own.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "linear.h"
#pragma GCC diagnostic pop

#pragma GCC visibility push(hidden)
namespace blocks {

static inline bool is_form(const Linear& op) { return op.form >= BLOCKS_Q2_K && op.form < FORMS; }

size_t packed_size(const Linear& op, int64_t rows);  // floats of the packed rows of x
void pack_row(const Linear& op, int64_t row, int64_t rows, float* packed, Scratch& scratch);
int64_t pieces(const Linear& op, int64_t rows);      // of work: chunks of panels × tiles, tiles counting fastest
int64_t chunks(int64_t rows);                        // of panels
// Packs rows of blocks as in a file, [outputs][inputs / inputs of a block][bytes of a block].
void pack(int32_t form, const uint8_t* rows, int64_t stride, int64_t at, int64_t count, int64_t inputs, uint8_t* out);
// out = scale · a row of such blocks.
int64_t row_bytes(int32_t form, int64_t size);
void restore(int32_t form, const uint8_t* row, int64_t size, float scale, float* out);
void run(const Linear& op, int64_t rows, const float* packed, int64_t begin, int64_t end, Scratch& scratch);

}  // namespace blocks
#pragma GCC visibility pop
