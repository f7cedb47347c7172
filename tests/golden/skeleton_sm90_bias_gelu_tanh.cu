// sm90_128x128x64_1x2_pingpong: bf16 x bf16; (row f32) -> (tile bf16)
// Two halves: LTO-IR of the kernel around undefined functors, and (GEMMGEN_LAUNCHER) the host's launcher.
#ifdef GEMMGEN_LAUNCHER
#define CUTLASS_ENABLE_CUDA_HOST_ADAPTER 1
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL
#include "gemmgen/encode.hpp"
#endif
#if !defined(GEMMGEN_LAUNCHER) || !defined(__CUDA_ARCH__)  // the launcher has no device code
// This kernel may start before the one ahead of it in the stream has ended: its warps that load tiles wait for that end,
// and all others read and write only after they have had a tile, but for prefetches to L2, which sees what is written
// later. launch.hpp goes by this macro too.
#define CUTLASS_ENABLE_GDC_FOR_SM90
#include "gemmgen/sm90_edges.hpp"
#include "gemmgen/sm90_kernel.hpp"
#include <gemmgen/sm90_warp_epilogue.hpp>
#include <gemmgen/sm90_scheduler.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>

using ClusterShape = cute::Shape<cute::Int<1>, cute::Int<2>, cute::_1>;
using ElementAccum = float;
using TileShape = cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<64>>;
using Epi = gemmgen::EpilogueShape<TileShape, cute::Shape<cute::Int<64>, cute::Int<64>>, void, cutlass::bfloat16_t,
                                   cutlass::epilogue::TmaWarpSpecialized>;

// Functors: the arithmetic, defined elsewhere and linked in.
extern "C" __device__ float gemmgen_functor_0(float, float);
struct Functor0 {
  using Value = float;
  using Stored = cutlass::bfloat16_t;
  template <class... Operands>
  CUTLASS_DEVICE static Value call(Operands... operands) { return gemmgen_functor_0(operands...); }
};

// Loads, in the order of the functors' parameters.
using Load0 = gemmgen::StagedVector<Epi, 1, float>;  // input 0: row f32

// Stores, in the order of the functors.
using Store0 = gemmgen::StoreD;  // output 0: tile bf16, as D

using Visitor = gemmgen::FunctorVisitor<0, cute::tuple<Load0>,
                                        cute::tuple<Store0>, Functor0>;
using Epilogue = gemmgen::WarpEpilogue<Epi::Collective<ClusterShape, ElementAccum, Visitor>>;
using WholeMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    ElementAccum, TileShape, ClusterShape, cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::TensorStorage)) + 256>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
using Mainloop = gemmgen::EdgeMainloop<WholeMainloop>;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    gemmgen::GroupedTiles>;

#ifndef GEMMGEN_LAUNCHER
extern "C" __global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
gemmgen_kernel(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
  extern __shared__ char smem[];
  Kernel{}(params, smem);
}
#else
#include "gemmgen/launch.hpp"

static bool is_runnable(gemmgen::Args const& x) {
  using gemmgen::is_tma_tensor;
  return x.m > 0 && x.n > 0 && x.k > 0 && x.l > 0
         && is_tma_tensor(x.a.ptr, x.a.ld, x.m, x.a.batch_stride, x.l, sizeof(cutlass::bfloat16_t))
         && is_tma_tensor(x.b.ptr, x.b.ld, x.n, x.b.batch_stride, x.l, sizeof(cutlass::bfloat16_t))
         && is_tma_tensor(x.outputs[0].ptr, x.outputs[0].row_stride, x.m, x.outputs[0].batch_stride, x.l, sizeof(cutlass::bfloat16_t));
}

static typename Kernel::Arguments arguments(gemmgen::Args const& x) {
  using gemmgen::tma_stride;
  using Raster = typename Kernel::TileScheduler::RasterOrderOptions;
  cutlass::KernelHardwareInfo hardware;
  hardware.sm_count = x.sm_count;
  typename Kernel::Arguments args{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {x.m, x.n, x.k, x.l},
      {static_cast<cutlass::bfloat16_t const*>(x.a.ptr), {tma_stride(x.a.ld, x.m), cute::_1{}, tma_stride(x.a.batch_stride, x.l)},
       static_cast<cutlass::bfloat16_t const*>(x.b.ptr), {tma_stride(x.b.ld, x.n), cute::_1{}, tma_stride(x.b.batch_stride, x.l)}},
      { {},
       static_cast<void const*>(nullptr), {0, cute::_1{}, 0},
       static_cast<cutlass::bfloat16_t*>(x.outputs[0].ptr), {tma_stride(x.outputs[0].row_stride, x.m), cute::_1{}, tma_stride(x.outputs[0].batch_stride, x.l)}},
      hardware};
  args.epilogue.thread = typename Visitor::Arguments{
      typename Load0::Arguments{static_cast<float const*>(x.inputs[0].ptr), x.inputs[0].batch_stride},
      typename Store0::Arguments{}
  };
  args.scheduler.max_swizzle_size = x.swizzle;
  args.scheduler.raster_order = x.raster == 0 ? Raster::Heuristic : x.raster == 1 ? Raster::AlongM : Raster::AlongN;
  return args;
}

extern "C" int gemmgen_abi_version() { return gemmgen::kAbiVersion; }
extern "C" int gemmgen_smem_bytes() { return Kernel::SharedStorageSize; }
extern "C" int64_t gemmgen_workspace_bytes(gemmgen::Args const* x) { return Kernel::get_workspace_size(arguments(*x)); }
extern "C" int gemmgen_partial_count(gemmgen::Args const* x, int output) {
  return 0;
}
extern "C" int gemmgen_run(CUfunction kernel, gemmgen::Args const* x, void* workspace, CUstream stream) {
  // of this library alone: a static of a template is shared by all launchers whose kernels have types of one name
  static thread_local gemmgen::Launches<Kernel> launches;
  auto const* launch = launches.find(*x, workspace);
  if (launch == nullptr) {
    if (!is_runnable(*x)) { return gemmgen::kCannotRun; }
    launch = launches.add(*x, workspace, arguments(*x));
    if (launch == nullptr) { return static_cast<int>(gemmgen::encode_status); }
  }
  return gemmgen::run(kernel, *launch, dim3(1, 2, 1), stream);
}
#endif
#endif
