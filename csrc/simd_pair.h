// The sixteen columns of a panel as two vectors of eight, for instruction sets whose registers hold no more.
#pragma once

namespace chairlift::CHAIRLIFT_ISA {

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
CHAIRLIFT_INLINE void store(float* p, f32x16 v) {
    store(p, v.left);
    store(p + 8, v.right);
}
CHAIRLIFT_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {a.left * b.left, a.right * b.right}; }
CHAIRLIFT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {fma(a.left, b.left, c.left), fma(a.right, b.right, c.right)};
}
CHAIRLIFT_INLINE f32x16 to_float(i32x16 a) { return {to_float(a.left), to_float(a.right)}; }

}  // namespace chairlift::CHAIRLIFT_ISA
