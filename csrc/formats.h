// Weight formats: how tensors are stored in files, and how matrices are packed for the kernels.
//
// A packed matrix keeps its type, unless another is asked for: packing permutes values and never requantises, so that
// each weight is exactly the number the file says. Only the order differs from the file's:
//
//   panel     16 consecutive output rows of the matrix (the last one padded with zeros), stored one after the other
//   float     a panel is [cols][16] values of f32, f16 or bf16
//   quantised a panel is cols / 32 blocks, one per group of 32 inputs:
//               values   8 quads of 4 inputs. A quad is [16][4] (column, input) bytes. 4-bit types hold two quads in 64
//                        bytes, the even quad in the low nibbles, the odd one in the high nibbles.
//               scales   [16] f16, or f32 for the K types (their two-level scales multiplied out); two rows of them,
//                        one per 16 inputs, for q6_k
//               minimums [16] of the same type as the scales (q4_1, q5_1, q4_k, q5_k)
//             weight = scale * (value - zero) + minimum
//
//   type   value            zero   bits per weight, packed
//   q4_0   unsigned 4 bits   8     4.5
//   q4_1   unsigned 4 bits   0     5
//   q4_k   unsigned 4 bits   0     6
//   q5_0   unsigned 5 bits   16    8.5  (a byte per value)
//   q5_1   unsigned 5 bits   0     9
//   q5_k   unsigned 5 bits   0     10
//   q6_k   unsigned 6 bits   32    10
//   q8_0   unsigned 8 bits  128    8.5
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "threads.h"

namespace chairlift {

// The names of models/spec.py's TensorType. q* are GGUF's block formats.
enum class Type : std::uint8_t { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

Type parse_type(const std::string& name);  // throws std::invalid_argument
const char* type_name(Type type);

constexpr int kPanel = 16;  // output columns per panel
constexpr int kGroup = 32;  // inputs per quantisation group

constexpr bool is_quantized(Type type) { return type >= Type::q4_0; }

// How the packed form of a quantised type is laid out (table above).
struct PackedLayout {
    int value_bits;     // in memory: 4 or 8
    int zero;
    int scale_rows;     // 2: one scale per 16 inputs
    bool has_minimum;
    bool wide_scales;   // f32, else f16

    constexpr int value_bytes() const { return kGroup * kPanel * value_bits / 8; }
    constexpr int scale_row_bytes() const { return kPanel * (wide_scales ? 4 : 2); }
    constexpr int minimum_offset() const { return value_bytes() + scale_rows * scale_row_bytes(); }
    constexpr int block_bytes() const { return minimum_offset() + (has_minimum ? scale_row_bytes() : 0); }
};

constexpr PackedLayout packed_layout(Type type) {
    switch (type) {
        case Type::q4_0: return {4, 8, 1, false, false};
        case Type::q4_1: return {4, 0, 1, true, false};
        case Type::q4_k: return {4, 0, 1, true, true};
        case Type::q5_0: return {8, 16, 1, false, false};
        case Type::q5_1: return {8, 0, 1, true, false};
        case Type::q5_k: return {8, 0, 1, true, true};
        case Type::q6_k: return {8, 32, 2, false, true};
        default: return {8, 128, 1, false, false};  // q8_0
    }
}

// Bytes of `rows` stored rows of `cols` values. Throws std::invalid_argument if a size is not in 1..2^28 or the type
// cannot hold rows of `cols` values (blocks of 32, or of 256 for the K types).
std::size_t stored_bytes(Type type, std::int64_t rows, std::int64_t cols);

// As above, and throws std::invalid_argument unless it is exactly `size`.
void check_stored_size(Type type, std::int64_t rows, std::int64_t cols, std::size_t size);

// One stored row to floats; the value of each is what the format defines, rounded once to f32. Sizes checked before.
void dequantize_row(Type type, const std::uint8_t* stored, int cols, float* out);

// 64-byte aligned memory, not initialised.
class AlignedBuffer {
public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(std::size_t bytes);
    std::uint8_t* data() const { return data_.get(); }
    std::size_t size() const { return size_; }

private:
    struct Free {
        void operator()(std::uint8_t* pointer) const;
    };
    std::unique_ptr<std::uint8_t, Free> data_;
    std::size_t size_ = 0;
};

// Lets the system back the memory with huge pages, where it can.
void ask_for_huge_pages(const AlignedBuffer& memory);

// What kernels read: plain data, does not own.
struct MatrixView {
    Type type = Type::f32;
    int rows = 0;  // outputs
    int cols = 0;  // inputs
    int panels = 0;
    std::size_t panel_bytes = 0;
    const std::uint8_t* data = nullptr;

    std::size_t bytes() const { return panels * panel_bytes; }
};

struct PackedMatrix {
    MatrixView view;
    AlignedBuffer storage;  // empty if the matrix lies in memory of others

    std::size_t bytes() const { return view.bytes(); }
};

// What a matrix of this type will be once it is packed; `data` is null. Throws as stored_bytes().
MatrixView packed_view(Type type, std::int64_t rows, std::int64_t cols);

// Packs a stored [rows, cols] matrix as `packed`: its own type, f32 (dequantised), or, if it is of floats, q8_0 or q4_1
// (quantised as quantize_row() does). Runs on the pool: call it outside run(). `place` takes the packed_view().bytes()
// of it; null: the matrix gets storage of its own. Throws std::invalid_argument for sizes that do not fit `stored`, for
// another `packed`, and for weights that it cannot hold.
PackedMatrix pack(Type type, std::int64_t rows, std::int64_t cols, std::span<const std::uint8_t> stored, Type packed,
                  ThreadPool& pool, std::uint8_t* place = nullptr);

// Row `row` (an output of the matrix, e.g. a token's embedding) to cols floats: the same numbers as dequantize_row.
void dequantize_packed_row(const MatrixView& matrix, int row, float* out);

}  // namespace chairlift
