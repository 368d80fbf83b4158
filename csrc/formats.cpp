#include "formats.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "half.h"
#include "quantize.h"

namespace chairlift {
namespace {

struct TypeInfo {
    const char* name;
    int block_values;
    int block_bytes;
};

constexpr TypeInfo kTypes[] = {
    {"f32", 1, 4},     {"f16", 1, 2},     {"bf16", 1, 2},      {"q4_0", 32, 18},    {"q4_1", 32, 20},   {"q5_0", 32, 22},
    {"q5_1", 32, 24},  {"q8_0", 32, 34},  {"q4_k", 256, 144},  {"q5_k", 256, 176},  {"q6_k", 256, 210},
};
constexpr int kTypeCount = sizeof kTypes / sizeof kTypes[0];

const TypeInfo& info(Type type) { return kTypes[static_cast<int>(type)]; }

// Any quantised format, one group of 32 inputs: weight = scale[i / 16] * (value[i] - zero) + minimum.
struct Group {
    std::uint8_t values[kGroup];
    float scale[2];
    float minimum;
};

float f16_at(const std::uint8_t* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, 2);
    return float_from_f16(bits);
}

void set_scale(Group& group, float scale, float minimum = 0.0f) {
    group.scale[0] = group.scale[1] = scale;
    group.minimum = minimum;
}

// 16 bytes: the low nibbles are values 0..15, the high ones 16..31.
void read_nibbles(const std::uint8_t* bytes, Group& group) {
    for (int i = 0; i < 16; i++) {
        group.values[i] = bytes[i] & 15;
        group.values[i + 16] = bytes[i] >> 4;
    }
}

// A 32-bit word: bit i is bit 4 of value i.
void read_fifth_bits(const std::uint8_t* bytes, Group& group) {
    for (int i = 0; i < kGroup; i++) group.values[i] |= ((bytes[i / 8] >> (i % 8)) & 1) << 4;
}

// Eight 6-bit scales and eight 6-bit minimums in 12 bytes: of the first four of each the bits stand together, of the
// last four the low nibbles are in bytes 8..11 and the upper two bits on top of bytes 0..7.
void read_k_scale(const std::uint8_t* block, int sub, Group& group) {
    const std::uint8_t* packed = block + 4;
    int scale, minimum;
    if (sub < 4) {
        scale = packed[sub] & 63;
        minimum = packed[sub + 4] & 63;
    } else {
        scale = (packed[sub + 4] & 15) | (packed[sub - 4] >> 6 << 4);
        minimum = (packed[sub + 4] >> 4) | (packed[sub] >> 6 << 4);
    }
    set_scale(group, f16_at(block) * static_cast<float>(scale), -(f16_at(block + 2) * static_cast<float>(minimum)));
}

// 128 bytes: each run of 32 holds two sub-blocks of 32 values, one in the low nibbles and one in the high ones.
void read_k_nibbles(const std::uint8_t* bytes, int sub, Group& group) {
    for (int i = 0; i < kGroup; i++) group.values[i] = (bytes[sub / 2 * 32 + i] >> (sub % 2 * 4)) & 15;
}

// Low nibbles in 128 bytes, upper two bits in 64, 16 signed scales of 16 values each, and the block's scale at the end.
// Each half of the block interleaves its four groups: groups 0 and 1 in the low nibbles, 2 and 3 in the high ones, and
// group g's upper bits at bit 2g.
void read_q6_k(const std::uint8_t* block, int sub, Group& group) {
    const int half = sub / 4, part = sub % 4;
    const std::uint8_t* low = block + half * 64 + part % 2 * 32;
    const std::uint8_t* high = block + 128 + half * 32;
    for (int i = 0; i < kGroup; i++)
        group.values[i] = ((low[i] >> (part / 2 * 4)) & 15) | (((high[i] >> (2 * part)) & 3) << 4);
    const float scale = f16_at(block + 208);
    for (int i = 0; i < 2; i++)
        group.scale[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[192 + 2 * sub + i]));
    group.minimum = 0.0f;
}

// Group `index` of a stored row.
void read_stored(Type type, const std::uint8_t* row, int index, Group& group) {
    const int groups_per_block = info(type).block_values / kGroup;
    const std::uint8_t* block = row + static_cast<std::size_t>(index / groups_per_block) * info(type).block_bytes;
    const int sub = index % groups_per_block;
    switch (type) {
        case Type::q4_0:
            set_scale(group, f16_at(block));
            return read_nibbles(block + 2, group);
        case Type::q4_1:
            set_scale(group, f16_at(block), f16_at(block + 2));
            return read_nibbles(block + 4, group);
        case Type::q5_0:
            set_scale(group, f16_at(block));
            read_nibbles(block + 6, group);
            return read_fifth_bits(block + 2, group);
        case Type::q5_1:
            set_scale(group, f16_at(block), f16_at(block + 2));
            read_nibbles(block + 8, group);
            return read_fifth_bits(block + 4, group);
        case Type::q8_0:
            set_scale(group, f16_at(block));
            for (int i = 0; i < kGroup; i++) group.values[i] = block[2 + i] ^ 0x80;  // two's complement, plus 128
            return;
        case Type::q4_k:
            read_k_scale(block, sub, group);
            return read_k_nibbles(block + 16, sub, group);
        case Type::q5_k:
            read_k_scale(block, sub, group);
            read_k_nibbles(block + 48, sub, group);
            for (int i = 0; i < kGroup; i++) group.values[i] |= ((block[16 + i] >> sub) & 1) << 4;
            return;
        case Type::q6_k:
            return read_q6_k(block, sub, group);
        default:
            return;  // floats have no groups
    }
}

// Every scale * (value - zero) is exact in f32, so a weight is rounded at most once, when a minimum is added.
void expand(Type type, const Group& group, float* out) {
    const PackedLayout layout = packed_layout(type);
    for (int i = 0; i < kGroup; i++) {
        const float scaled = group.scale[i / 16] * static_cast<float>(group.values[i] - layout.zero);
        out[i] = layout.has_minimum ? scaled + group.minimum : scaled;
    }
}

float float_at(Type type, const std::uint8_t* row, std::size_t index) {
    if (type == Type::f32) {
        float x;
        std::memcpy(&x, row + 4 * index, 4);
        return x;
    }
    std::uint16_t bits;
    std::memcpy(&bits, row + 2 * index, 2);
    return type == Type::f16 ? float_from_f16(bits) : float_from_bf16(bits);
}

// Sixteen scales or minimums.
void write_row(const PackedLayout& layout, const float* values, std::uint8_t* out) {
    if (layout.wide_scales) {
        std::memcpy(out, values, 4 * kPanel);
        return;
    }
    std::uint16_t bits[kPanel];
    for (int i = 0; i < kPanel; i++) bits[i] = f16_from_float(values[i]);
    std::memcpy(out, bits, sizeof bits);
}

// One block: the same group of the panel's 16 columns.
void write_block(const PackedLayout& layout, const Group* groups, std::uint8_t* out) {
    const int quads = kGroup / 4;
    const int quads_per_slot = 8 / layout.value_bits;
    for (int slot = 0; slot < quads / quads_per_slot; slot++) {
        for (int column = 0; column < kPanel; column++) {
            std::uint32_t word, upper;
            std::memcpy(&word, groups[column].values + slot * quads_per_slot * 4, 4);
            if (layout.value_bits == 4) {
                std::memcpy(&upper, groups[column].values + slot * 8 + 4, 4);
                word |= upper << 4;
            }
            std::memcpy(out + (slot * kPanel + column) * 4, &word, 4);
        }
    }
    float row[kPanel];
    for (int i = 0; i < layout.scale_rows; i++) {
        for (int column = 0; column < kPanel; column++) row[column] = groups[column].scale[i];
        write_row(layout, row, out + layout.value_bytes() + i * layout.scale_row_bytes());
    }
    if (layout.has_minimum) {
        for (int column = 0; column < kPanel; column++) row[column] = groups[column].minimum;
        write_row(layout, row, out + layout.minimum_offset());
    }
}

float read_from_row(const PackedLayout& layout, const std::uint8_t* row, int column) {
    return float_at(layout.wide_scales ? Type::f32 : Type::f16, row, column);
}

// The inverse of write_block, for one column.
void read_packed(const PackedLayout& layout, const std::uint8_t* block, int column, Group& group) {
    for (int i = 0; i < kGroup; i++) {
        const int slot = i * layout.value_bits / 32;
        const std::uint8_t byte = block[(slot * kPanel + column) * 4 + i % 4];
        group.values[i] = layout.value_bits == 8 ? byte : i / 4 % 2 ? byte >> 4 : byte & 15;
    }
    for (int i = 0; i < 2; i++) {
        const int scale_row = i < layout.scale_rows ? i : 0;
        group.scale[i] = read_from_row(layout, block + layout.value_bytes() + scale_row * layout.scale_row_bytes(), column);
    }
    group.minimum = layout.has_minimum ? read_from_row(layout, block + layout.minimum_offset(), column) : 0.0f;
}

// Packs a panel of `rows` stored rows of view.type, which begin at `stored`.
void pack_quantized_panel(const MatrixView& view, int rows, const std::uint8_t* stored, std::size_t row_bytes,
                          std::uint8_t* out) {
    const PackedLayout layout = packed_layout(view.type);
    Group groups[kPanel];
    std::memset(groups, 0, sizeof groups);
    for (int index = 0; index < view.cols / kGroup; index++, out += layout.block_bytes()) {
        for (int column = 0; column < rows; column++)
            read_stored(view.type, stored + column * row_bytes, index, groups[column]);
        write_block(layout, groups, out);
    }
}

// The same for float weights, `Bits` being an integer of their size.
template <class Bits>
void pack_float_panel(const MatrixView& view, int rows, const std::uint8_t* stored, std::size_t row_bytes,
                      std::uint8_t* out) {
    std::memset(out, 0, view.panel_bytes);
    for (int column = 0; column < rows; column++) {
        const std::uint8_t* row = stored + column * row_bytes;
        for (std::size_t k = 0; k < static_cast<std::size_t>(view.cols); k++)
            std::memcpy(out + (k * kPanel + column) * sizeof(Bits), row + k * sizeof(Bits), sizeof(Bits));
    }
}

void pack_panel(const MatrixView& view, int rows, const std::uint8_t* stored, std::size_t row_bytes, std::uint8_t* out) {
    if (is_quantized(view.type)) {
        pack_quantized_panel(view, rows, stored, row_bytes, out);
    } else if (view.type == Type::f32) {
        pack_float_panel<std::uint32_t>(view, rows, stored, row_bytes, out);
    } else {
        pack_float_panel<std::uint16_t>(view, rows, stored, row_bytes, out);
    }
}

// One thread's memory for a panel of rows, converted from the type they are stored in to the one they are packed as.
class Converter {
public:
    Converter(Type from, Type to, int cols)
        : from_(from), to_(to), cols_(cols), row_bytes_(stored_bytes(to, 1, cols)), rows_(kPanel * row_bytes_),
          floats_(cols) {}

    // Null if `to` cannot hold a weight.
    const std::uint8_t* convert(int rows, const std::uint8_t* stored, std::size_t stored_row_bytes) {
        for (int row = 0; row < rows; row++) {
            std::uint8_t* out = rows_.data() + row * row_bytes_;
            dequantize_row(from_, stored + row * stored_row_bytes, cols_, floats_.data());
            if (to_ == Type::f32) {
                std::memcpy(out, floats_.data(), row_bytes_);
            } else if (!quantize_row(to_, floats_.data(), cols_, out)) {
                return nullptr;
            }
        }
        return rows_.data();
    }

    std::size_t row_bytes() const { return row_bytes_; }

private:
    Type from_, to_;
    int cols_;
    std::size_t row_bytes_;
    std::vector<std::uint8_t> rows_;
    std::vector<float> floats_;
};

}  // namespace

Type parse_type(const std::string& name) {
    for (int i = 0; i < kTypeCount; i++)
        if (name == kTypes[i].name) return static_cast<Type>(i);
    throw std::invalid_argument("unknown tensor type '" + name + "'");
}

const char* type_name(Type type) { return info(type).name; }

std::size_t stored_bytes(Type type, std::int64_t rows, std::int64_t cols) {
    constexpr std::int64_t limit = std::int64_t{1} << 28;  // so that no size below can overflow 64 bits
    if (rows < 1 || rows > limit || cols < 1 || cols > limit)
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                    " is not possible: each size must be in 1.." + std::to_string(limit));
    if (cols % info(type).block_values != 0)
        throw std::invalid_argument("a row of " + std::to_string(cols) + " values is not a whole number of " +
                                    type_name(type) + " blocks of " + std::to_string(info(type).block_values));
    return static_cast<std::size_t>(rows) * (cols / info(type).block_values) * info(type).block_bytes;
}

void check_stored_size(Type type, std::int64_t rows, std::int64_t cols, std::size_t size) {
    const std::size_t needed = stored_bytes(type, rows, cols);
    if (size != needed)
        throw std::invalid_argument("a " + std::string(type_name(type)) + " tensor of " + std::to_string(rows) + " x " +
                                    std::to_string(cols) + " takes " + std::to_string(needed) + " bytes, not " +
                                    std::to_string(size));
}

void dequantize_row(Type type, const std::uint8_t* stored, int cols, float* out) {
    if (!is_quantized(type)) {
        for (int i = 0; i < cols; i++) out[i] = float_at(type, stored, i);
        return;
    }
    Group group;
    for (int index = 0; index < cols / kGroup; index++) {
        read_stored(type, stored, index, group);
        expand(type, group, out + index * kGroup);
    }
}

AlignedBuffer::AlignedBuffer(std::size_t bytes)
    : data_(static_cast<std::uint8_t*>(::operator new(bytes, std::align_val_t{64}))), size_(bytes) {}

void AlignedBuffer::Free::operator()(std::uint8_t* pointer) const { ::operator delete(pointer, std::align_val_t{64}); }

void ask_for_huge_pages([[maybe_unused]] const AlignedBuffer& memory) {
#ifdef MADV_HUGEPAGE
    const std::uintptr_t huge = std::uintptr_t{2} << 20, begin = reinterpret_cast<std::uintptr_t>(memory.data());
    const std::uintptr_t first = (begin + huge - 1) / huge * huge;
    if (first + huge <= begin + memory.size())
        madvise(reinterpret_cast<void*>(first), begin + memory.size() - first, MADV_HUGEPAGE);
#endif
}

MatrixView packed_view(Type type, std::int64_t rows, std::int64_t cols) {
    stored_bytes(type, rows, cols);  // checks the sizes
    MatrixView view;
    view.type = type;
    view.rows = static_cast<int>(rows);
    view.cols = static_cast<int>(cols);
    view.panels = static_cast<int>((rows + kPanel - 1) / kPanel);
    view.panel_bytes = is_quantized(type) ? static_cast<std::size_t>(cols / kGroup) * packed_layout(type).block_bytes()
                                          : static_cast<std::size_t>(cols) * kPanel * info(type).block_bytes;
    return view;
}

PackedMatrix pack(Type type, std::int64_t rows, std::int64_t cols, std::span<const std::uint8_t> stored, Type packed,
                  ThreadPool& pool, std::uint8_t* place) {
    check_stored_size(type, rows, cols, stored.size());
    if (packed != type && packed != Type::f32 && (is_quantized(type) || !can_quantize_to(packed)))
        throw std::invalid_argument(std::string(type_name(type)) + " weights cannot be packed as " + type_name(packed));

    PackedMatrix matrix;
    matrix.view = packed_view(packed, rows, cols);
    if (!place) {
        matrix.storage = AlignedBuffer(matrix.bytes());
        place = matrix.storage.data();
    }
    matrix.view.data = place;

    std::vector<Converter> converters;  // one a thread
    if (packed != type) converters.assign(pool.size(), Converter(type, packed, matrix.view.cols));
    const std::size_t row_bytes = stored.size() / static_cast<std::size_t>(rows);
    std::atomic<bool> holds = true;
    const auto pack_one = [&](int panel, Converter* converter) {
        const int first = panel * kPanel, count = std::min(kPanel, matrix.view.rows - first);
        const std::uint8_t* source = stored.data() + first * row_bytes;
        std::size_t source_row_bytes = row_bytes;
        if (converter) {
            source = converter->convert(count, source, row_bytes);
            source_row_bytes = converter->row_bytes();
        }
        if (source)
            pack_panel(matrix.view, count, source, source_row_bytes, place + panel * matrix.view.panel_bytes);
        else
            holds = false;
    };
    pool.run([&](int thread) {
        Converter* converter = converters.empty() ? nullptr : &converters[thread];
        pool.for_each_piece(matrix.view.panels, 4, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t panel = begin; panel < end; panel++) pack_one(static_cast<int>(panel), converter);
        });
    });
    if (!holds)
        throw std::invalid_argument("weights that are not finite, or too large for f16 scales, cannot be packed as " +
                                    std::string(type_name(packed)) + "; leave out --quantization");
    return matrix;
}

void dequantize_packed_row(const MatrixView& matrix, int row, float* out) {
    const std::uint8_t* panel = matrix.data + row / kPanel * matrix.panel_bytes;
    const int column = row % kPanel;
    if (!is_quantized(matrix.type)) {
        for (int k = 0; k < matrix.cols; k++)
            out[k] = float_at(matrix.type, panel, static_cast<std::size_t>(k) * kPanel + column);
        return;
    }
    const PackedLayout layout = packed_layout(matrix.type);
    Group group;
    for (int index = 0; index < matrix.cols / kGroup; index++, panel += layout.block_bytes()) {
        read_packed(layout, panel, column, group);
        expand(matrix.type, group, out + index * kGroup);
    }
}

}  // namespace chairlift
