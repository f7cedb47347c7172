// A kernel layer for epilogues that take long. As in CUTLASS's cooperative kernel, two consumer warpgroups share a tile.
// There the tensor cores wait while an epilogue runs. Here a tile has two halves of 128 rows, each with its epilogue. Its
// last k tiles are multiplied for the first half ahead of the second, and during the epilogue of the first half for the
// second; during the epilogue of the second half the first k tiles of the next tile are multiplied for its first half.
//
// The tensor cores take only a few WGMMAs of a warp ahead; it waits until they take the next. So what is to run during an
// epilogue is issued in chunks, one before it and one before each of its subtiles.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp>

#include "gemmgen/sm90_k_tile.hpp"
#include "gemmgen/sm90_visitors.hpp"

namespace gemmgen {

// What the collective epilogue hands on to its visitors, unread, as its TiledMma.
template <class TiledMma, class Function>
struct MmaWithHook : TiledMma {
  Function const* before_subtile = nullptr;  // (int subtile)
};
template <class TiledMma, class Function>
CUTLASS_DEVICE constexpr auto size(MmaWithHook<TiledMma, Function> const&) { return cute::size(TiledMma{}); }

// `Visitor`, which calls `before_subtile` before each column of subtiles.
template <class Visitor>
struct HookedVisitor : Visitor {
  using Visitor::Visitor;

  template <class Callbacks, class Mma>
  struct HookedCallbacks : Callbacks {
    Mma mma;
    CUTLASS_DEVICE HookedCallbacks(Callbacks&& callbacks, Mma const& mma) : Callbacks(cute::move(callbacks)), mma(mma) {}

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (epi_m == 0) { (*mma.before_subtile)(epi_n); }
      Callbacks::begin_loop(epi_m, epi_n);
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const& args) {
    auto callbacks = Visitor::template get_consumer_store_callbacks<ReferenceSrc>(args);
    using Mma = cute::remove_cvref_t<decltype(args.tiled_mma)>;
    return HookedCallbacks<decltype(callbacks), Mma>(cute::move(callbacks), args.tiled_mma);
  }
};

// `Mainloop` is a cooperative collective of 256 rows, `Epilogue` one of 128. All but the device code is CUTLASS's.
template <class Mainloop, class Epilogue>
struct OverlappedKernel : cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                               cutlass::gemm::PersistentScheduler> {
  using Base = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    cutlass::gemm::PersistentScheduler>;
  using typename Base::ClusterShape;
  using typename Base::Params;
  using typename Base::SharedStorage;
  using typename Base::TileScheduler;
  using typename Base::TileShape;
  using typename Base::TiledMma;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using LoadPipeline = typename Epilogue::LoadPipeline;
  using StorePipeline = typename Epilogue::StorePipeline;

  static constexpr int kHalves = 2;
  using HalfShape = typename Epilogue::CtaTileMNK;
  using Half = decltype(cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(HalfShape{})));  // (MMA,1,MMA_N)
  static_assert(cute::size<0>(TileShape{}) == kHalves * cute::size<0>(HalfShape{}) && cute::size<1>(Half{}) == 1);

  // By how many k tiles the first half is ahead of the second at both ends of a tile. They stay in shared memory for the
  // second half; one less than there are buffers, since the k tile before them is not yet free.
  static constexpr int kLead = Mainloop::DispatchPolicy::Stages - 1;
  static constexpr int kSteps = cute::size<2>(TileShape{}) / cute::size<2>(typename TiledMma::AtomShape_MNK{});
  static constexpr int kSubtiles = cute::size<1>(HalfShape{}) / cute::size<1>(typename Epilogue::EpilogueTile{});
  static constexpr int kChunks = 1 + kSubtiles;

  // The WGMMA steps of a lead that chunk `chunk` begins with.
  static constexpr int begin_of(int chunk) { return chunk * kLead * kSteps / kChunks; }

  CUTLASS_DEVICE void operator()(Params const& params, char* smem) {
    auto& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const warp = cutlass::canonical_warp_idx_sync();
    bool const is_consumer = warp >= cutlass::NumWarpsPerWarpGroup;
    bool const loads_inputs = warp == 0, loads_operands = warp == 1;
    if (warp == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue);
    }

    typename Pipeline::Params pipeline_params;
    pipeline_params.role = loads_inputs  ? Pipeline::ThreadCategory::Producer
                           : is_consumer ? Pipeline::ThreadCategory::Consumer
                                         : Pipeline::ThreadCategory::NonParticipant;
    pipeline_params.is_leader = loads_inputs;  // one elected thread of that warp does everything
    pipeline_params.num_consumers = Base::NumMMAThreads;
    pipeline_params.transaction_bytes = params.mainloop.tma_transaction_bytes;
    Pipeline pipeline(storage.pipelines.mainloop, pipeline_params, ClusterShape{});

    typename LoadPipeline::Params load_params;
    load_params.role = loads_operands ? LoadPipeline::ThreadCategory::Producer
                       : is_consumer  ? LoadPipeline::ThreadCategory::Consumer
                                      : LoadPipeline::ThreadCategory::NonParticipant;
    load_params.dst_blockid = cute::block_rank_in_cluster();
    load_params.producer_arv_count = cutlass::NumThreadsPerWarp;
    load_params.consumer_arv_count = Base::NumMMAThreads;
    if constexpr (Epilogue::RequiresTransactionBytes) {
      load_params.transaction_bytes = params.epilogue.tma_transaction_bytes;
    }
    LoadPipeline load_pipeline(storage.pipelines.epi_load, load_params);

    if constexpr (cute::size(ClusterShape{}) > 1) {  // the pipelines are ready, in every CTA of the cluster
      cute::cluster_arrive();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    if (is_consumer) {
      cutlass::arch::warpgroup_reg_alloc<Base::MmaRegisterRequirement>();
      consume(params, storage, pipeline, load_pipeline);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<Base::LoadRegisterRequirement>();
      if (loads_inputs) { load_inputs(params, storage, pipeline); }
      if (loads_operands) { load_operands(params, storage, load_pipeline); }
    }
  }

 private:
  // Calls `f(coord)` with the coordinates (m,n,_,l) of each tile of this CTA.
  template <class Function>
  CUTLASS_DEVICE static void for_each_tile(Params const& params, Function&& f) {
    TileScheduler scheduler{params.scheduler};
    for (auto work = scheduler.get_current_work(); work.is_valid(); work = scheduler.get_current_work()) {
      f(cute::make_coord(work.M_idx, work.N_idx, cute::_, work.L_idx));
      scheduler.advance_to_next_work();
    }
  }

  template <class Coord>
  CUTLASS_DEVICE static auto half_of(Coord const& coord, int half) {
    auto [m, n, k, l] = coord;
    return cute::make_coord(m * kHalves + half, n, cute::_, l);
  }

  // Where K ends before both leads do, k tiles of zeros follow.
  CUTLASS_DEVICE static int k_tiles_of(Params const& params) {
    return cute::max(cute::ceil_div(cute::get<2>(params.problem_shape), int{cute::size<2>(TileShape{})}), 2 * kLead);
  }

  CUTLASS_DEVICE static void load_inputs(Params const& params, SharedStorage& storage, Pipeline pipeline) {
    Mainloop mainloop;
    auto inputs = mainloop.load_init(params.problem_shape, params.mainloop);
    auto state = cutlass::make_producer_start_state<Pipeline>();
    int const k_tiles = k_tiles_of(params);
    for_each_tile(params, [&](auto const& coord) {
      mainloop.load(params.mainloop, pipeline, state, inputs, coord, KTile{0}, k_tiles, cutlass::canonical_lane_idx(),
                    cute::block_rank_in_cluster(), storage.tensors.mainloop);
      state.advance(k_tiles);
    });
    mainloop.load_tail(pipeline, state);
  }

  CUTLASS_DEVICE static void load_operands(Params const& params, SharedStorage& storage, LoadPipeline load_pipeline) {
    Epilogue epilogue(params.epilogue, storage.tensors.epilogue);
    if (!epilogue.is_producer_load_needed()) { return; }
    auto state = cutlass::make_producer_start_state<LoadPipeline>();
    for_each_tile(params, [&](auto const& coord) {
      for (int half = 0; half < kHalves; ++half) {
        state = epilogue.load(load_pipeline, state, params.problem_shape, HalfShape{}, half_of(coord, half), TiledMma{},
                              cutlass::canonical_lane_idx(), storage.tensors.epilogue);
      }
    });
    epilogue.load_tail(load_pipeline, state);
  }

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage, Pipeline pipeline,
                                     LoadPipeline load_pipeline) {
    using namespace cute;
    TileScheduler scheduler{params.scheduler};
    auto work = scheduler.get_current_work();
    if (!work.is_valid()) { return; }

    auto& smem = storage.tensors.mainloop;
    Tensor sA = make_tensor(make_smem_ptr(smem.smem_A.data()), typename Mainloop::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(smem.smem_B.data()), typename Mainloop::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    int const thread = threadIdx.x - cutlass::NumThreadsPerWarpGroup;
    int const warp_group = __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
    auto thread_mma = TiledMma{}.get_slice(warp_group * cutlass::NumThreadsPerWarpGroup);
    Tensor tCrA = thread_mma.make_fragment_A(thread_mma.partition_A(sA));  // (MMA,kHalves,kSteps,PIPE)
    Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));  // (MMA,MMA_N,kSteps,PIPE)
    static_assert(size<1>(tCrA) == kHalves && size<2>(tCrA) == kSteps);

    Half first, second;
    typename Mainloop::PipelineState ahead, behind, release;  // of the first half, of the second, of what both have read

    auto multiply = [&](int half, Half& accum, int step, int stage, bool is_first) {
      TiledMma mma;
      mma.accumulate_ = is_first ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < size<1>(tCrB); ++n) {
        cute::gemm(mma, tCrA(_, half, step, stage), tCrB(_, n, step, stage), accum(_, 0, n));
      }
    };
    auto release_next = [&] {
      pipeline.consumer_release(release);
      ++release;
    };
    // Chunk `chunk` of the lead with which the first half begins a tile.
    auto lead = [&](int chunk) {
      auto loaded = ahead;
      CUTLASS_PRAGMA_UNROLL
      for (int i = begin_of(chunk); i < begin_of(chunk + 1); ++i) {
        if (i % kSteps == 0) { pipeline.consumer_wait(loaded); }
        if (i % kSteps == kSteps - 1) { ++loaded; }
      }
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = begin_of(chunk); i < begin_of(chunk + 1); ++i) {
        multiply(0, first, i % kSteps, ahead.index(), i == 0);
        if (i % kSteps == kSteps - 1) { ++ahead; }
      }
      warpgroup_commit_batch();
    };
    // Chunk `chunk` of that by which the second half is behind at the end of a tile. Frees what the chunk before read.
    auto follow = [&](int chunk) {
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = begin_of(chunk); i < begin_of(chunk + 1); ++i) {
        multiply(1, second, i % kSteps, behind.index(), false);
        if (i % kSteps == kSteps - 1) { ++behind; }
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      CUTLASS_PRAGMA_UNROLL
      for (int i = chunk > 0 ? begin_of(chunk - 1) : 0; i < begin_of(chunk); ++i) {
        if (i % kSteps == kSteps - 1) { release_next(); }
      }
    };

    Epilogue epilogue(params.epilogue, storage.tensors.epilogue);
    typename StorePipeline::Params store_params;
    store_params.always_wait = true;
    StorePipeline store_pipeline(store_params);
    typename Epilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<StorePipeline>();
    auto store = [&](auto const& coord, Half const& accum, auto const& before_subtile) {
      MmaWithHook<TiledMma, remove_cvref_t<decltype(before_subtile)>> mma;
      mma.before_subtile = &before_subtile;
      auto [load_end, store_end] =
          epilogue.store(load_pipeline, load_state, store_pipeline, store_state, params.problem_shape, HalfShape{}, coord,
                         accum, mma, thread, storage.tensors.epilogue);
      load_state = load_end;
      store_state = store_end;
    };

    int const k_tiles = k_tiles_of(params);
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) { lead(chunk); }
    while (true) {
      // The second half catches up.
      warpgroup_fence_operand(second);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLead; ++i, ++behind) {
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kSteps; ++step) { multiply(1, second, step, behind.index(), i + step == 0); }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        if (i > 0) { release_next(); }
      }

      // Both halves. A k tile's WGMMAs queue behind those of the one before, which is freed when they have read it.
      for (int k_tile = 2 * kLead; k_tile < k_tiles; ++k_tile, ++ahead, ++behind) {
        pipeline.consumer_wait(ahead);
        warpgroup_fence_operand(first);
        warpgroup_fence_operand(second);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          multiply(0, first, step, ahead.index(), false);
          multiply(1, second, step, ahead.index(), false);
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        warpgroup_fence_operand(first);
        warpgroup_fence_operand(second);
        release_next();
      }

      // The first half runs ahead, and has its epilogue while the second follows.
      warpgroup_fence_operand(first);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLead; ++i, ++ahead) {
        pipeline.consumer_wait(ahead);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kSteps; ++step) { multiply(0, first, step, ahead.index(), false); }
        warpgroup_commit_batch();
        if (i == 0) {
          warpgroup_wait<1>();
          release_next();
        }
      }
      follow(0);
      warpgroup_fence_operand(first);
      auto coord = make_coord(work.M_idx, work.N_idx, _, work.L_idx);
      store(half_of(coord, 0), first, [&](int subtile) { follow(1 + subtile); });
      warpgroup_wait<0>();
      warpgroup_fence_operand(second);
      CUTLASS_PRAGMA_UNROLL
      for (int i = begin_of(kChunks - 1); i < begin_of(kChunks); ++i) {
        if (i % kSteps == kSteps - 1) { release_next(); }
      }

      scheduler.advance_to_next_work();
      work = scheduler.get_current_work();
      if (!work.is_valid()) {
        store(half_of(coord, 1), second, [](int) {});
        break;
      }
      warpgroup_fence_operand(first);
      lead(0);
      store(half_of(coord, 1), second, [&](int subtile) { lead(1 + subtile); });
      warpgroup_wait<0>();
      warpgroup_fence_operand(first);
    }
    epilogue.store_tail(load_pipeline, load_state, store_pipeline, store_state);
  }
};

}  // namespace gemmgen

namespace cutlass::epilogue::fusion {

template <class Visitor>
struct FusionCallbacksTraits<gemmgen::HookedVisitor<Visitor>> : FusionCallbacksTraits<Visitor> {
  using Callbacks = gemmgen::HookedVisitor<Visitor>;
};

}  // namespace cutlass::epilogue::fusion
