#include <type_traits>

#include "attention_parts.h"
#include "half.h"

#ifdef CHAIRLIFT_TILE_PRODUCTS
#include "attention_tiles.h"
#endif

#define CHAIRLIFT_UNROLL _Pragma("GCC unroll 8")

namespace chairlift::CHAIRLIFT_ISA {

namespace {

constexpr int kRuns = kMaxTile / kLanes;                 // of sixteen positions in a tile
constexpr int kQueries = 6;                              // at most together
constexpr int kVectors = kRegisters16 >= 32 ? 4 : 1;     // sums of a query that go together: 6 x 4 of 32 registers, 6 of 8

CHAIRLIFT_INLINE f32x16 load_stored(const float* p) { return load16(p); }
CHAIRLIFT_INLINE f32x16 load_stored(const std::uint16_t* p) { return load16_f16(p); }
CHAIRLIFT_INLINE f32x16 load_stored(const std::int8_t* p) { return load16_i8(p); }

CHAIRLIFT_INLINE int run_end(int position) { return (position + kLanes - 1) / kLanes; }

// The parts of the scratch memory. dim = padded_dim; query = row * group + head.
struct Work {
    float* keys;      // [dim][tile], widened
    float* values;    // [tile][dim]
    float* queries;   // [rows * group][dim], scaled
    float* sums;      // [rows * group][dim], of weighted values, not yet divided by the sum of weights
    float* scores;    // [kQueries][tile], and then weights
    float* greatest;  // [rows * group]
    float* mass;      // [rows * group] sum of weights
};

// Where the keys and values of a tile are, by runs of sixteen positions: in the cache, or widened in the scratch memory.
// Bytes are used as they are, and their scales applied to the scores and the weights.
template <class T>
struct Tile {
    const T* keys[kRuns];
    const T* values[kRuns];
    std::size_t key_stride, value_stride;  // from one number of the keys to the next, from one value to the next
    Scales scales;
};

// Positions of a tile: its keys or values stay in the first cache.
CHAIRLIFT_INLINE int vector_tile(int head_dim) { return head_dim <= 128 ? 64 : 32; }

std::size_t vector_scratch(const AttentionShape& shape) {
    const std::size_t queries = std::size_t{kRowTile} * shape.group;
    return (2 * shape.tile + 2 * queries) * shape.padded_dim + kQueries * shape.tile + 2 * queries;
}

CHAIRLIFT_INLINE Work divide(const AttentionShape& shape, float* scratch) {
    const std::size_t dim = shape.padded_dim, queries = std::size_t{kRowTile} * shape.group;
    Work work;
    work.keys = scratch;
    work.values = work.keys + shape.tile * dim;
    work.queries = work.values + shape.tile * dim;
    work.sums = work.queries + queries * dim;
    work.scores = work.sums + queries * dim;
    work.greatest = work.scores + kQueries * shape.tile;
    work.mass = work.greatest + queries;
    return work;
}

// Positions begin..end of the tile that starts at `start`, where they lie in the cache. Needs whole runs in a block.
template <class T>
CHAIRLIFT_INLINE void find_tile(const AttentionShape& shape, const AttentionUnit& unit, int start, int begin, int end,
                                Tile<T>& tile) {
    tile.key_stride = shape.head.block_size;
    tile.value_stride = shape.head.head_dim;
    for (int run = begin / kLanes; run < run_end(end); ++run) {
        const int position = start + run * kLanes, slot = position % shape.head.block_size;
        const std::size_t block = block_at(shape, unit, position);
        tile.keys[run] = reinterpret_cast<const T*>(unit.keys + block + shape.head.key_at(0, slot));
        tile.values[run] = reinterpret_cast<const T*>(unit.keys + shape.head.values() + block + shape.head.value_at(slot));
    }
}

// `count` positions of a block, from `slot` on, widened: keys number by number, values one after the other.
template <class T>
CHAIRLIFT_INLINE void widen_piece(const AttentionShape& shape, const std::uint8_t* block, int slot, int count,
                                  float* wide_keys, float* wide_values) {
    const KvHead& head = shape.head;
    for (int first = 0; first < count; first += kLanes) {
        const int some = count - first < kLanes ? count - first : kLanes;
        const T* key = reinterpret_cast<const T*>(block + head.key_at(0, slot + first));
        float* out = wide_keys + first;
        for (int number = 0; number < head.head_dim; ++number, key += head.block_size, out += shape.tile) {
            if (some == kLanes) {
                store(out, load_stored(key));
            } else {
                T lanes[kLanes] = {};
                float wide[kLanes];
                for (int lane = 0; lane < some; ++lane) lanes[lane] = key[lane];
                store(wide, load_stored(lanes));
                for (int lane = 0; lane < some; ++lane) out[lane] = wide[lane];
            }
        }
    }
    const T* value = reinterpret_cast<const T*>(block + head.values() + head.value_at(slot));
    for (int i = 0; i < count; ++i, value += head.head_dim, wide_values += shape.padded_dim) {
        int number = 0;
        for (; number + kLanes <= head.head_dim; number += kLanes) store(wide_values + number, load_stored(value + number));
        if (number == head.head_dim) continue;
        T lanes[kLanes] = {};
        for (int lane = 0; number + lane < head.head_dim; ++lane) lanes[lane] = value[number + lane];
        store(wide_values + number, load_stored(lanes));
    }
}

// The same of bf16, which lie by pairs.
template <>
CHAIRLIFT_INLINE void widen_piece<Bf16>(const AttentionShape& shape, const std::uint8_t* block, int slot, int count,
                                        float* wide_keys, float* wide_values) {
    const KvHead& head = shape.head;
    for (int number = 0; number < head.head_dim; number += 2, wide_keys += 2 * shape.tile) {
        const Bf16* pair = reinterpret_cast<const Bf16*>(block + head.key_at(number, slot));
        for (int i = 0; i < count; ++i, pair += 2) {
            wide_keys[i] = float_from_bf16(pair[0].bits);
            wide_keys[shape.tile + i] = float_from_bf16(pair[1].bits);
        }
    }
    for (int i = 0; i < count; ++i, wide_values += shape.padded_dim) {
        const Bf16* value = reinterpret_cast<const Bf16*>(block + head.values() + head.value_at(slot + i));
        for (int number = 0; number < head.head_dim; ++number) wide_values[number] = float_from_bf16(value[2 * number].bits);
        for (int number = head.head_dim; number < shape.padded_dim; ++number) wide_values[number] = 0.0f;
    }
}

// All of a tile, widened to floats in the scratch memory. What lies in the runs beyond begin..end may be anything.
template <class T>
CHAIRLIFT_INLINE void widen_tile(const AttentionShape& shape, const AttentionUnit& unit, int start, int begin, int end,
                                 const Work& work, Tile<float>& tile) {
    const int dim = shape.padded_dim;
    tile.key_stride = shape.tile;
    tile.value_stride = dim;
    for (int run = begin / kLanes; run < run_end(end); ++run) {
        tile.keys[run] = work.keys + run * kLanes;
        tile.values[run] = work.values + std::size_t(run) * kLanes * dim;
    }
    for_pieces(shape, unit, start, begin, end, [&](int i, int count, std::size_t block, int slot) {
        widen_piece<T>(shape, unit.keys + block, slot, count, work.keys + i, work.values + std::size_t(i) * dim);
    });
}

// All of it at once, into the second cache: the first one's few miss buffers would fill up, and the work at hand stand
// still.
CHAIRLIFT_INLINE void prefetch_tile(const AttentionShape& shape, const AttentionUnit& unit, int start) {
    for_stored(shape, unit, start, [](const std::uint8_t* begin, std::size_t bytes) CHAIRLIFT_ALWAYS {
        for (std::size_t byte = 0; byte < bytes; byte += 64) prefetch_l2(begin + byte);
    });
}

// Scores of R queries and the keys of V runs: scores[r * stride + key].
template <class T, int R, int V>
CHAIRLIFT_INLINE void score(const float* queries, int dim, const T* const* keys, std::size_t key_stride, int numbers,
                            float* scores, int stride) {
    f32x16 acc[R][V];
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; ++r) {
        CHAIRLIFT_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] = zero16();
    }
    for (int i = 0; i < numbers; ++i) {
        f32x16 key[V];
        CHAIRLIFT_UNROLL
        for (int v = 0; v < V; ++v) key[v] = load_stored(keys[v] + i * key_stride);
        CHAIRLIFT_UNROLL
        for (int r = 0; r < R; ++r) {
            const f32x16 query = broadcast16(queries[r * dim + i]);
            CHAIRLIFT_UNROLL
            for (int v = 0; v < V; ++v) acc[r][v] = fma(query, key[v], acc[r][v]);
        }
    }
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; ++r) {
        CHAIRLIFT_UNROLL
        for (int v = 0; v < V; ++v) store(scores + r * stride + v * kLanes, acc[r][v]);
    }
}

CHAIRLIFT_INLINE float exp_one(float x) {
    float lanes[8];
    store(lanes, exp(broadcast(x)));
    return lanes[0];
}

// Turns the scores of keys begin..end into weights, and returns the factor for what was summed up before.
CHAIRLIFT_INLINE float weigh(const Scales& scales, float* scores, int begin, int end, float cap,
                             float* running_greatest, float* mass) {
    const int first = begin / kLanes * kLanes, last = run_end(end) * kLanes;
    if (scales.used)
        for (int key = first; key < last; key += kLanes)
            store(scores + key, load16(scores + key) * load16(scales.keys + key));
    if (cap > 0.0f)
        for (int key = first; key < last; key += kLanes)
            store(scores + key, broadcast16(cap) * tanh(load16(scores + key) / broadcast16(cap)));
    for (int key = first; key < begin; ++key) scores[key] = -kInfinity;  // out of view, and may have been anything
    for (int key = end; key < last; ++key) scores[key] = -kInfinity;
    f32x16 greatest16 = broadcast16(-kInfinity);
    for (int key = first; key < last; key += kLanes) greatest16 = max(load16(scores + key), greatest16);
    const float before = *running_greatest, here = maximum(greatest16);
    const float greatest = here > before ? here : before;
    f32x16 mass16 = zero16();
    for (int key = first; key < last; key += kLanes) {
        const f32x16 weight = exp(load16(scores + key) - broadcast16(greatest));
        store(scores + key, scales.used ? weight * load16(scales.values + key) : weight);
        mass16 = mass16 + weight;
    }
    const float rescale = greatest == before ? 1.0f : exp_one(before - greatest);  // e^0 is 1 to the last bit
    *running_greatest = greatest;
    *mass = *mass * rescale + sum(mass16);
    return rescale;
}

// For R queries and V vectors of each, from number i on: sums = sums * rescale + weight of each key * its value, in order.
template <class T, int R, int V>
CHAIRLIFT_INLINE void add_values(const float* weights, int stride, const Tile<T>& tile, int begin, int end, int i,
                                 const float* rescale, float* sums, int dim) {
    f32x16 acc[R][V];
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; ++r) {
        CHAIRLIFT_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] = load16(sums + r * dim + i + v * kLanes) * broadcast16(rescale[r]);
    }
    for (int key = begin, run_last; key < end; key = run_last) {
        const int run = key / kLanes;
        run_last = (run + 1) * kLanes < end ? (run + 1) * kLanes : end;
        const T* value = tile.values[run] + (key - run * kLanes) * tile.value_stride + i;
        for (; key < run_last; ++key, value += tile.value_stride) {
            f32x16 numbers[V];
            CHAIRLIFT_UNROLL
            for (int v = 0; v < V; ++v) numbers[v] = load_stored(value + v * kLanes);
            CHAIRLIFT_UNROLL
            for (int r = 0; r < R; ++r) {
                const f32x16 weight = broadcast16(weights[r * stride + key]);
                CHAIRLIFT_UNROLL
                for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, numbers[v], acc[r][v]);
            }
        }
    }
    CHAIRLIFT_UNROLL
    for (int r = 0; r < R; ++r) {
        CHAIRLIFT_UNROLL
        for (int v = 0; v < V; ++v) store(sums + r * dim + i + v * kLanes, acc[r][v]);
    }
}

template <class T, int R>
CHAIRLIFT_INLINE void add_values(const AttentionShape& shape, const float* weights, const Tile<T>& tile, int begin,
                                 int end, const float* rescale, float* sums) {
    const int dim = shape.padded_dim;
    int i = 0;
    for (; i + kVectors * kLanes <= dim; i += kVectors * kLanes)
        add_values<T, R, kVectors>(weights, shape.tile, tile, begin, end, i, rescale, sums, dim);
    if constexpr (kVectors > 1)
        for (; i < dim; i += kLanes) add_values<T, R, 1>(weights, shape.tile, tile, begin, end, i, rescale, sums, dim);
}

// The tile that begins at `start`, for R queries from `query` on, each of which sees some of it.
template <class T, int R>
void add_tile(const AttentionShape& shape, const AttentionUnit& unit, const Work& work, const Tile<T>& tile, int start,
              int query) {
    const int dim = shape.padded_dim;
    View views[R];
    for (int r = 0; r < R; ++r) views[r] = view_of(shape, unit, start, (query + r) / shape.group);
    // Views only move on from row to row.
    const View all = {views[0].begin, views[R - 1].end}, common = {views[R - 1].begin, views[0].end};
    const float* queries = work.queries + query * dim;
    int run = all.begin / kLanes;
    for (; run + kVectors <= run_end(all.end); run += kVectors)
        score<T, R, kVectors>(queries, dim, tile.keys + run, tile.key_stride, shape.head.head_dim,
                              work.scores + run * kLanes, shape.tile);
    if constexpr (kVectors > 1)
        for (; run < run_end(all.end); ++run)
            score<T, R, 1>(queries, dim, tile.keys + run, tile.key_stride, shape.head.head_dim,
                           work.scores + run * kLanes, shape.tile);

    float rescale[R];
    for (int r = 0; r < R; ++r)
        rescale[r] = weigh(tile.scales, work.scores + r * shape.tile, views[r].begin, views[r].end, shape.softcap,
                           work.greatest + query + r, work.mass + query + r);

    float* sums = work.sums + query * dim;
    if (common.begin == all.begin && common.end == all.end)
        return add_values<T, R>(shape, work.scores, tile, all.begin, all.end, rescale, sums);
    // Else what all see together, and what some see before and after it one by one.
    const View middle = {common.begin, common.begin < common.end ? common.end : common.begin};
    float ones[R];
    for (int r = 0; r < R; ++r) {
        const int end = views[r].end < middle.begin ? views[r].end : middle.begin;
        add_values<T, 1>(shape, work.scores + r * shape.tile, tile, views[r].begin, end, rescale + r, sums + r * dim);
        ones[r] = 1.0f;
    }
    add_values<T, R>(shape, work.scores, tile, middle.begin, middle.end, ones, sums);
    for (int r = 0; r < R; ++r)
        add_values<T, 1>(shape, work.scores + r * shape.tile, tile, middle.end, views[r].end, ones, sums + r * dim);
}

// `count` queries, 1 to R.
template <class T, int R>
CHAIRLIFT_INLINE void add_tile_of(int count, const AttentionShape& shape, const AttentionUnit& unit, const Work& work,
                                  const Tile<T>& tile, int start, int query) {
    if constexpr (R > 1) {
        if (count < R) return add_tile_of<T, R - 1>(count, shape, unit, work, tile, start, query);
    }
    add_tile<T, R>(shape, unit, work, tile, start, query);
}

// The tile for all queries that see some of it. How many go together decides how often a key is loaded, no result.
template <class T>
CHAIRLIFT_INLINE void add_tile(const AttentionShape& shape, const AttentionUnit& unit, const Work& work,
                               const Tile<T>& tile, int start) {
    const auto sees_some = [&](int row) {
        const View view = view_of(shape, unit, start, row);
        return view.begin < view.end;
    };
    int first = 0, last = unit.rows;
    while (first < last && !sees_some(first)) ++first;
    while (first < last && !sees_some(last - 1)) --last;
    int query = first * shape.group, left = last * shape.group - query;
    for (int parts = (left + kQueries - 1) / kQueries; parts > 0; --parts) {
        const int count = (left + parts - 1) / parts;
        add_tile_of<T, kQueries>(count, shape, unit, work, tile, start, query);
        query += count;
        left -= count;
    }
}

CHAIRLIFT_INLINE void begin_queries(const AttentionShape& shape, const AttentionUnit& unit, const Work& work) {
    const int dim = shape.padded_dim, head_dim = shape.head.head_dim;
    for (int query = 0; query < unit.rows * shape.group; ++query) {
        const int row = query / shape.group, head = query % shape.group;
        const float* q = unit.q + row * shape.q_stride + head * head_dim;
        for (int i = 0; i < head_dim; ++i) work.queries[query * dim + i] = q[i] * shape.scale;
        for (int i = 0; i < dim; ++i) work.sums[query * dim + i] = 0.0f;
        work.greatest[query] = -kInfinity;
        work.mass[query] = 0.0f;
    }
}

CHAIRLIFT_INLINE void end_queries(const AttentionShape& shape, const AttentionUnit& unit, const Work& work) {
    const int head_dim = shape.head.head_dim;
    for (int query = 0; query < unit.rows * shape.group; ++query) {
        const int row = query / shape.group, head = query % shape.group;
        float* out = unit.out + row * shape.out_stride + head * head_dim;
        for (int i = 0; i < head_dim; ++i) out[i] = work.sums[query * shape.padded_dim + i] / work.mass[query];
    }
}

template <class T>
void attend_one_head(const AttentionShape& shape, const AttentionUnit& unit, float* scratch) {
    const Work work = divide(shape, scratch);
    const int last = last_position(unit);
    const int from = first_in_view(unit.first_position, unit.window);  // the later rows begin there or after it
    begin_queries(shape, unit, work);
    const auto with_tiles = [&](auto& tile, auto&& find) {
        tile.scales.used = shape.head.kv == KvType::int8;
        for (int start = first_tile(shape, unit); start <= last; start += shape.tile) {
            const int begin = from > start ? from - start : 0;
            const int end = last + 1 - start < shape.tile ? last + 1 - start : shape.tile;
            find(start, begin, end);
            if (tile.scales.used) find_scales(shape, unit, start, begin, end, tile.scales);
            prefetch_tile(shape, unit, start + shape.tile);
            add_tile(shape, unit, work, tile, start);
        }
    };
    const auto widened = [&] {
        Tile<float> tile;
        with_tiles(tile, [&](int start, int begin, int end) { widen_tile<T>(shape, unit, start, begin, end, work, tile); });
    };
    if constexpr (std::is_same_v<T, Bf16>) {
        widened();
    } else {
        // Widening pays when several rows use a tile, and makes vectors whole where the cache has odd ones.
        const bool whole = shape.head.block_size % kLanes == 0 && shape.head.head_dim % kLanes == 0;
        if (!whole || (unit.rows > 1 && shape.head.kv != KvType::f32)) {
            widened();
        } else {
            Tile<T> tile;
            with_tiles(tile, [&](int start, int begin, int end) { find_tile(shape, unit, start, begin, end, tile); });
        }
    }
    end_queries(shape, unit, work);
}

template <class T>
void attend_stored(const AttentionShape& shape, const AttentionUnit& unit, float* scratch) {
    for (int head = 0; head < unit.kv_heads; ++head) {
        AttentionUnit one = unit_of_head(shape, unit, head);
        const AttentionUnit next = unit_of_head(shape, unit, head + 1);
        if (head + 1 < unit.kv_heads) one.next = &next;
        attend_one_head<T>(shape, one, scratch);
    }
}

#ifndef CHAIRLIFT_TILE_PRODUCTS
CHAIRLIFT_INLINE bool by_tiles(const KvHead&) { return false; }
CHAIRLIFT_INLINE std::size_t scratch_of_tiles(const AttentionShape&) { return 0; }
CHAIRLIFT_INLINE void attend_by_tiles(const AttentionShape&, const AttentionUnit&, float*) {}
#endif

int tile(const KvHead& head) { return by_tiles(head) ? kMaxTile : vector_tile(head.head_dim); }

void attend(const AttentionShape& shape, const AttentionUnit& unit, float* scratch) {
    if (by_tiles(shape.head)) return attend_by_tiles(shape, unit, scratch);
    switch (shape.head.kv) {
        case KvType::f32: return attend_stored<float>(shape, unit, scratch);
        case KvType::f16: return attend_stored<std::uint16_t>(shape, unit, scratch);
        case KvType::bf16: return attend_stored<Bf16>(shape, unit, scratch);
        case KvType::int8: return attend_stored<std::int8_t>(shape, unit, scratch);
    }
}

std::size_t scratch_floats(const AttentionShape& shape) {
    return by_tiles(shape.head) ? scratch_of_tiles(shape) : vector_scratch(shape);
}

CHAIRLIFT_INLINE void narrow(f32x8 v, float, float* out) { store(out, v); }
CHAIRLIFT_INLINE void narrow(f32x8 v, float, std::uint16_t* out) { store_f16(out, v); }
CHAIRLIFT_INLINE void narrow(f32x8 v, float, Bf16* out) {
    float lanes[8];
    store(lanes, v);
    for (int i = 0; i < 8; ++i) out[i].bits = bf16_from_float(lanes[i]);
}
CHAIRLIFT_INLINE void narrow(f32x8 v, float inverse, std::int8_t* out) {
    inverse == 0.0f ? store_i8(out, zero8()) : store_i8(out, v * broadcast(inverse));  // v may not be finite
}

// The floats of x as the cache stores them: P of them side by side, and then `stride` numbers from one such place to the
// next. `inverse` is of the scale.
template <int P, class T>
CHAIRLIFT_INLINE void store_numbers(const float* x, int n, float inverse, T* out, std::size_t stride) {
    for (int i = 0; i < n; i += 8) {
        const int count = n - i < 8 ? n - i : 8;
        T lanes[8];
        narrow(count == 8 ? load(x + i) : load_first(x + i, count), inverse, lanes);
        if (count == 8 && stride == P) {
            std::memcpy(out + i, lanes, sizeof lanes);
        } else {
            for (int lane = 0; lane < count; lane += P) std::memcpy(out + (i + lane) / P * stride, lanes + lane, P * sizeof(T));
        }
    }
}

// The scale of x as bytes, and its inverse: NaN and 0 where x is not finite.
CHAIRLIFT_INLINE float byte_scale(const float* x, int n, float* inverse) {
    f32x8 largest = zero8();
    for (int i = 0; i < n; i += 8) largest = greater_magnitude(n - i < 8 ? load_first(x + i, n - i) : load(x + i), largest);
    const float peak = magnitude(largest);
    const bool finite = peak <= __FLT_MAX__, usable = finite && peak >= 1e-30f;  // below, 127 / peak may overflow
    *inverse = usable ? 127.0f / peak : 0.0f;
    return usable ? peak / 127.0f : finite ? 0.0f : __builtin_nanf("");
}

// One key or value, the first number of which is at `at`; bf16 lie P side by side.
template <int P>
CHAIRLIFT_INLINE void store_vector(const KvHead& head, const float* x, int slot, std::uint8_t* stored, std::size_t at,
                                   std::size_t stride) {
    std::uint8_t* out = stored + at;
    float scale, inverse;
    switch (head.kv) {
        case KvType::f32: return store_numbers<1>(x, head.head_dim, 1.0f, reinterpret_cast<float*>(out), stride);
        case KvType::f16: return store_numbers<1>(x, head.head_dim, 1.0f, reinterpret_cast<std::uint16_t*>(out), stride);
        case KvType::bf16: return store_numbers<P>(x, head.head_dim, 1.0f, reinterpret_cast<Bf16*>(out), 2 * stride);
        case KvType::int8:
            scale = byte_scale(x, head.head_dim, &inverse);
            store_numbers<1>(x, head.head_dim, inverse, reinterpret_cast<std::int8_t*>(out), stride);
            std::memcpy(stored + head.scale_at(slot), &scale, sizeof scale);
    }
}

void store_key(const KvHead& head, const float* key, int slot, std::uint8_t* keys) {
    store_vector<2>(head, key, slot, keys, head.key_at(0, slot), head.block_size);
}

void store_value(const KvHead& head, const float* value, int slot, std::uint8_t* values) {
    store_vector<1>(head, value, slot, values, head.value_at(slot), 1);
}

}  // namespace

extern const AttentionKernels attention_kernels = {tile, scratch_floats, attend, store_key, store_value};

}  // namespace chairlift::CHAIRLIFT_ISA
