// What a launcher does with a CUTLASS 3.x kernel type: the C ABI of abi.h by the driver API alone.
#pragma once
#include <cuda.h>

#include <cutlass/cuda_host_adapter.hpp>
#include <cutlass/cutlass.h>

#include <cstring>
#include <memory>
#include <vector>

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

// What a launch hands to the driver, and the bytes that decide it.
template <class Kernel>
struct Launch {
  Args args;
  void* workspace;
  typename Kernel::Arguments arguments;  // for clearing the workspace
  typename Kernel::Params params;
  dim3 grid;

  bool is_of(Args const& other, void* other_workspace) const {
    return workspace == other_workspace && std::memcmp(&args, &other, sizeof(Args)) == 0;  // Args has no padding
  }
};

// The launches that a thread prepared last: encoding the TMA descriptors takes longer than cuLaunchKernelEx.
// A descriptor holds the address, the extents, the strides and the type of a tensor, never its contents, and the rest
// of the parameters follows from Args as well. Neither the device nor the context is part of the key: addresses are
// unique among all devices of a process, and the number of SMs is in Args.
template <class Kernel>
class Launches {
 public:
  // Null where no launch is known.
  Launch<Kernel> const* find(Args const& args, void* workspace) const {
    uint64_t tag = tag_of(args, workspace);
    for (size_t i = 0; i < tags_.size(); ++i) {
      if (tags_[i] == tag && launches_[i]->is_of(args, workspace)) { return launches_[i].get(); }
    }
    return nullptr;
  }

  // Null where the driver refuses a descriptor: `encode_status` says why. `arguments` are those of `args`.
  Launch<Kernel> const* add(Args const& args, void* workspace, typename Kernel::Arguments const& arguments) {
    encode_status = CUDA_SUCCESS;
    auto params = Kernel::to_underlying_arguments(arguments, workspace);
    if (encode_status != CUDA_SUCCESS) { return nullptr; }
    dim3 grid = Kernel::get_grid_shape(params);
    if (tags_.size() < kMost) {
      tags_.emplace_back();
      launches_.emplace_back();
    }
    size_t oldest = added_++ % kMost;
    tags_[oldest] = tag_of(args, workspace);
    launches_[oldest].reset(new Launch<Kernel>{args, workspace, arguments, params, grid});
    return launches_[oldest].get();
  }

 private:
  static constexpr size_t kMost = 128;  // more than a model has layers, each with its weights

  // Tells most calls apart.
  static uint64_t tag_of(Args const& args, void* workspace) {
    void const* pointers[] = {args.a.ptr, args.b.ptr, args.inputs[0].ptr, args.outputs[0].ptr, workspace};
    uint64_t tag = uint64_t(args.m);
    for (void const* pointer : pointers) {
      tag = tag * 0x9e3779b97f4a7c15u + reinterpret_cast<uintptr_t>(pointer);
    }
    return tag;
  }

  std::vector<uint64_t> tags_;  // of `launches_`, apart from them for a quick search
  std::vector<std::unique_ptr<Launch<Kernel>>> launches_;
  size_t added_ = 0;
};

// Whether the kernel itself waits for the one ahead of it in the stream before it reads or writes memory, so that the
// driver may start it early.
#ifdef CUTLASS_ENABLE_GDC_FOR_SM90
constexpr bool kWaitsForKernelAhead = true;
#else
constexpr bool kWaitsForKernelAhead = false;
#endif

// Returns 0, a positive CUresult, or kCannotRun. The driver copies the parameters before it returns, also when it
// captures the launch into a graph, so that they need not outlive the call.
template <class Kernel>
int run(CUfunction function, Launch<Kernel> const& launch, dim3 cluster, CUstream stream) {
  DriverAdapter adapter;
  auto cleared = Kernel::initialize_workspace(launch.arguments, launch.workspace, stream, &adapter);
  if (cleared != cutlass::Status::kSuccess) { return kCannotRun; }
  dim3 grid = launch.grid, block = Kernel::get_block_shape();
  CUlaunchAttribute attributes[2] = {};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[0].value.clusterDim = {cluster.x, cluster.y, cluster.z};
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attributes[1].value.programmaticStreamSerializationAllowed = kWaitsForKernelAhead;
  CUlaunchConfig config{grid.x, grid.y, grid.z, block.x, block.y, block.z, Kernel::SharedStorageSize, stream,
                        attributes, 2};
  void* kernel_params[] = {const_cast<typename Kernel::Params*>(&launch.params)};
  return static_cast<int>(cuLaunchKernelEx(&config, function, kernel_params, nullptr));
}

}  // namespace gemmgen
