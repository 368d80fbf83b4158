// The sixteen columns of a panel as two vectors of eight, for instruction sets whose registers hold no more.
#pragma once

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kRegisters16 = 8;

struct f32x16 {
    f32x8 left, right;
};
struct i32x16 {
    i32x8 left, right;
};

CHAIRLIFT_INLINE f32x16 zero16() { return {zero8(), zero8()}; }
CHAIRLIFT_INLINE f32x16 broadcast16(float x) { return {broadcast(x), broadcast(x)}; }
CHAIRLIFT_INLINE f32x16 load16(const float* p) { return {load(p), load(p + 8)}; }
CHAIRLIFT_INLINE f32x16 load16_f16(const std::uint16_t* p) { return {load_f16(p), load_f16(p + 8)}; }
CHAIRLIFT_INLINE f32x16 load16_bf16(const std::uint16_t* p) { return {load_bf16(p), load_bf16(p + 8)}; }
CHAIRLIFT_INLINE f32x16 load16_i8(const std::int8_t* p) { return {load_i8(p), load_i8(p + 8)}; }
CHAIRLIFT_INLINE void store(float* p, f32x16 v) {
    store(p, v.left);
    store(p + 8, v.right);
}
CHAIRLIFT_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {a.left + b.left, a.right + b.right}; }
CHAIRLIFT_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {a.left - b.left, a.right - b.right}; }
CHAIRLIFT_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {a.left / b.left, a.right / b.right}; }
CHAIRLIFT_INLINE f32x16 min(f32x16 a, f32x16 b) { return {min(a.left, b.left), min(a.right, b.right)}; }
CHAIRLIFT_INLINE f32x16 max(f32x16 a, f32x16 b) { return {max(a.left, b.left), max(a.right, b.right)}; }
CHAIRLIFT_INLINE f32x16 below(f32x16 a, f32x16 b, f32x16 then, f32x16 otherwise) {
    return {below(a.left, b.left, then.left, otherwise.left), below(a.right, b.right, then.right, otherwise.right)};
}
CHAIRLIFT_INLINE f32x16 round_even(f32x16 a) { return {round_even(a.left), round_even(a.right)}; }
CHAIRLIFT_INLINE f32x16 scale(f32x16 a, f32x16 n) { return {scale(a.left, n.left), scale(a.right, n.right)}; }
CHAIRLIFT_INLINE f32x8 left_of(f32x16 a) { return a.left; }
CHAIRLIFT_INLINE f32x8 right_of(f32x16 a) { return a.right; }
CHAIRLIFT_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {a.left * b.left, a.right * b.right}; }
CHAIRLIFT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {fma(a.left, b.left, c.left), fma(a.right, b.right, c.right)};
}
CHAIRLIFT_INLINE f32x16 to_float(i32x16 a) { return {to_float(a.left), to_float(a.right)}; }

}  // namespace chairlift::CHAIRLIFT_ISA
