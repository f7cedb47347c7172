// Stands before CUTLASS in a launcher: notes when the driver refuses a TMA descriptor, which CUTLASS would only print
// before it launches a kernel that then dies of it.
#pragma once
#include <cuda.h>

namespace gemmgen {

inline thread_local CUresult encode_status = CUDA_SUCCESS;

template <class... Ts>
CUresult encode_tiled(Ts... args) {
  CUresult status = cuTensorMapEncodeTiled(args...);
  if (status != CUDA_SUCCESS) { encode_status = status; }
  return CUDA_SUCCESS;
}

}  // namespace gemmgen

#define cuTensorMapEncodeTiled gemmgen::encode_tiled
