// quantised: the arithmetic of the epilogue, linked into a skeleton.
// math.cuh

extern "C" __device__ float gemmgen_functor_0(float accum, float in0) {
  float const v2 = accum * in0;
  float const v3 = gg::minimum(gg::maximum(v2, -100.0f), 100.0f);
  return v3;
}
