// The epilogue of kernels whose only tile is D. CUTLASS's own has all warps of a CTA wait for one another twice in each
// subtile, so that the special function units idle while shared memory is written. Here each warp stores the 16 rows of
// its accumulators by TMA itself and waits for nobody. What the epilogue reads beside the accumulators, vectors and
// numbers, the warp that would load C brings to shared memory while the tile is multiplied.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>

#include "gemmgen/sm90_kernel.hpp"

namespace gemmgen {

constexpr int kWarpRows = 16;  // of an accumulator tile of a warp in WGMMA

// `Base` is CUTLASS's collective for the same types; D has N contiguous, and there is no C.
template <class Base>
class WarpEpilogue {
 public:
  using DispatchPolicy = typename Base::DispatchPolicy;
  using CtaTileMNK = typename Base::CtaTileMNK;
  using EpilogueTile = typename Base::EpilogueTile;
  using FusionCallbacks = typename Base::FusionCallbacks;
  using ElementC = typename Base::ElementC;
  using StrideC = typename Base::StrideC;
  using ElementD = typename Base::ElementD;
  using StrideD = typename Base::StrideD;
  using GmemTiledCopyC = typename Base::GmemTiledCopyC;
  using GmemTiledCopyD = typename Base::GmemTiledCopyD;
  using ThreadEpilogueOp = typename Base::ThreadEpilogueOp;
  using Arguments = typename Base::Arguments;
  static_assert(cute::is_void_v<ElementC> && cute::is_void_v<typename Base::CopyOpR2R>);

  static constexpr int kStages = DispatchPolicy::StagesD;
  static constexpr int kEpiM = cute::size<0>(EpilogueTile{}), kEpiN = cute::size<1>(EpilogueTile{});
  static constexpr int kWarps = kEpiM / kWarpRows;
  static constexpr int kThreads = kWarps * cutlass::NumThreadsPerWarp;
  using Strip = cute::Shape<cute::Int<kWarpRows>, cute::Int<kEpiN>>;  // what a warp stores of a subtile

  using StripLayout = decltype(cute::tile_to_shape(
      typename Base::SmemLayoutAtomD{},
      cute::Shape<cute::Int<kWarpRows>, cute::Int<kEpiN>, cute::Int<kWarps>, cute::Int<kStages>>{}));
  // The same as ((row of a strip, warp), column, stage): strips one below the other.
  using SubtileLayout = decltype(cute::composition(
      StripLayout{},
      cute::Layout<cute::Shape<cute::Shape<cute::Int<kWarpRows>, cute::Int<kWarps>>, cute::Int<kEpiN>,
                               cute::Int<kStages>>,
                   cute::Stride<cute::Stride<cute::_1, cute::Int<kWarpRows * kEpiN>>, cute::Int<kWarpRows>,
                                cute::Int<kWarpRows * kEpiN * kWarps>>>{}));

  // One stage is a tile's vectors and numbers.
  using LoadPipeline = cutlass::PipelineAsync<1>;
  using LoadPipelineState = typename LoadPipeline::PipelineState;
  static constexpr bool RequiresTransactionBytes = false;
  using StorePipeline = cutlass::PipelineTmaStore<kStages>;  // of each warp
  using StorePipelineState = cutlass::PipelineState<kStages>;

  struct SharedStorage {
    struct TensorStorage {
      alignas(cutlass::detail::alignment_for_swizzle(StripLayout{})) cute::ArrayEngine<ElementD,
                                                                                      cute::cosize_v<StripLayout>> d;
      typename FusionCallbacks::SharedStorage thread;
    } tensors;
    using PipelineStorage = typename LoadPipeline::SharedStorage;
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;
  using PipelineStorage = typename SharedStorage::PipelineStorage;

  template <class Extents>
  static auto make_copy(ElementD const* ptr, Extents const& extents, StrideD const& stride) {
    auto tensor = cute::make_tensor(cute::make_gmem_ptr<ElementD>(ptr), cute::make_layout(extents, stride));
    return cute::make_tma_copy_C_sm90(GmemTiledCopyD{}, tensor, cute::take<0, 2>(StripLayout{}), Strip{});
  }

  struct Params {
    typename FusionCallbacks::Params thread{};
    decltype(make_copy(nullptr, cute::repeat_like(StrideD{}, int32_t(0)), StrideD{})) store_d;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args, void* workspace) {
    auto const [M, N, K, L] = cute::append<4>(problem, 1);
    return {FusionCallbacks::to_underlying_arguments(problem, args.thread, workspace),
            make_copy(args.ptr_D, cute::make_shape(M, N, L), args.dD)};
  }

  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const& problem, Arguments const& args) {
    return Base::get_workspace_size(problem, args);
  }

  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const& problem, Arguments const& args, void* workspace,
                                              cudaStream_t stream, cutlass::CudaHostAdapter* adapter = nullptr) {
    return Base::initialize_workspace(problem, args, workspace, stream, adapter);
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const& problem, Arguments const& args) {
    return Base::can_implement(problem, args);
  }

  template <class TileShape>
  CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(TileShape) { return 1; }

  template <class TileShape>
  CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(TileShape tile) {
    return Base::get_store_pipe_increment(tile);
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.store_d.get_tma_descriptor());
  }

  CUTLASS_HOST_DEVICE WarpEpilogue(Params const& params, TensorStorage& storage)
      : params_(params), callbacks_(params.thread, storage.thread) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return callbacks_.is_producer_load_needed(); }

  template <class ProblemShape, class TileShape, class TileCoord, class TiledMma>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, ProblemShape problem, TileShape,
                           TileCoord coord, TiledMma tiled_mma, int thread, TensorStorage&, int = -1) {
    auto args = evt::ProducerLoadArgs(problem, CtaTileMNK{}, coord, tiled_mma, EpilogueTile{}, thread);
    auto callbacks = callbacks_.get_producer_load_callbacks(args);
    pipeline.producer_acquire(state);
    callbacks.step(nullptr, 0, 0, state.count(), false);
    pipeline.producer_commit(state);
    ++state;
    return state;
  }

  CUTLASS_DEVICE auto load_tail(LoadPipeline pipeline, LoadPipelineState state) {
    pipeline.producer_tail(state);
    return state;
  }

  template <class ProblemShape, class TileShape, class TileCoord, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
                            StorePipelineState store_state, ProblemShape problem, TileShape, TileCoord coord,
                            cute::Tensor<Engine, Layout> accum, TiledMma tiled_mma, int thread, TensorStorage& storage,
                            int = -1) {
    using namespace cute;
    static_assert(size(TiledMma{}) == kThreads);
    using ElementAccum = typename Engine::value_type;
    auto [M, N, K, L] = problem;
    auto [m, n, k, l] = coord;
    int const warp = thread / cutlass::NumThreadsPerWarp;
    bool const issues = elect_one_sync();
    bool const is_load_needed = is_producer_load_needed();

    // from registers to shared memory
    Tensor sD = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(storage.d.begin()), SubtileLayout{}));
    auto copy_atom = make_tiled_copy_C_atom(typename Base::CopyAtomC{}, tiled_mma);
    auto to_smem = make_tiled_copy_S(Copy_Atom<typename Base::CopyOpR2S, ElementD>{}, copy_atom);
    auto thread_to_smem = to_smem.get_slice(thread);
    Tensor tCrAcc = thread_to_smem.retile_S(accum);  // ((CPY,CPY_V),MMA_M,MMA_N)
    Tensor tCsD = thread_to_smem.partition_D(sD);    // (CPY,CPY_M,CPY_N,PIPE)
    Tensor tCrD = make_tensor<ElementD>(make_layout(take<0, 3>(shape(thread_to_smem.partition_S(sD)))));
    constexpr int kFragment = DispatchPolicy::FragmentSize;
    constexpr int kMmaN = size<1>(CtaTileMNK{}) / size<2>(tCrAcc);
    static_assert(size<0>(CtaTileMNK{}) / size<1>(tCrAcc) == kEpiM && kMmaN % kEpiN == 0);
    Tensor fragments = recast<cutlass::Array<ElementAccum, kFragment>>(tCrAcc);
    Tensor stored = recast<cutlass::Array<ElementD, kFragment>>(tCrD);

    // from there to memory, a strip at a time
    Tensor strips = make_tensor(make_smem_ptr(storage.d.begin()), StripLayout{})(_, _, warp, _);
    Tensor gD = local_tile(params_.store_d.get_tma_tensor(make_shape(M, N, L)), Strip{}, make_coord(_, _, l));
    auto strip_copy = params_.store_d.get_slice(_0{});
    Tensor from_strip = strip_copy.partition_S(strips);  // (TMA,TMA_M,TMA_N,PIPE)
    Tensor to_strip = strip_copy.partition_D(gD);        // (TMA,TMA_M,TMA_N,strips,columns of strips)

    // as CUTLASS hands them to its visitors
    auto tile_coords = local_tile(make_identity_tensor(make_shape(M, N)), take<0, 2>(CtaTileMNK{}), make_coord(m, n));
    auto thread_coords = thread_to_smem.partition_S(flat_divide(tile_coords, EpilogueTile{}));
    auto cD = make_coord_tensor(tile_coords.layout());
    auto tCcD = make_coord_tensor(thread_coords.layout());  // (CPY,CPY_M,CPY_N,EPI_M,EPI_N)
    auto args = evt::ConsumerStoreArgs(problem, CtaTileMNK{}, coord, tiled_mma, EpilogueTile{}, to_smem, cD,
                                       make_coord(M, N) - tile_coords(_0{}), tCcD,
                                       make_coord(M, N) - thread_coords(_0{}), tCrD, thread);
    auto callbacks = callbacks_.template get_consumer_store_callbacks<true>(args);
    constexpr int kEpiTilesM = size<3>(tCcD), kEpiTilesN = size<4>(tCcD), kEpiTiles = kEpiTilesM * kEpiTilesN;
    auto synchronize = []() CUTLASS_LAMBDA_FUNC_INLINE {
      cutlass::arch::NamedBarrier::sync(kThreads, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    };

    // Stores what was written last, and waits until the buffer that comes next has been read.
    auto store_strip = [&](int epi_m, int epi_n) CUTLASS_LAMBDA_FUNC_INLINE {
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (issues) {
        copy(params_.store_d, from_strip(_, _, _, store_state.index()),
             to_strip(_, _, _, (m * kEpiTilesM + epi_m) * kWarps + warp, n * kEpiTilesN + epi_n));
        store_pipeline.producer_commit(store_state);
        store_pipeline.producer_acquire(store_state);
      }
      __syncwarp();
      ++store_state;
    };

    if (is_load_needed) { load_pipeline.consumer_wait(load_state); }
    callbacks.begin();
    if (callbacks.begin_sync_needed()) { synchronize(); }
    CUTLASS_PRAGMA_UNROLL
    for (int epi_n = 0; epi_n < kEpiTilesN; ++epi_n) {
      CUTLASS_PRAGMA_UNROLL
      for (int epi_m = 0; epi_m < kEpiTilesM; ++epi_m) {
        int const subtile = epi_n * kEpiTilesM + epi_m;
        callbacks.begin_loop(epi_m, epi_n);
        callbacks.previsit(epi_m, epi_n, load_state.count(), is_load_needed);
        Tensor accum_here = fragments(_, epi_m, epi_n * kEpiN / kMmaN);
        int const first = epi_n % (kMmaN / kEpiN) * size(stored);
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < size(stored); ++v) {
          stored(v) = callbacks.visit(accum_here(first + v), v, epi_m, epi_n);
        }
        // one subtile late: what was written for it is in shared memory by now, so that the fence takes no time
        if (subtile > 0) { store_strip((subtile - 1) % kEpiTilesM, (subtile - 1) / kEpiTilesM); }
        callbacks.reduce(sD(_, _, store_state.index()), synchronize, epi_m, epi_n, subtile == kEpiTiles - 1, stored);
        copy(to_smem, tCrD, tCsD(_, _, _, store_state.index()));
        callbacks.postreduce(epi_m, epi_n, store_state.count(), true);
        callbacks.end_loop(epi_m, epi_n);
      }
    }
    store_strip(kEpiTilesM - 1, kEpiTilesN - 1);
    if (is_load_needed) {
      load_pipeline.consumer_release(load_state);
      ++load_state;
    }
    if (callbacks.begin_sync_needed()) { synchronize(); }
    callbacks.end();
    return cute::make_tuple(load_state, store_state);
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
                                 StorePipelineState store_state) {
    store_pipeline.producer_tail(store_state);
    return cute::make_tuple(load_state, store_state);
  }

 private:
  Params const& params_;
  FusionCallbacks callbacks_;
};

}  // namespace gemmgen
