#include "rows.h"

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA {

namespace {

constexpr float kInfinity = __builtin_inff();

// f(vector, index, count) for the vectors of a row; count is below 8 for the last one of an odd length.
template <class Body>
CHAIRLIFT_INLINE void for_vectors(int n, Body&& body) {
    int i = 0;
    for (; i + 8 <= n; i += 8) body(i, 8);
    if (i < n) body(i, n - i);
}

CHAIRLIFT_INLINE f32x8 load_some(const float* p, int count, float fill = 0.0f) {
    return count == 8 ? load(p) : load_first(p, count, fill);
}

CHAIRLIFT_INLINE void store_some(float* p, f32x8 v, int count) {
    if (count == 8)
        store(p, v);
    else
        store_first(p, v, count);
}

CHAIRLIFT_INLINE float inverse_rms(const float* x, int n, float eps) {
    f32x8 s0 = zero8(), s1 = zero8(), s2 = zero8(), s3 = zero8();
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        const f32x8 a = load(x + i), b = load(x + i + 8), c = load(x + i + 16), d = load(x + i + 24);
        s0 = fma(a, a, s0);
        s1 = fma(b, b, s1);
        s2 = fma(c, c, s2);
        s3 = fma(d, d, s3);
    }
    for (; i < n; i += 8) {
        const f32x8 a = load_some(x + i, n - i < 8 ? n - i : 8);
        s0 = fma(a, a, s0);
    }
    const float mean = sum((s0 + s1) + (s2 + s3)) / static_cast<float>(n);
    return 1.0f / __builtin_sqrtf(mean + eps);
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    const f32x8 scale = broadcast(inverse_rms(x, n, eps));
    for_vectors(n, [&](int i, int count) {
        store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
    });
}

void add_rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    const f32x8 scale = broadcast(inverse_rms(x, n, eps));
    for_vectors(n, [&](int i, int count) {
        const f32x8 normed = load_some(x + i, count) * scale * load_some(weight + i, count);
        store_some(out + i, load_some(out + i, count) + normed, count);
    });
}

void rotate(float* x, const float* cosines, const float* sines, int half) {
    for_vectors(half, [&](int i, int count) {
        const f32x8 a = load_some(x + i, count), b = load_some(x + half + i, count);
        const f32x8 c = load_some(cosines + i, count), s = load_some(sines + i, count);
        store_some(x + i, a * c - b * s, count);
        store_some(x + half + i, b * c + a * s, count);
    });
}

// out = f(out, other), for sixteen numbers at a time as long as there are so many.
template <class Function>
CHAIRLIFT_INLINE void combine(float* out, const float* other, int n, Function&& f) {
    const int most = n / 16 * 16;
    for (int i = 0; i < most; i += 16) store(out + i, f(load16(out + i), load16(other + i)));
    out += most;
    other += most;
    for_vectors(n - most, [&](int i, int count) {
        store_some(out + i, f(load_some(out + i, count), load_some(other + i, count)), count);
    });
}

void silu_times(float* gate, const float* up, int n) {
    combine(gate, up, n, []<class V>(V x, V y) CHAIRLIFT_ALWAYS {
        return x / (all<V>(1.0f) + exp(all<V>(0.0f) - x)) * y;
    });
}

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x / (1 + e^-2u), which keeps its precision for x << 0.
void gelu_tanh_times(float* gate, const float* up, int n) {
    combine(gate, up, n, []<class V>(V x, V y) CHAIRLIFT_ALWAYS {
        const V minus_2u = all<V>(-2.0f * 0.7978845608f) * fma(all<V>(0.044715f) * x * x, x, x);
        return x / (all<V>(1.0f) + exp(minus_2u)) * y;
    });
}

void softcap(float* x, int n, float cap) {
    const f32x8 most = broadcast(cap);
    for_vectors(n, [&](int i, int count) {
        const f32x8 v = load_some(x + i, count);
        store_some(x + i, fma(v, zero8(), most * tanh(v / most)), count);  // v * 0 is NaN for an infinite v
    });
}

// The greatest of 64 values.
CHAIRLIFT_INLINE float greatest_of_64(const float* x) {
    const f32x8 a = max(max(load(x), load(x + 8)), max(load(x + 16), load(x + 24)));
    const f32x8 b = max(max(load(x + 32), load(x + 40)), max(load(x + 48), load(x + 56)));
    return maximum(max(a, b));
}

int find_above(const float* x, int from, int n, float threshold) {
    int i = from;
    while (i + 64 <= n && !(greatest_of_64(x + i) > threshold)) i += 64;
    for (; i < n; ++i)
        if (x[i] > threshold) return i;
    return n;
}

void scan(const float* x, int n, RowScan* result) {
    f32x8 zeros = zero8();  // NaN once a value is not finite
    f32x8 greatest = broadcast(-kInfinity);
    for_vectors(n, [&](int i, int count) {
        const f32x8 v = load_some(x + i, count, -kInfinity);
        zeros = fma(count == 8 ? v : load_first(x + i, count), zero8(), zeros);
        greatest = max(v, greatest);
    });
    result->finite = sum(zeros) == 0.0f;
    result->greatest = maximum(greatest);
    result->greatest_at = 0;
    int i = 0;
    while (i + 64 <= n && greatest_of_64(x + i) < result->greatest) i += 64;
    for (; i < n; ++i) {
        if (x[i] < result->greatest) continue;
        result->greatest_at = i;
        return;
    }
}

double weigh(const float* x, int n, float greatest, float temperature, float floor, float* weights, float* sums) {
    const f32x8 most = broadcast(greatest), divisor = broadcast(temperature), least = broadcast(floor);
    double total = 0.0;
    for (int begin = 0, piece = 0; begin < n; begin += kSumPiece, ++piece) {
        f32x8 mass = zero8();
        for_vectors(n - begin < kSumPiece ? n - begin : kSumPiece, [&](int i, int count) {
            const f32x8 v = load_some(x + begin + i, count, -kInfinity);
            const f32x8 weight = exp((v - most) / divisor);
            const f32x8 kept = below(weight, least, zero8(), weight);
            store_some(weights + begin + i, kept, count);
            mass = mass + kept;
        });
        sums[piece] = sum(mass);
        total += sums[piece];
    }
    return total;
}

int count_better(const float* x, int n, float value, int index) {
    const f32x8 limit = broadcast(value), one = broadcast(1.0f);
    f32x8 counts = zero8();  // exact up to 2^24 a lane
    int ties = 0;
    for_vectors(n, [&](int i, int count) {
        counts = counts + below(limit, load_some(x + i, count, value), one, zero8());
    });
    for (int i = 0; i < index; ++i) ties += x[i] == value;
    return static_cast<int>(sum(counts)) + ties;
}

}  // namespace

extern const RowKernels row_kernels = {
    rms_norm, add_rms_norm, rotate, silu_times, gelu_tanh_times, softcap, scan, weigh, count_better, find_above,
};

}  // namespace chairlift::CHAIRLIFT_ISA
