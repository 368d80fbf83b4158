// Matrix products: activations [m, cols] times the transpose of a packed weight matrix [rows, cols].
//
// Each output element is computed by one fixed sequence of floating-point operations, whatever m, the tile a row falls
// in, the number of threads and the partition of the work: a row's result is the same bits alone and among others.
//
// Quantised weights are multiplied in integers with activations quantised to int8 in groups of 32: per row and group,
// scale = max|x| / 127 and value = round(x / scale). For group after group, in order:
//     acc = fma(sum of value * (weight value - zero), scale * weight_scale, acc)     the sum is an exact integer
//     acc = fma(scale * sum of value, weight_minimum, acc)                           where the type has minimums
// Float weights: acc = fma(x[k], w[k], acc) for k in order. (The portable kernels round the product of each fma first.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "formats.h"
#include "inline.h"
#include "isa.h"
#include "threads.h"

namespace chairlift {

constexpr int kRowBlock = 16;  // rows whose numbers by group lie side by side
constexpr int kRowNumbers = 4;  // of a row and group

constexpr int kLineRows = 64 / (kRowNumbers * sizeof(float));  // whose numbers share a cache line

// body(row) for all of `count` rows, over all threads; within pool.run(), one such loop between two barriers. A thread takes
// a multiple of `least` rows: where rows are quantised, kLineRows, so that no line goes to and fro between threads.
template <class Body>
void for_rows(ThreadPool& pool, int count, int least, Body&& body) {
    const int some = count / (4 * pool.size()), grain = some < least ? least : some / least * least;
    pool.for_each_piece(count, grain, [&](std::int64_t begin, std::int64_t end) {
        for (int row = static_cast<int>(begin); row < end; ++row) body(row);
    });
}

// Activations as the kernels read them: plain data, does not own. Row r starts at x + r * x_stride and q + r * q_stride.
// The quantised form may be absent if no weight of the product is quantised.
struct ActRows {
    int rows = 0;
    int cols = 0;
    const float* x = nullptr;
    std::size_t x_stride = 0;
    // The rest is written by MatmulKernels::quantize_row. Per row: cols int8 values; and per group of 32 four numbers:
    // scale, scale * sum of the values, sum of the values, sum of the first 16 values. Those of sixteen rows lie side by
    // side, [block of rows][group][row of the block][number], so that a kernel finds them from one address.
    std::int8_t* q = nullptr;
    std::size_t q_stride = 0;
    float* groups = nullptr;

    CHAIRLIFT_INLINE float* groups_of(int row) const {  // the first group's; kRowNumbers * kRowBlock from group to group
        const std::size_t of_block = static_cast<std::size_t>(cols / kGroup) * kRowNumbers * kRowBlock;
        return groups + row / kRowBlock * of_block + row % kRowBlock * kRowNumbers;
    }
};

// Memory for the quantised form of up to `max_rows` rows of up to `max_cols` values.
class ActBuffer {
public:
    ActBuffer() = default;
    ActBuffer(int max_rows, int max_cols);
    static std::size_t bytes(int max_rows, int max_cols);

    // The rows at `x`, to be quantised into this buffer. `cols` must be a multiple of 32 if a weight is quantised.
    ActRows rows(const float* x, std::size_t x_stride, int rows, int cols) const;

private:
    AlignedBuffer storage_;
    int max_rows_ = 0;
};

struct MatmulKernels {
    // Quantises row `row` of x.x into x.q and x.groups. Rows are independent. Values that are not finite make the
    // scale NaN, so that they show in every output of the row. Only if cols is a multiple of 32.
    void (*quantize_row)(const ActRows& x, int row);

    // Rows [row_begin, row_end) times panels [panel_begin, panel_end):
    //     out[r * out_stride + c] = product (+ bias[c]) (+ out[r * out_stride + c] if accumulate)
    // for c < w.rows. bias [w.rows] may be null. x.cols must equal w.cols, and row_begin be a multiple of kRowBlock.
    void (*gemm)(const MatrixView& w, const ActRows& x, int row_begin, int row_end, int panel_begin, int panel_end,
                 float* out, std::size_t out_stride, const float* bias, bool accumulate);

    // What each thread that calls gemm needs for itself, and what takes it: called once by each, so that it is there.
    std::size_t thread_bytes;
    void (*prepare_thread)();
};

// One of several products that share their input.
struct MatmulJob {
    const MatrixView* w = nullptr;
    float* out = nullptr;  // [x.rows, w->rows], rows out_stride apart
    std::size_t out_stride = 0;
    const float* bias = nullptr;
    bool accumulate = false;
};

// All jobs on all threads. Within pool.run(), called by every thread with the same arguments, once between two barriers
// (it uses pool.claim). No barrier inside: x must be complete (barrier after quantising), out is after the next barrier.
void matmul(const MatmulKernels& kernels, std::span<const MatmulJob> jobs, const ActRows& x, ThreadPool& pool);

// Quantises all rows on all threads, in the same manner and with the same rule: one claim loop between two barriers.
void quantize_rows(const MatmulKernels& kernels, const ActRows& x, ThreadPool& pool);

}  // namespace chairlift

CHAIRLIFT_PER_ISA(MatmulKernels, matmul_kernels)
