// Operations on one row of floats at a time: norms, rotary embedding, activations, and the sampler's passes over logits.
#pragma once

#include <cstdint>

#include "isa.h"

namespace chairlift {

constexpr int kSumPiece = 256;  // logits whose weights are summed as one piece

struct RowScan {
    bool finite = false;
    float greatest = 0.0f;
    int greatest_at = 0;  // the first of them
};

struct RowKernels {
    // out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
    // out += x / sqrt(mean(x^2) + eps) * weight.
    void (*add_rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
    // Rotates the pairs (x[i], x[i + half]) by the angles whose cosines and sines are given, for i < half.
    void (*rotate)(float* x, const float* cosines, const float* sines, int half);
    // gate = activation(gate) * up.
    void (*silu_times)(float* gate, const float* up, int n);
    void (*gelu_tanh_times)(float* gate, const float* up, int n);
    // x = cap * tanh(x / cap); NaN where x is not finite.
    void (*softcap)(float* x, int n, float cap);

    // Whether all are finite; the greatest (not NaN) and its first place.
    void (*scan)(const float* x, int n, RowScan* result);
    // weights = exp((x - greatest) / temperature), 0 where that is below `floor`; sums[i] = sum of the i-th kSumPiece
    // weights; returns their total. The order of summation is fixed.
    double (*weigh)(const float* x, int n, float greatest, float temperature, float floor, float* weights, float* sums);
    // How many x[i] are greater than `value`, or equal with i < index.
    int (*count_better)(const float* x, int n, float value, int index);
    // The first i in from..n with x[i] > threshold; n if there is none.
    int (*find_above)(const float* x, int from, int n, float threshold);
};

}  // namespace chairlift

CHAIRLIFT_PER_ISA(RowKernels, row_kernels)
