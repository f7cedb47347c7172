// What a launcher does with a CUTLASS 3.x kernel type: the C ABI of abi.h by the driver API alone.
#pragma once
#include <cuda.h>

#include <cutlass/cuda_host_adapter.hpp>
#include <cutlass/cutlass.h>

#include "gemmgen/abi.h"
#include "gemmgen/encode.hpp"

namespace gemmgen {

constexpr int kCannotRun = -1;
constexpr int kTmaAlignmentBytes = 16;

// CUTLASS clears workspaces through this.
struct DriverAdapter final : cutlass::CudaHostAdapter {
  using Status = cutlass::Status;
  Status query_occupancy(int32_t*, int32_t*, int32_t, int32_t, int32_t) const override {
    return Status::kErrorInternal;
  }
  Status launch(dim3, dim3, size_t, cudaStream_t, void**, int32_t) const override { return Status::kErrorInternal; }
  Status launch(dim3, dim3, dim3, size_t, cudaStream_t, void**, int32_t) const override {
    return Status::kErrorInternal;
  }
  Status launch(dim3, dim3, dim3, dim3, size_t, cudaStream_t, void**, int32_t) const override {
    return Status::kErrorInternal;
  }
#ifdef CUDA_HOST_ADAPTER_TENSORMAP_ENABLED
  CUresult tensorMapEncodeIm2col(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                 cuuint64_t const*, int const*, int const*, cuuint32_t, cuuint32_t, cuuint32_t const*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill) const override {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  CUresult tensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) const override {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  CUresult tensorMapReplaceAddress(CUtensorMap*, void*) const override { return CUDA_ERROR_NOT_SUPPORTED; }
#endif

 protected:
  Status memsetDeviceImpl(void* destination, void const* value, size_t value_bytes, size_t count,
                          cudaStream_t stream) const override {
    if (value_bytes != 1) { return Status::kErrorInternal; }
    auto byte = *static_cast<unsigned char const*>(value);
    bool cleared = cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(destination), byte, count, stream) == CUDA_SUCCESS;
    return cleared ? Status::kSuccess : Status::kErrorInternal;
  }
};

// The stride of a mode in elements; where the mode has one element, any stride that TMA takes will do.
inline int64_t tma_stride(int64_t stride, int64_t extent) { return extent > 1 ? stride : 0; }

// Whether TMA can address a tensor of `rows` and `batches`.
inline bool is_tma_tensor(void const* ptr, int64_t row_stride, int64_t rows, int64_t batch_stride, int64_t batches,
                          int element_bytes) {
  int64_t strides = tma_stride(row_stride, rows) | tma_stride(batch_stride, batches);
  return ptr != nullptr && reinterpret_cast<uintptr_t>(ptr) % kTmaAlignmentBytes == 0 &&
         strides * element_bytes % kTmaAlignmentBytes == 0;
}

// Runs `Kernel` with `arguments`, which must be legal. Returns 0, a positive CUresult, or kCannotRun.
template <class Kernel>
int run(CUfunction function, typename Kernel::Arguments const& arguments, dim3 cluster, void* workspace,
        CUstream stream) {
  DriverAdapter adapter;
  if (Kernel::initialize_workspace(arguments, workspace, stream, &adapter) != cutlass::Status::kSuccess) {
    return kCannotRun;
  }
  encode_status = CUDA_SUCCESS;
  auto params = Kernel::to_underlying_arguments(arguments, workspace);
  if (encode_status != CUDA_SUCCESS) { return static_cast<int>(encode_status); }
  dim3 grid = Kernel::get_grid_shape(params), block = Kernel::get_block_shape();
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {cluster.x, cluster.y, cluster.z};
  CUlaunchConfig config{grid.x, grid.y, grid.z, block.x, block.y, block.z, Kernel::SharedStorageSize, stream,
                        &attribute, 1};
  void* kernel_params[] = {&params};
  return static_cast<int>(cuLaunchKernelEx(&config, function, kernel_params, nullptr));
}

}  // namespace gemmgen
