// bias_gelu_tanh: the arithmetic of the epilogue, linked into a skeleton.
// math.cuh

extern "C" __device__ float gemmgen_functor_0(float accum, float in0) {
  float const v2 = 0.5f;
  float const v3 = accum + in0;
  float const v4 = v2 * v3;
  float const v5 = 0.7978845834732056f;
  float const v6 = 0.035677406936883926f;
  float const v7 = v3 * v3;
  float const v8 = gg::minimum(v7, 100.0f);
  float const v9 = v6 * v8;
  float const v10 = v5 + v9;
  float const v11 = v3 * v10;
  float const v12 = gg::tanh_approx(v11);
  float const v13 = v4 * v12;
  float const v14 = v4 + v13;
  return v14;
}
