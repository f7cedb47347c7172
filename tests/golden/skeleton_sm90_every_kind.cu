// sm90_128x128x64_1x2_pingpong: bf16 x bf16; (row f32, col f32, tile f32, scalar f32, row_index i32, col_index i32) -> (tile bf16, tile f16, sum to row f32)
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
#include <gemmgen/sm90_scheduler.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>

using ClusterShape = cute::Shape<cute::Int<1>, cute::Int<2>, cute::_1>;
using ElementAccum = float;
using TileShape = cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<64>>;
using Epi = gemmgen::EpilogueShape<TileShape, cutlass::epilogue::collective::EpilogueTileAuto, float, cutlass::bfloat16_t,
                                   cutlass::epilogue::TmaWarpSpecialized>;

// Functors: the arithmetic, defined elsewhere and linked in.
extern "C" __device__ float gemmgen_functor_0(float, float, float, float, float, int, int);
struct Functor0 {
  using Value = float;
  using Stored = cutlass::bfloat16_t;
  template <class... Operands>
  CUTLASS_DEVICE static Value call(Operands... operands) { return gemmgen_functor_0(operands...); }
};
extern "C" __device__ float gemmgen_functor_1(float, float, float, float, float, int, int);
struct Functor1 {
  using Value = float;
  using Stored = cutlass::half_t;
  template <class... Operands>
  CUTLASS_DEVICE static Value call(Operands... operands) { return gemmgen_functor_1(operands...); }
};
extern "C" __device__ float gemmgen_functor_2(float, float, float, float, float, int, int);
struct Functor2 {
  using Value = float;
  using Stored = float;
  template <class... Operands>
  CUTLASS_DEVICE static Value call(Operands... operands) { return gemmgen_functor_2(operands...); }
};

// Loads, in the order of the functors' parameters.
using Load0 = gemmgen::RowLoad<Epi, float>;  // input 0: row f32
using Load1 = gemmgen::ColLoad<Epi, float>;  // input 1: col f32
using Load2 = cutlass::epilogue::fusion::Sm90SrcFetch<float>;  // input 2: tile f32, as C
using Load3 = gemmgen::ScalarLoad<float>;  // input 3: scalar f32
using Load4 = gemmgen::IndexLoad<0>;  // input 4: row_index i32
using Load5 = gemmgen::IndexLoad<1>;  // input 5: col_index i32

// Stores, in the order of the functors.
using Store0 = gemmgen::StoreD;  // output 0: tile bf16, as D
using Store1 = gemmgen::TileStore<Epi, cutlass::half_t>;  // output 1: tile f16
using Store2 = gemmgen::RowPartials<Epi, gemmgen::Sum>;  // output 2: sum to row f32

using Visitor = gemmgen::FunctorVisitor<0, cute::tuple<Load0, Load1, Load2, Load3, Load4, Load5>,
                                        cute::tuple<Store0, Store1, Store2>, Functor0, Functor1, Functor2>;
using Epilogue = Epi::Collective<ClusterShape, ElementAccum, Visitor>;
using WholeMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    ElementAccum, TileShape, ClusterShape, cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
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
         && is_tma_tensor(x.inputs[2].ptr, x.inputs[2].row_stride, x.m, x.inputs[2].batch_stride, x.l, sizeof(float))
         && is_tma_tensor(x.outputs[0].ptr, x.outputs[0].row_stride, x.m, x.outputs[0].batch_stride, x.l, sizeof(cutlass::bfloat16_t))
         && is_tma_tensor(x.outputs[1].ptr, x.outputs[1].row_stride, x.m, x.outputs[1].batch_stride, x.l, sizeof(cutlass::half_t));
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
       static_cast<float const*>(x.inputs[2].ptr), {tma_stride(x.inputs[2].row_stride, x.m), cute::_1{}, tma_stride(x.inputs[2].batch_stride, x.l)},
       static_cast<cutlass::bfloat16_t*>(x.outputs[0].ptr), {tma_stride(x.outputs[0].row_stride, x.m), cute::_1{}, tma_stride(x.outputs[0].batch_stride, x.l)}},
      hardware};
  args.epilogue.thread = typename Visitor::Arguments{
      typename Load0::Arguments{static_cast<float const*>(x.inputs[0].ptr), float(0), {cute::_0{}, cute::_1{}, x.inputs[0].batch_stride}},
      typename Load1::Arguments{static_cast<float const*>(x.inputs[1].ptr), float(0), {cute::_1{}, cute::_0{}, x.inputs[1].batch_stride}},
      typename Load2::Arguments{},
      typename Load3::Arguments{static_cast<float const*>(x.inputs[3].ptr), x.inputs[3].batch_stride, x.inputs[3].value},
      typename Load4::Arguments{},
      typename Load5::Arguments{},
      typename Store0::Arguments{},
      typename Store1::Arguments{static_cast<cutlass::half_t*>(x.outputs[1].ptr), {tma_stride(x.outputs[1].row_stride, x.m), cute::_1{}, tma_stride(x.outputs[1].batch_stride, x.l)}},
      typename Store2::Arguments{static_cast<float*>(x.outputs[2].ptr), x.outputs[2].row_stride, x.outputs[2].batch_stride}
  };
  args.scheduler.max_swizzle_size = x.swizzle;
  args.scheduler.raster_order = x.raster == 0 ? Raster::Heuristic : x.raster == 1 ? Raster::AlongM : Raster::AlongN;
  return args;
}

extern "C" int gemmgen_abi_version() { return gemmgen::kAbiVersion; }
extern "C" int gemmgen_smem_bytes() { return Kernel::SharedStorageSize; }
extern "C" int64_t gemmgen_workspace_bytes(gemmgen::Args const* x) { return Kernel::get_workspace_size(arguments(*x)); }
extern "C" int gemmgen_partial_count(gemmgen::Args const* x, int output) {
  if (output == 2) { return cute::ceil_div(x->m, 128); }
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
