// bias_gelu_tanh: the arithmetic of the epilogue, linked into a skeleton.
// math.cuh

extern "C" __device__ float gemmgen_functor_0(float accum, float in0) {
  float const v2 = 0.5f;
  float const v3 = v2 * accum;
  float const v4 = v2 * in0;
  float const v5 = v3 + v4;
  float const v6 = 1.5957691669464111f;
  float const v7 = 0.2854192554950714f;
  float const v8 = v5 * v5;
  float const v9 = v7 * v8;
  float const v10 = v6 + v9;
  float const v11 = v5 * v10;
  float const v12 = gg::tanh_approx(v11);
  float const v13 = v5 * v12;
  float const v14 = v5 + v13;
  return v14;
}
