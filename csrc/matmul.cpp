#include "matmul.h"

#include <algorithm>

namespace chairlift {
namespace {

// Of a row's values; rows start on a cache line so that threads do not share one.
std::size_t value_stride(int cols) { return (static_cast<std::size_t>(cols) + 63) / 64 * 64; }
std::size_t groups_bytes(int cols) {
    return static_cast<std::size_t>(cols + kGroup - 1) / kGroup * kRowNumbers * sizeof(float);
}
int whole_tiles(int rows) { return (rows + kRowBlock - 1) / kRowBlock * kRowBlock; }  // kernels may read all of a tile

}  // namespace

std::size_t ActBuffer::bytes(int max_rows, int max_cols) {
    return static_cast<std::size_t>(whole_tiles(max_rows)) * (value_stride(max_cols) + groups_bytes(max_cols));
}

ActBuffer::ActBuffer(int max_rows, int max_cols)
    : storage_(bytes(max_rows, max_cols)), max_rows_(whole_tiles(max_rows)) {}

ActRows ActBuffer::rows(const float* x, std::size_t x_stride, int rows, int cols) const {
    ActRows view;
    view.rows = rows;
    view.cols = cols;
    view.x = x;
    view.x_stride = x_stride;
    view.q = reinterpret_cast<std::int8_t*>(storage_.data());
    view.q_stride = value_stride(cols);
    view.groups = reinterpret_cast<float*>(storage_.data() + static_cast<std::size_t>(max_rows_) * view.q_stride);
    return view;
}

void quantize_rows(const MatmulKernels& kernels, const ActRows& x, ThreadPool& pool) {
    for_rows(pool, x.rows, kLineRows, [&](int row) { kernels.quantize_row(x, row); });
}

void matmul(const MatmulKernels& kernels, std::span<const MatmulJob> jobs, const ActRows& x, ThreadPool& pool) {
    int panels = 0;
    for (const MatmulJob& job : jobs) panels += job.w->panels;
    // A piece is a run of panels times a slice of the rows: some pieces a thread, so that they end together, but few while
    // the weights' way from memory is what takes the time, and no fewer than 32 rows, so that a panel is used often once
    // it is in the cache.
    const int pieces = pool.size() == 1 ? 1 : (x.rows < 64 ? 4 : 8) * pool.size();
    const int slices = std::clamp(pieces / std::max(panels, 1), 1, std::max(1, x.rows / 32));
    const int tiles = (x.rows + kRowBlock - 1) / kRowBlock;
    const int grain = std::max(1, panels / pieces);

    pool.for_each_piece(std::int64_t{panels} * slices, grain, [&](std::int64_t begin, std::int64_t end) {
        while (begin < end) {
            const int slice = static_cast<int>(begin / panels);
            int panel = static_cast<int>(begin % panels);
            const int row_begin = tiles * slice / slices * kRowBlock;
            const int row_end = std::min(x.rows, tiles * (slice + 1) / slices * kRowBlock);
            const MatmulJob* job = jobs.data();
            while (panel >= job->w->panels) panel -= (job++)->w->panels;
            const int count = static_cast<int>(std::min<std::int64_t>(end - begin, job->w->panels - panel));
            kernels.gemm(*job->w, x, row_begin, row_end, panel, panel + count, job->out, job->out_stride, job->bias,
                         job->accumulate);
            begin += count;
        }
    });
}

}  // namespace chairlift
