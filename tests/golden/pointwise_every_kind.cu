// every_kind: the functors over an accumulator in memory, or over no accumulator at all. Plain CUDA for NVRTC.
// A CTA walks kRows rows of 32 * kVector columns: a warp takes a row at a time, a lane kVector neighbouring columns.
// The flat C ABI between a compiled launcher and gemmgen/jit/load.py. Change kAbiVersion with any change here.
#ifndef GEMMGEN_ABI_H
#define GEMMGEN_ABI_H
#ifdef __CUDACC_RTC__  // NVRTC compiles without headers
using int32_t = int;
using int64_t = long long;
#else
#include <cstddef>
#include <cstdint>
#endif

namespace gemmgen {

constexpr int kAbiVersion = 1;
constexpr int kMaxInputs = 16;
constexpr int kMaxOutputs = 8;

// All strides are in elements. `ld` is the stride of the one dimension of A or B that is not contiguous.
struct MatrixArgs {
  void const* ptr;
  int64_t ld;
  int64_t batch_stride;
};

// ROW and COL vectors have stride 1 along their axis; TILE has stride 1 along N and `row_stride` along M.
// A SCALAR with a null `ptr` is the number `value`.
struct InputArgs {
  void const* ptr;
  int64_t row_stride;
  int64_t batch_stride;
  float value;
  int32_t unused;
};

// A reduction's `ptr` is its partials [L, P, N] or [L, P, M] in f32: `row_stride` steps P, `batch_stride` steps L.
struct OutputArgs {
  void* ptr;
  int64_t row_stride;
  int64_t batch_stride;
};

struct Args {
  int32_t m, n, k, l;
  MatrixArgs a, b;
  InputArgs inputs[kMaxInputs];
  OutputArgs outputs[kMaxOutputs];
  int32_t sm_count;
  int32_t swizzle;
  int32_t raster;  // 0 heuristic, 1 along M, 2 along N
  int32_t split_k;
};

}  // namespace gemmgen

// Every launcher exports:
//   int     gemmgen_abi_version();
//   int     gemmgen_smem_bytes();                              dynamic shared memory of the kernel
//   int64_t gemmgen_workspace_bytes(gemmgen::Args const*);     scratch; `gemmgen_run` clears what must be zero
//   int     gemmgen_partial_count(gemmgen::Args const*, int);  P of reduction output i
//   int     gemmgen_run(CUfunction, gemmgen::Args const*, void* workspace, CUstream);
//           0, a positive CUresult, or -1 when the kernel cannot run these arguments
#endif  // GEMMGEN_ABI_H
// every_kind: the arithmetic of the epilogue, linked into a skeleton.
// math.cuh

__device__ __forceinline__ float gemmgen_functor_0(float accum, float in0, float in1, float in2, float in3, int in4, int in5) {
  bool const v7 = in4 >= in5;
  float const v8 = 0.5f;
  float const v9 = accum * in1;
  float const v10 = v9 * in3;
  float const v11 = v10 + in0;
  float const v12 = v8 * v11;
  float const v13 = 1.4142135381698608f;
  float const v14 = v12 * v13;
  float const v15 = erff(v14);
  float const v16 = v12 * v15;
  float const v17 = v12 + v16;
  float const v18 = -1.5f;
  float const v19 = v7 ? v17 : v18;
  float const v20 = v19 + in2;
  return v20;
}
__device__ __forceinline__ float gemmgen_functor_1(float accum, float in0, float in1, float in2, float in3, int in4, int in5) {
  float const v4 = accum * in1;
  float const v5 = v4 * in3;
  float const v6 = v5 + in0;
  return v6;
}
__device__ __forceinline__ float gemmgen_functor_2(float accum, float in0, float in1, float in2, float in3, int in4, int in5) {
  bool const v7 = in4 >= in5;
  float const v8 = 0.5f;
  float const v9 = accum * in1;
  float const v10 = v9 * in3;
  float const v11 = v10 + in0;
  float const v12 = v8 * v11;
  float const v13 = 1.4142135381698608f;
  float const v14 = v12 * v13;
  float const v15 = erff(v14);
  float const v16 = v12 * v15;
  float const v17 = v12 + v16;
  float const v18 = -1.5f;
  float const v19 = v7 ? v17 : v18;
  float const v20 = v19 + in2;
  return v20;
}

// elements.cuh

constexpr int kVector = 4;
constexpr int kWarps = 8;
constexpr int kRows = 64;
constexpr int kUnroll = 4;
constexpr int kColumns = 32 * kVector;

// Reduces what the warps of a CTA hold for the same columns, and writes one partial per column.
__device__ __forceinline__ void store_row_partial_2(
    gemmgen::Args const& args, float const (&value)[kVector], float (*scratch)[kColumns], int warp, int lane,
    int column, int64_t offset) {
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVector; ++v) { scratch[warp][lane + 32 * v] = value[v]; }
  __syncthreads();
  if (warp == 0 && column < args.n) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) { total = gg::plus(total, scratch[w][lane + 32 * v]); }
      static_cast<float*>(args.outputs[2].ptr)[offset + column + v] = total;
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps) gemmgen_pointwise(
    const __grid_constant__ gemmgen::Args args) {
  __shared__ float scratch[kWarps][kColumns];
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const tiles_n = (args.n + kColumns - 1) / kColumns;
  int const tile_m = blockIdx.x / tiles_n, tile_n = blockIdx.x % tiles_n;
  int const column = (tile_n * 32 + lane) * kVector;
  bool const inside = column < args.n;
  int64_t const first_row = static_cast<int64_t>(tile_m) * kRows;

  for (int64_t batch = blockIdx.z; batch < args.l; batch += gridDim.z) {
    float const scalar3 = args.inputs[3].ptr == nullptr
        ? args.inputs[3].value
        : gg::F32::decode(static_cast<gg::F32::Storage const*>(
              args.inputs[3].ptr)[batch * args.inputs[3].batch_stride]);
    float row0[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      row0[v] = !inside ? 0.f : gg::F32::decode(
          static_cast<gg::F32::Storage const*>(args.inputs[0].ptr)[
              batch * args.inputs[0].batch_stride + column + v]);
    }
    float total2[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) { total2[v] = 0.f; }

    for (int step = 0; step < kRows; step += kWarps * kUnroll) {
      // all loads of kUnroll rows first, so that they are in flight together
      gg::Vector<gg::F32, kVector> accum[kUnroll];
      gg::Vector<gg::F32, kVector> tile2[kUnroll];
      float col1[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        int64_t const row = first_row + step + u * kWarps + warp;
        bool const live = inside && row < args.m;
        if (live && args.a.ptr != nullptr) {
          accum[u].load(args.a.ptr, batch * args.a.batch_stride + row * args.a.ld + column);
        } else {
#pragma unroll
          for (int v = 0; v < kVector; ++v) { accum[u].elements[v] = 0; }
        }
        if (live) {
          tile2[u].load(args.inputs[2].ptr,
              batch * args.inputs[2].batch_stride + row * args.inputs[2].row_stride + column);
        }
        col1[u] = !live ? 0.f : gg::F32::decode(
            static_cast<gg::F32::Storage const*>(args.inputs[1].ptr)[
                batch * args.inputs[1].batch_stride + row]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        int64_t const row = first_row + step + u * kWarps + warp;
        bool const live = inside && row < args.m;
        gg::Vector<gg::BF16, kVector> result0;
        gg::Vector<gg::F16, kVector> result1;
        if (live) {
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            auto const value0 = gemmgen_functor_0(accum[u].elements[v], row0[v], col1[u], gg::F32::decode(tile2[u].elements[v]), scalar3, static_cast<int>(row), column + v);
            auto const value1 = gemmgen_functor_1(accum[u].elements[v], row0[v], col1[u], gg::F32::decode(tile2[u].elements[v]), scalar3, static_cast<int>(row), column + v);
            auto const value2 = gemmgen_functor_2(accum[u].elements[v], row0[v], col1[u], gg::F32::decode(tile2[u].elements[v]), scalar3, static_cast<int>(row), column + v);
            result0.elements[v] = gg::BF16::encode(value0);
            result1.elements[v] = gg::F16::encode(value1);
            total2[v] = gg::plus(total2[v], value2);
          }
          result0.store(args.outputs[0].ptr,
              batch * args.outputs[0].batch_stride + row * args.outputs[0].row_stride + column);
          result1.store(args.outputs[1].ptr,
              batch * args.outputs[1].batch_stride + row * args.outputs[1].row_stride + column);
        }
      }
    }
    store_row_partial_2(args, total2, scratch, warp, lane, column,
        batch * args.outputs[2].batch_stride + tile_m * args.outputs[2].row_stride);
  }
}
