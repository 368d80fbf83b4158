#include "attention.h"

#include "simd.h"
#include "simd_sums.h"

namespace chairlift::CHAIRLIFT_ISA {

namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kHeads = AttentionShape::kHeadsTogether;

// The parts of the scratch memory. dim = padded_dim; a query is one head of one row: row * group + head.
struct Work {
    float* keys;            // [tile][dim], widened
    float* values;          // [tile][dim]
    float* queries;         // [rows * group][dim], scaled
    float* sums_of_values;  // [rows * group][dim], not yet divided by the sum of weights
    float* greatest;        // [rows * group]
    float* mass;            // [rows * group] sum of weights
    float* scores;          // [kHeads][tile]
};

// Where the vectors of a tile are, in the cache or widened in the scratch memory. Bytes are used as they are, and their
// scales applied to the scores and the weights.
struct Tile {
    const void* keys[kMaxTile];
    const void* values[kMaxTile];
    bool scaled;
    float key_scales[kMaxTile], value_scales[kMaxTile];
};

CHAIRLIFT_INLINE Work divide(const AttentionShape& shape, float* scratch) {
    const std::size_t dim = shape.padded_dim, queries = static_cast<std::size_t>(kRowTile) * shape.group;
    Work work;
    work.keys = scratch;
    work.values = work.keys + shape.tile * dim;
    work.queries = work.values + shape.tile * dim;
    work.sums_of_values = work.queries + queries * dim;
    work.scores = work.sums_of_values + queries * dim;
    work.greatest = work.scores + kHeads * shape.tile;
    work.mass = work.greatest + queries;
    return work;
}

CHAIRLIFT_INLINE f32x8 load_stored(const float* p) { return load(p); }
CHAIRLIFT_INLINE f32x8 load_stored(const std::uint16_t* p) { return load_f16(p); }
CHAIRLIFT_INLINE f32x8 load_stored(const std::int8_t* p) { return load_i8(p); }

// n stored numbers as floats, padded with zeros.
template <class T>
CHAIRLIFT_INLINE void widen(const T* stored, int n, float* out) {
    int i = 0;
    for (; i + 8 <= n; i += 8) store(out + i, load_stored(stored + i));
    if (i == n) return;
    T lanes[8] = {};
    for (int lane = 0; i + lane < n; ++lane) lanes[lane] = stored[i + lane];
    store(out + i, load_stored(lanes));
}

CHAIRLIFT_INLINE void widen(const AttentionShape& shape, const std::uint8_t* stored, float* out) {
    switch (shape.kv) {
        case KvType::f32: return widen(reinterpret_cast<const float*>(stored), shape.head_dim, out);
        case KvType::f16: return widen(reinterpret_cast<const std::uint16_t*>(stored), shape.head_dim, out);
        case KvType::int8: return widen(reinterpret_cast<const std::int8_t*>(stored), shape.head_dim, out);
    }
}

// The scale behind the bytes of a vector.
CHAIRLIFT_INLINE float scale_of(const AttentionShape& shape, const std::uint8_t* stored) {
    float scale;
    std::memcpy(&scale, stored + shape.head_dim, sizeof scale);
    return scale;
}

CHAIRLIFT_INLINE std::size_t offset_of(const AttentionShape& shape, const AttentionUnit& unit, int position) {
    const int block = unit.table[position / shape.block_size * shape.table_stride];
    return block * shape.block_bytes + position % shape.block_size * shape.vector_bytes;
}

// Positions begin..end of the tile that starts at `start`: where they lie in the cache, or widened if `copy`. The rest of
// the group of eight that begin and end fall in points to the first of them: it is loaded, and its score not used.
CHAIRLIFT_INLINE void find_tile(const AttentionShape& shape, const AttentionUnit& unit, int start, int begin, int end,
                                bool copy, const Work& work, Tile& tile) {
    tile.scaled = shape.kv == KvType::int8;
    int slot = (start + begin) % shape.block_size;
    std::size_t at = offset_of(shape, unit, start + begin);
    for (int i = begin; i < end; ++i) {
        if (slot == shape.block_size) {
            slot = 0;
            at = offset_of(shape, unit, start + i);
        }
        tile.keys[i] = unit.keys + at;
        tile.values[i] = unit.values + at;
        if (tile.scaled) {
            tile.key_scales[i] = scale_of(shape, unit.keys + at);
            tile.value_scales[i] = scale_of(shape, unit.values + at);
        }
        if (copy) {
            float *key = work.keys + i * shape.padded_dim, *value = work.values + i * shape.padded_dim;
            widen(shape, unit.keys + at, key);
            widen(shape, unit.values + at, value);
            tile.keys[i] = key;
            tile.values[i] = value;
        }
        ++slot;
        at += shape.vector_bytes;
    }
    const auto point_to_first = [&](int i) {
        tile.keys[i] = tile.keys[begin];
        tile.key_scales[i] = tile.value_scales[i] = 0.0f;
    };
    for (int i = begin & ~7; i < begin; ++i) point_to_first(i);
    for (int i = end; i < ((end + 7) & ~7); ++i) point_to_first(i);
}

// Asks for the tile at `start`, the next one to be used: its blocks lie far apart, which the processor cannot foresee.
// Into the second-level cache: the first level's few miss buffers would fill up, and the work on this tile stand still.
CHAIRLIFT_INLINE void prefetch_tile(const AttentionShape& shape, const AttentionUnit& unit, int start, int last) {
    const int end = last + 1 < start + shape.tile ? last + 1 : start + shape.tile;
    int run;  // positions that lie one after the other, within a block
    for (int position = start; position < end; position += run) {
        const int slot = position % shape.block_size, rest = shape.block_size - slot;
        run = rest < end - position ? rest : end - position;
        const std::size_t at = offset_of(shape, unit, position);
        for (std::size_t byte = 0; byte < run * shape.vector_bytes; byte += 64) {
            prefetch(unit.keys + at + byte);
            prefetch(unit.values + at + byte);
        }
    }
}

// Scores of K keys for H queries: scores[h * stride + k].
template <class T, int H, int K>
CHAIRLIFT_INLINE void score(const float* queries, const void* const* keys, int dim, float* scores, int stride) {
    f32x8 acc[H][K];
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < K; ++k) acc[h][k] = zero8();
    for (int i = 0; i < dim; i += 8) {
        f32x8 query[H];
        for (int h = 0; h < H; ++h) query[h] = load(queries + h * dim + i);
        for (int k = 0; k < K; ++k) {
            const f32x8 key = load_stored(static_cast<const T*>(keys[k]) + i);
            for (int h = 0; h < H; ++h) acc[h][k] = fma(query[h], key, acc[h][k]);
        }
    }
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < K; k += 4) store_sums(&acc[h][k], scores + h * stride + k);
}

CHAIRLIFT_INLINE float exp_one(float x) {
    float lanes[8];
    store(lanes, exp(broadcast(x)));
    return lanes[0];
}

// Turns the scores of keys begin..end into weights, and returns the factor for what was summed up before.
CHAIRLIFT_INLINE float weigh(const Tile& tile, float* scores, int begin, int end, float cap, float* running_greatest,
                             float* mass) {
    const int first = begin & ~7, last = (end + 7) & ~7;
    if (tile.scaled)
        for (int key = first; key < last; key += 8)
            store(scores + key, load(scores + key) * load(tile.key_scales + key));
    if (cap > 0.0f)
        for (int key = first; key < last; key += 8)
            store(scores + key, broadcast(cap) * tanh(load(scores + key) / broadcast(cap)));
    for (int key = first; key < begin; ++key) scores[key] = -kInfinity;  // out of view
    for (int key = end; key < last; ++key) scores[key] = -kInfinity;
    f32x8 greatest8 = broadcast(-kInfinity);
    for (int key = first; key < last; key += 8) greatest8 = max(load(scores + key), greatest8);
    const float before = *running_greatest, here = maximum(greatest8);
    const float greatest = here > before ? here : before;
    f32x8 mass8 = zero8();
    for (int key = first; key < last; key += 8) {
        const f32x8 weight = exp(load(scores + key) - broadcast(greatest));
        store(scores + key, tile.scaled ? weight * load(tile.value_scales + key) : weight);
        mass8 = mass8 + weight;
    }
    const float rescale = exp_one(before - greatest);
    *running_greatest = greatest;
    *mass = *mass * rescale + sum(mass8);
    return rescale;
}

// For H queries and N vectors of each, from float i on: sums = sums * rescale + weight of each key * its value, in order.
template <class T, int H, int N>
CHAIRLIFT_INLINE void add_values(const float* weights, int stride, const void* const* values, int begin, int end, int i,
                                 int dim, const float* rescale, float* sums) {
    f32x8 acc[H][N];
    for (int h = 0; h < H; ++h)
        for (int n = 0; n < N; ++n) acc[h][n] = load(sums + h * dim + i + 8 * n) * broadcast(rescale[h]);
    for (int key = begin; key < end; ++key) {
        f32x8 weight[H];
        for (int h = 0; h < H; ++h) weight[h] = broadcast(weights[h * stride + key]);
        for (int n = 0; n < N; ++n) {
            const f32x8 value = load_stored(static_cast<const T*>(values[key]) + i + 8 * n);
            for (int h = 0; h < H; ++h) acc[h][n] = fma(weight[h], value, acc[h][n]);
        }
    }
    for (int h = 0; h < H; ++h)
        for (int n = 0; n < N; ++n) store(sums + h * dim + i + 8 * n, acc[h][n]);
}

// Keys begin..end of a tile, for H queries of one row from `query` on.
template <class T, int H>
CHAIRLIFT_INLINE void add_tile(const AttentionShape& shape, const Work& work, const Tile& tile, int query, int begin,
                               int end) {
    constexpr int kKeys = H == 1 ? 8 : 4;  // enough sums at a time to hide latency, few enough for the registers
    constexpr int kVectors = H == 1 ? 8 : 4;
    const int dim = shape.padded_dim;
    float rescale[H];
    for (int key = begin & ~7; key < end; key += kKeys)
        score<T, H, kKeys>(work.queries + query * dim, tile.keys + key, dim, work.scores + key, shape.tile);
    for (int h = 0; h < H; ++h)
        rescale[h] = weigh(tile, work.scores + h * shape.tile, begin, end, shape.softcap, work.greatest + query + h,
                           work.mass + query + h);
    float* sums = work.sums_of_values + query * dim;
    int i = 0;
    for (; i + 8 * kVectors <= dim; i += 8 * kVectors)
        add_values<T, H, kVectors>(work.scores, shape.tile, tile.values, begin, end, i, dim, rescale, sums);
    for (; i < dim; i += 8)
        add_values<T, H, 1>(work.scores, shape.tile, tile.values, begin, end, i, dim, rescale, sums);
}

// All heads of a row. How many go together decides how often a key is loaded, and changes no result.
template <class T>
void add_tile_to_row(const AttentionShape& shape, const Work& work, const Tile& tile, int row, int begin, int end) {
    int query = row * shape.group;
    const int last = query + shape.group;
    for (; last - query > 3 || last - query == 2; query += 2) add_tile<T, 2>(shape, work, tile, query, begin, end);
    if (last - query == 3) return add_tile<T, 3>(shape, work, tile, query, begin, end);
    if (last - query == 1) add_tile<T, 1>(shape, work, tile, query, begin, end);
}

CHAIRLIFT_INLINE void begin_queries(const AttentionShape& shape, const AttentionUnit& unit, const Work& work) {
    const int dim = shape.padded_dim;
    for (int query = 0; query < unit.rows * shape.group; ++query) {
        const int row = query / shape.group, head = query % shape.group;
        const float* q = unit.q + row * shape.q_stride + head * shape.head_dim;
        float* scaled = work.queries + query * dim;
        float* values = work.sums_of_values + query * dim;
        for (int i = 0; i < dim; ++i) scaled[i] = i < shape.head_dim ? q[i] * shape.scale : 0.0f;
        for (int i = 0; i < dim; ++i) values[i] = 0.0f;
        work.greatest[query] = -kInfinity;
        work.mass[query] = 0.0f;
    }
}

CHAIRLIFT_INLINE void end_queries(const AttentionShape& shape, const AttentionUnit& unit, const Work& work) {
    for (int query = 0; query < unit.rows * shape.group; ++query) {
        const int row = query / shape.group, head = query % shape.group;
        float* out = unit.out + row * shape.out_stride + head * shape.head_dim;
        const float* values = work.sums_of_values + query * shape.padded_dim;
        const float mass = work.mass[query];
        for (int i = 0; i < shape.head_dim; ++i) out[i] = values[i] / mass;
    }
}

using AddTile = void (*)(const AttentionShape&, const Work&, const Tile&, int row, int begin, int end);

AddTile add_tile_to_row(KvType type) {
    switch (type) {
        case KvType::f16: return add_tile_to_row<std::uint16_t>;
        case KvType::int8: return add_tile_to_row<std::int8_t>;
        default: return add_tile_to_row<float>;
    }
}

void attend(const AttentionShape& shape, const AttentionUnit& unit, float* scratch) {
    const Work work = divide(shape, scratch);
    // Widening pays when several rows use a tile; vectors that do not fill whole registers are padded in any case.
    const bool copy = (unit.rows > 1 && shape.kv != KvType::f32) || shape.head_dim != shape.padded_dim;
    const AddTile add = add_tile_to_row(copy ? KvType::f32 : shape.kv);
    const int first = unit.first_position, last = first + unit.rows - 1;
    const int from = first_in_view(first, unit.window);  // the later rows begin there or after it
    Tile tile;
    begin_queries(shape, unit, work);
    for (int start = from / shape.tile * shape.tile; start <= last; start += shape.tile) {
        const int tile_begin = from > start ? from - start : 0;
        const int tile_end = last + 1 - start < shape.tile ? last + 1 - start : shape.tile;
        find_tile(shape, unit, start, tile_begin, tile_end, copy, work, tile);
        prefetch_tile(shape, unit, start + shape.tile, last);
        for (int row = 0; row < unit.rows; ++row) {
            const int position = first + row, seen = first_in_view(position, unit.window);
            const int begin = seen > start ? seen - start : 0;
            const int end = position + 1 - start < shape.tile ? position + 1 - start : shape.tile;
            if (begin < end) add(shape, work, tile, row, begin, end);  // else it sees nothing of this tile
        }
    }
    end_queries(shape, unit, work);
}

}  // namespace

extern const AttentionKernels attention_kernels = {attend};

}  // namespace chairlift::CHAIRLIFT_ISA
