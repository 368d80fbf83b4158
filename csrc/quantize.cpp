#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "half.h"

namespace chairlift {
namespace {

// Four floats at once on any processor: the compiler would not vectorise what may trap, or change the order of a sum.
using Floats = float __attribute__((vector_size(16)));
constexpr int kVectors = kGroup * sizeof(float) / sizeof(Floats);  // of a group
constexpr float kRounder = 0x1.8p23f;  // x + kRounder - kRounder is x rounded to a whole number, for |x| < 2^22
constexpr float kMost4 = 15.0f;        // the largest value of 4 bits
constexpr float kMost8 = 127.0f;

// How many steps the range of a 4-bit group begins with, and how often that is fitted. Measured on weights of language
// models: 0.745 of the squared error of the plain range, and 0.734 with thirty times as many beginnings.
constexpr float kSteps[] = {14.0f, 14.5f, 15.0f, 15.5f, 16.0f};
constexpr int kFits = 2;

float rounded_to_f16(float x) { return float_from_f16(f16_from_float(x)); }

// The next larger f16 after an f16 other than -0.
float next_f16(float x) {
    const std::uint16_t bits = f16_from_float(x);
    return float_from_f16(bits & 0x8000u ? bits - 1 : bits + 1);  // sign and magnitude
}

float f16_not_below(float x) {
    const float near = rounded_to_f16(x);
    return near < x ? next_f16(near) : near;
}

float inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

void write_f16(float x, std::uint8_t* out) {
    const std::uint16_t bits = f16_from_float(x);
    std::memcpy(out, &bits, 2);
}

bool all_finite(const float* x) {
    bool finite = true;
    for (int i = 0; i < kGroup; i++) finite &= std::fabs(x[i]) <= std::numeric_limits<float>::max();
    return finite;
}

// -- 8 bits

bool quantize_q8_0(const float* x, std::uint8_t* block) {
    float peak = 0.0f;
    for (int i = 0; i < kGroup; i++) peak = std::max(peak, std::fabs(x[i]));
    float scale = rounded_to_f16(peak / kMost8);
    if (peak > (kMost8 + 0.5f) * scale) scale = next_f16(scale);  // a subnormal one, of very small weights
    if (!std::isfinite(scale)) return false;
    write_f16(scale, block);
    const float factor = inverse(scale);
    for (int i = 0; i < kGroup; i++) {
        const float value = std::min(std::max(x[i] * factor, -kMost8), kMost8) + kRounder - kRounder;
        block[2 + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(value));
    }
    return true;
}

// -- 4 bits

// The group as minimum + scale * values, and its squared error.
struct Fit {
    float scale = 0.0f, minimum = 0.0f, error = 0.0f;
    Floats values[kVectors];
};

float sum(Floats x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// The nearest values that this scale and this minimum, rounded to f16, allow.
Fit nearest(const Floats* x, float scale, float minimum) {
    Fit fit;
    fit.scale = rounded_to_f16(scale);
    fit.minimum = rounded_to_f16(minimum);
    const float factor = inverse(fit.scale);
    const Floats least = {}, most = least + kMost4;
    Floats errors = {};
    for (int i = 0; i < kVectors; i++) {
        Floats steps = (x[i] - fit.minimum) * factor;
        steps = steps > least ? steps : least;
        steps = steps < most ? steps : most;
        fit.values[i] = steps + kRounder - kRounder;
        const Floats error = fit.minimum + fit.scale * fit.values[i] - x[i];
        errors += error * error;
    }
    fit.error = sum(errors);
    return fit;
}

// Scale and minimum by least squares, for the values as they are. False if they are all the same, or nonsense.
bool least_squares(const Floats* x, const Floats* values, float& scale, float& minimum) {
    const float origin = x[0][0];  // a common offset shall not blur the sums
    Floats v_sum = {}, vv_sum = {}, y_sum = {}, vy_sum = {};
    for (int i = 0; i < kVectors; i++) {
        const Floats v = values[i], y = x[i] - origin;
        v_sum += v;
        vv_sum += v * v;
        y_sum += y;
        vy_sum += v * y;
    }
    const float v = sum(v_sum), y = sum(y_sum);
    const float determinant = kGroup * sum(vv_sum) - v * v;
    if (!(determinant > 0.0f)) return false;
    scale = (kGroup * sum(vy_sum) - v * y) / determinant;
    minimum = origin + (y - scale * v) / kGroup;
    return scale > 0.0f;
}

Fit best_fit(const Floats* x, float low, float high) {
    // Rounded outwards, all is in reach; it matters where the minimum is large, or the range very small.
    const float below = -f16_not_below(-low);
    Fit best = nearest(x, f16_not_below((high - below) / kMost4), below);
    for (const float steps : kSteps) {
        float scale = (high - low) / steps, minimum = low;
        for (int fits = 0;; fits++) {
            const Fit fit = nearest(x, scale, minimum);
            if (fit.error < best.error || std::isnan(best.error)) best = fit;
            if (fits == kFits || !least_squares(x, fit.values, scale, minimum)) break;
        }
    }
    return best;
}

bool quantize_q4_1(const float* x, std::uint8_t* block) {
    Floats vectors[kVectors];
    std::memcpy(vectors, x, sizeof vectors);
    const auto [low, high] = std::minmax_element(x, x + kGroup);
    const Fit fit = best_fit(vectors, *low, *high);
    if (!std::isfinite(fit.error)) return false;  // no scale and minimum that are f16
    write_f16(fit.scale, block);
    write_f16(fit.minimum, block + 2);
    const auto value = [&](int i) { return static_cast<int>(fit.values[i / 4][i % 4]); };
    for (int i = 0; i < kGroup / 2; i++)
        block[4 + i] = static_cast<std::uint8_t>(value(i) | value(i + kGroup / 2) << 4);
    return true;
}

}  // namespace

bool quantize_row(Type type, const float* x, int cols, std::uint8_t* stored) {
    const std::size_t block_bytes = stored_bytes(type, 1, kGroup);
    for (int begin = 0; begin < cols; begin += kGroup, stored += block_bytes) {
        if (!all_finite(x + begin)) return false;
        if (!(type == Type::q8_0 ? quantize_q8_0(x + begin, stored) : quantize_q4_1(x + begin, stored))) return false;
    }
    return true;
}

}  // namespace chairlift
