// bias_gelu_tanh: the arithmetic of the epilogue, linked into a skeleton.
// math.cuh

extern "C" __device__ float gemmgen_functor_0(float accum, float in0) {
  float const v2 = 0.5f;
  float const v3 = accum + in0;
  float const v4 = v2 * v3;
  float const v5 = 1.0f;
  float const v6 = 0.7978845834732056f;
  float const v7 = v3 * v6;
  float const v8 = 0.044714998453855515f;
  float const v9 = v3 * v3;
  float const v10 = gg::minimum(v9, 100.0f);
  float const v11 = v8 * v10;
  float const v12 = v5 + v11;
  float const v13 = v7 * v12;
  float const v14 = gg::tanh_approx(v13);
  float const v15 = v5 + v14;
  float const v16 = v4 * v15;
  return v16;
}
