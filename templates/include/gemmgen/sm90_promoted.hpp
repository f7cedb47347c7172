// fp8 WGMMAs sum with fewer bits than fp32 has, so what they sum over one k tile is added to the accumulators, which is
// called promotion. CUTLASS's mainloop promotes the whole tile at once while the tensor cores wait. Here a warpgroup
// works on its tile in chunks of columns: the WGMMAs of one chunk run while the sums of the chunk before are promoted.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp>

namespace gemmgen {

// CUTLASS's collective `Base` with another `mma`. Whatever else sees accumulators has them in the order of its TiledMma.
template <class Base, int Chunks>
struct PromotedMainloop : Base {
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TiledMma;
  using typename Base::TileShape;

  static constexpr int kChunkN = cute::size<1>(TileShape{}) / Chunks;
  static_assert(kChunkN * Chunks == cute::size<1>(TileShape{}));
  using ChunkShape = cute::Shape<cute::tuple_element_t<0, TileShape>, cute::Int<kChunkN>,
                                 cute::tuple_element_t<2, TileShape>>;
  using WarpGroups = cute::Int<cute::size(TiledMma{}) / cutlass::NumThreadsPerWarpGroup>;
  using ChunkMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<typename TiledMma::ValTypeA, typename TiledMma::ValTypeB, typename TiledMma::ValTypeC,
                                 ChunkShape, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<WarpGroups, cute::_1, cute::_1>>{}));
  static constexpr int kSteps = cute::size<0>(TileShape{}) / (64 * WarpGroups{}) * Chunks;  // of a k tile, 64 rows each
  static constexpr int kSums = 64 * kChunkN / cutlass::NumThreadsPerWarpGroup;  // of a step, in one thread

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& accum, int k_tiles, int thread,
                          TensorStorage& storage, Params const&) {
    using namespace cute;
    Tensor sA = make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(storage.smem_B.data()), typename Base::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    int const warp_group = __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
    auto thread_mma = ChunkMma{}.get_slice(warp_group * cutlass::NumThreadsPerWarpGroup);
    Tensor tCrA = thread_mma.make_fragment_A(thread_mma.partition_A(sA));  // (MMA,MMA_M,MMA_K,PIPE)
    Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K,PIPE)

    // Steps alternate between two sets of sums: the WGMMAs write one while the other is promoted.
    using Sums = decltype(partition_fragment_C(ChunkMma{}, Shape<Int<64 * WarpGroups{}>, Int<kChunkN>>{}));
    static_assert(size(Sums{}) == kSums);
    Sums sums[2];

    auto issue = [&](int step, int stage, Sums& to) {
      ChunkMma chunk_mma;
      chunk_mma.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_fence_operand(to);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(tCrA); ++k) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < size<2>(to); ++n) {  // more than one where no WGMMA is as wide as the chunk
          cute::gemm(chunk_mma, tCrA(_, step / Chunks, k, stage), tCrB(_, step % Chunks * size<2>(to) + n, k, stage),
                     to(_, 0, n));
        }
        chunk_mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    auto promote = [&](int step, Sums& from) {
      warpgroup_fence_operand(from);
      constexpr int width = size<0>(Accumulators{});  // registers of one WGMMA of `TiledMma`, by columns
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        int const column = step % Chunks * kSums + i;
        accum(column % width, step / Chunks, column / width) += from(i);
      }
    };

    // `set` takes the sums of the first step. Within a run, the WGMMAs of a k tile queue behind those of the one before.
    PipelineState release = read;
    auto k_tile = [&](auto set, auto is_first, auto starts_run) {
      pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
      if constexpr (starts_run && !is_first) { warpgroup_wait<0>(); }
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        issue(step, read.index(), sums[(set + step) % 2]);
        if (step == 0 && is_first) { continue; }
        warpgroup_wait<1>();
        promote((step + kSteps - 1) % kSteps, sums[(set + step + 1) % 2]);
        if (step == 0) {
          pipeline.consumer_release(release);
          ++release;
        }
      }
      ++read;
    };
    auto finish = [&](auto set) {
      warpgroup_wait<0>();
      promote(kSteps - 1, sums[(set + kSteps - 1) % 2]);
    };

    clear(accum);
    if (k_tiles == 0) { return; }
    k_tile(_0{}, true_type{}, true_type{});
    constexpr auto odd = Int<kSteps % 2>{};  // an odd number of steps exchanges the sets
    while (true) {  // where a loop's next turn promotes what WGMMAs still write, ptxas serialises them: hence the runs
      if (--k_tiles == 0) { return finish(_0{}); }
      k_tile(odd, false_type{}, true_type{});
      if (--k_tiles == 0) { return finish(odd); }
      k_tile(_0{}, false_type{}, false_type{});
      if (--k_tiles == 0) { return finish(_0{}); }
      k_tile(odd, false_type{}, false_type{});
      if (--k_tiles == 0) { return finish(odd); }
      k_tile(_0{}, false_type{}, false_type{});
    }
  }
};

}  // namespace gemmgen
