// The host half of an sm80 kernel: grid, workspace and launch through the driver API.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <limits>

#include <gemmgen/sm80_params.hpp>

namespace gemmgen::sm80 {

constexpr int64_t kAccumBytes = 4;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t aligned(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

// `Kernel` is the trait struct of the template: tile, alignments and sizes.
template <class Kernel>
struct Launcher {
  static int64_t grid_m(Args const& args) { return ceil_div(args.m, Kernel::kTileM); }
  static int64_t grid_n(Args const& args) { return ceil_div(args.n, Kernel::kTileN); }
  static int64_t tiles(Args const& args) { return grid_m(args) * grid_n(args) * args.l; }
  static bool is_empty(Args const& args) { return args.m == 0 || args.n == 0 || args.l == 0; }

  static int32_t slices(Args const& args) {
    if (!Kernel::kSplitsK) { return 1; }
    int64_t most = std::min<int64_t>(ceil_div(args.k, Kernel::kTileK), 65535);  // grid.y
    return int32_t(std::max<int64_t>(1, std::min<int64_t>(args.split_k, most)));
  }

  static int64_t workspace_bytes(Args const& args) {
    if (slices(args) == 1 || is_empty(args)) { return 0; }
    return aligned(tiles(args) * sizeof(int32_t)) +
           tiles(args) * slices(args) * Kernel::kTileM * Kernel::kTileN * kAccumBytes;
  }

  static bool is_aligned(MatrixArgs const& matrix, int32_t contiguous, int32_t strided, int32_t batches, int alignment,
                         int bytes) {
    return reinterpret_cast<uintptr_t>(matrix.ptr) % (alignment * bytes) == 0 && contiguous % alignment == 0 &&
           (strided <= 1 || matrix.ld % alignment == 0) && (batches <= 1 || matrix.batch_stride % alignment == 0);
  }

  static bool can_run(Args const& args) {
    int32_t a_contiguous = Kernel::kMajorA ? args.k : args.m, a_strided = Kernel::kMajorA ? args.m : args.k;
    int32_t b_contiguous = Kernel::kMajorB ? args.k : args.n, b_strided = Kernel::kMajorB ? args.n : args.k;
    constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
    bool fits = args.m <= kMost - Kernel::kTileM && args.n <= kMost - Kernel::kTileN && args.k <= kMost - Kernel::kTileK &&
                tiles(args) <= kMost;
    return fits && is_aligned(args.a, a_contiguous, a_strided, args.l, Kernel::kAlignmentA, Kernel::kBytesA) &&
           is_aligned(args.b, b_contiguous, b_strided, args.l, Kernel::kAlignmentB, Kernel::kBytesB);
  }

  static int run(CUfunction function, Args const& args, void* workspace, CUstream stream) {
    if (is_empty(args)) { return 0; }
    if (!can_run(args)) { return -1; }
    Params params = params_of(args, workspace);
    if (params.slices > 1) {
      CUresult status = cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(workspace), 0, tiles(args) * sizeof(int32_t), stream);
      if (status != CUDA_SUCCESS) { return status; }
    }
    void* arguments[] = {&params};
    return cuLaunchKernel(function, unsigned(tiles(args)), unsigned(params.slices), 1, Kernel::kThreads, 1, 1,
                          Kernel::kSmemBytes, stream, arguments, nullptr);
  }

  static Params params_of(Args const& args, void* workspace) {
    Params params{};
    params.args = args;
    params.args.swizzle = args.swizzle < 1 ? 1 : args.swizzle;
    params.grid_m = int32_t(grid_m(args));
    params.grid_n = int32_t(grid_n(args));
    params.along_n = args.raster == 2 || (args.raster == 0 && params.grid_m > params.grid_n);
    params.slices = slices(args);
    params.slice_k = int32_t(ceil_div(ceil_div(args.k, Kernel::kTileK), params.slices) * Kernel::kTileK);
    params.arrivals = static_cast<int32_t*>(workspace);
    params.partials = static_cast<char*>(workspace) + aligned(tiles(args) * sizeof(int32_t));
    return params;
  }
};

}  // namespace gemmgen::sm80
