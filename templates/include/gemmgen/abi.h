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
