// The arithmetic behind the functors. Compiled by NVRTC without any header, so PTX stands in for the intrinsics of
// cuda_fp16.h and its kin. No function has side effects, so that equal subexpressions of two functors merge.
namespace gg {

__device__ __forceinline__ float plus(float x, float y) { return x + y; }
__device__ __forceinline__ float maximum(float x, float y) {  // NaN if either is
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float minimum(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Approximations: relative error at most 2^-10.9 for tanh, a few ulp of fp32 for the others.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * 1.4426950408889634f); }
__device__ __forceinline__ float div_approx(float x, float y) {  // full range, at most 2 ulp
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
// .ftz spares the code around subnormals: an exponential so small adds nothing to 1, and a reciprocal so small is 0
__device__ __forceinline__ float sigmoid_approx(float x) {
  float y;
  asm("{ .reg .f32 t; ex2.approx.ftz.f32 t, %1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 %0, t; }"
      : "=f"(y)
      : "f"(x * -1.4426950408889634f));
  return y;
}
// max(x, 0) + log1p(exp(-|x|)) neither overflows nor loses the small end; NaN passes through the first term
__device__ __forceinline__ float softplus(float x) { return maximum(x, 0.f) + log1pf(expf(-fabsf(x))); }
// log1p(t) for t in [0, 1]: the logarithm of the rounded 1 + t, and below 2^-8 two terms of the series
__device__ __forceinline__ float log1p_approx(float t) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(1.f + t));
  return t < 0.00390625f ? t * (1.f - 0.5f * t) : y * 0.6931471805599453f;
}
__device__ __forceinline__ float softplus_approx(float x) {
  return maximum(x, 0.f) + log1p_approx(exp_approx(-fabsf(x)));
}

// Rounding inside an epilogue: to a narrower type, nearest even, and back.
__device__ __forceinline__ float round_bf16(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return __uint_as_float(static_cast<unsigned>(y) << 16);
}
__device__ __forceinline__ float round_f16(float x) {
  float y;
  asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "f"(x));
  return y;
}
// A float with `mantissa` stored bits and least normal exponent `emin`, saturating at `limit`. Exact on every
// architecture: the scaled value is below 2^24, so rintf decides the rounding.
__device__ __forceinline__ float round_small_float(float x, int mantissa, int emin, float limit) {
  if (!(fabsf(x) < __uint_as_float(0x7f800000u))) { return x != x ? x : copysignf(limit, x); }
  int exponent = static_cast<int>((__float_as_uint(x) >> 23) & 0xffu) - 127;
  exponent = exponent < emin ? emin : exponent;
  float quantum = __uint_as_float(static_cast<unsigned>(exponent - mantissa + 127) << 23);
  float y = rintf(x / quantum) * quantum;
  return minimum(maximum(y, -limit), limit);
}
__device__ __forceinline__ float round_e4m3(float x) { return round_small_float(x, 3, -6, 448.f); }
__device__ __forceinline__ float round_e5m2(float x) { return round_small_float(x, 2, -14, 57344.f); }
// cvt to an integer type saturates, and makes NaN 0
__device__ __forceinline__ int to_i32(float x) { return x != x ? 0 : __float2int_rn(x); }
__device__ __forceinline__ float round_i32(float x) { return static_cast<float>(to_i32(x)); }
__device__ __forceinline__ float round_i8(float x) {
  return x != x ? 0.f : rintf(minimum(maximum(x, -128.f), 127.f));
}

}  // namespace gg
