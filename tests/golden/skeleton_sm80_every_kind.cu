// sm80_128x128x32_1x1_multistage_s4 for sm90
struct Kernel {
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 32;
  static constexpr int kThreads = 128;
  static constexpr int kSmemBytes = 71696;
  static constexpr bool kSplitsK = false;
  static constexpr bool kMajorA = true, kMajorB = true;
  static constexpr int kAlignmentA = 8, kAlignmentB = 8;
  static constexpr int kBytesA = 2, kBytesB = 2;
};

#ifndef GEMMGEN_LAUNCHER
#include <gemmgen/sm80_kernel.hpp>

using ElementA = cutlass::bfloat16_t;
using LayoutA = cutlass::layout::RowMajor;
using ElementB = cutlass::bfloat16_t;
using LayoutB = cutlass::layout::ColumnMajor;
using Accum = float;

using Mma = typename cutlass::gemm::threadblock::DefaultMma<
    ElementA, LayoutA, Kernel::kAlignmentA, ElementB, LayoutB, Kernel::kAlignmentB, Accum, cutlass::layout::RowMajor,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<128, 128, 32>,
    cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<16, 8, 16>, 4,
    cutlass::arch::OpMultiplyAdd>::ThreadblockMma;

using Map = gemmgen::sm80::ThreadMap<Kernel::kTileM, Kernel::kTileN, Kernel::kThreads, 4, 8>;
using Staged = gemmgen::sm80::StagedTile<Accum, Map>;

struct EpilogueStorage {
  Staged staged;
  float scratch[Map::kScratchBytes / sizeof(float)];
};

struct SharedStorage {
  union {
    typename Mma::SharedStorage mainloop;
    EpilogueStorage epilogue;
  };
  int arrived;
};
static_assert(sizeof(SharedStorage) <= Kernel::kSmemBytes, "gemmgen/lower/sm80.py counted too little shared memory");

extern "C" __device__ float gemmgen_functor_0(float, float, float, float, float, int32_t, int32_t);
extern "C" __device__ float gemmgen_functor_1(float, float, float, float, float, int32_t, int32_t);
extern "C" __device__ float gemmgen_functor_2(float, float, float, float, float, int32_t, int32_t);

// Applies the functors to the staged tile, row by row, and stores or reduces what they return.
__device__ void run_epilogue(gemmgen::Args const& args, gemmgen::sm80::Tile const& tile, EpilogueStorage& storage) {
  gemmgen::sm80::RowBroadcast<float, Map> in0(args.inputs[0], tile);
  gemmgen::sm80::ColBroadcast<float, Map> in1(args.inputs[1], tile);
  gemmgen::sm80::AuxLoad<float, Map> in2(args.inputs[2], tile);
  gemmgen::sm80::ScalarBroadcast<float, Map> in3(args.inputs[3], tile);
  gemmgen::sm80::RowIndex<int32_t, Map> in4(args.inputs[4], tile);
  gemmgen::sm80::ColIndex<int32_t, Map> in5(args.inputs[5], tile);
  gemmgen::sm80::AuxStore<cutlass::bfloat16_t, float, Map> out0(args.outputs[0], tile);
  gemmgen::sm80::AuxStore<cutlass::half_t, float, Map> out1(args.outputs[1], tile);
  gemmgen::sm80::RowReduction<gemmgen::sm80::Sum, Map> out2(args.outputs[2], tile);

#pragma unroll 1
  for (int step = 0; step < Map::kSteps && step * Map::kRowThreads < tile.rows; step += Map::kSlots) {
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Map::kSlots; ++slot) {
      in0.fetch(slot, Map::row(step + slot));
      in1.fetch(slot, Map::row(step + slot));
      in2.fetch(slot, Map::row(step + slot));
      in3.fetch(slot, Map::row(step + slot));
      in4.fetch(slot, Map::row(step + slot));
      in5.fetch(slot, Map::row(step + slot));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Map::kSlots; ++slot) {
      int row = Map::row(step + slot);
      Accum accum[Map::kVector];
      storage.staged.read(row, accum);
      float value0[Map::kVector];
      float value1[Map::kVector];
      float value2[Map::kVector];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Map::kVector; ++i) {
        value0[i] = gemmgen_functor_0(accum[i], in0.value(slot, i), in1.value(slot, i), in2.value(slot, i), in3.value(slot, i), in4.value(slot, i), in5.value(slot, i));
        value1[i] = gemmgen_functor_1(accum[i], in0.value(slot, i), in1.value(slot, i), in2.value(slot, i), in3.value(slot, i), in4.value(slot, i), in5.value(slot, i));
        value2[i] = gemmgen_functor_2(accum[i], in0.value(slot, i), in1.value(slot, i), in2.value(slot, i), in3.value(slot, i), in4.value(slot, i), in5.value(slot, i));
      }
      out0.put(row, value0);
      out1.put(row, value1);
      out2.put(row, value2);
    }
  }
  out0.finish(storage.scratch);
  out1.finish(storage.scratch);
  out2.finish(storage.scratch);
}

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemmgen_kernel(__grid_constant__ gemmgen::sm80::Params const params) {
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<SharedStorage*>(smem);
  gemmgen::sm80::Tile tile = gemmgen::sm80::locate<Kernel::kTileM, Kernel::kTileN>(params);

  Mma::FragmentC accum;
  accum.clear();
  gemmgen::sm80::multiply<Mma, LayoutA, LayoutB>(params, tile, storage.mainloop, accum);
  __syncthreads();
  if (Kernel::kSplitsK && !gemmgen::sm80::reduce_slices<Kernel::kThreads>(params, accum, &storage.arrived)) { return; }
  gemmgen::sm80::StageTensorOp<Mma, Staged>::stage(accum, storage.epilogue.staged);
  __syncthreads();
  run_epilogue(params.args, tile, storage.epilogue);
}

#else
#include <gemmgen/sm80_launch.hpp>

using Launcher = gemmgen::sm80::Launcher<Kernel>;

extern "C" int gemmgen_abi_version() { return gemmgen::kAbiVersion; }
extern "C" int gemmgen_smem_bytes() { return Kernel::kSmemBytes; }
extern "C" int64_t gemmgen_workspace_bytes(gemmgen::Args const* args) { return Launcher::workspace_bytes(*args); }
extern "C" int gemmgen_partial_count(gemmgen::Args const* args, int output) {
  switch (output) {
    case 2: return int(Launcher::grid_m(*args));
    default: return 0;
  }
}
extern "C" int gemmgen_run(CUfunction function, gemmgen::Args const* args, void* workspace, CUstream stream) {
  return Launcher::run(function, *args, workspace, stream);
}
#endif
