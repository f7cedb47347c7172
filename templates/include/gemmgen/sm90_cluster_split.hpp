// A kernel layer for few tiles and a long K. The CTAs of a cluster share one tile: each accumulates its slice of K, and
// the first adds the sums of the others through distributed shared memory, always in the same order. No workspace, no
// counters to clear. Not persistent: small CTAs may share an SM, so that one loads while another stores.
#pragma once
#include <type_traits>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/cuda_host_adapter.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/gemm_enumerated_types.h>
#include <cutlass/kernel_hardware_info.hpp>
#include <cutlass/pipeline/pipeline.hpp>

namespace gemmgen {

// Barriers over all threads of a cluster of several CTAs; what was written before an arrival is seen after the wait. In
// a cluster of one the compiler takes barriers of the CTA, which nobody may pass by in between.
CUTLASS_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
CUTLASS_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Arrives at a barrier of CTA `rank`, at the address that `barrier` has in this CTA; whoever waits for it in the cluster
// sees what was written before.
CUTLASS_DEVICE void arrive_at_rank(uint64_t const* barrier, uint32_t rank) {
  uint32_t address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), rank);
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// Waits for the first phase of a barrier of this CTA.
CUTLASS_DEVICE void wait_for_cluster(uint64_t const* barrier) {
  for (uint32_t done = 0; done == 0;) {
    asm volatile(
        "{ .reg .pred done;"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;"
        "  selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(cute::cast_smem_ptr_to_uint(barrier))
        : "memory");
  }
}

// 16 bytes of the shared memory of CTA `rank`, at the address that `address` has in this CTA.
CUTLASS_DEVICE uint4 load_from_rank(uint32_t address, uint32_t rank) {
  uint4 y;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
               : "r"(cute::set_block_rank(address, rank))
               : "memory");
  return y;
}

// Counts the k tiles of a slice. Those beyond K load zeros.
struct KTile {
  int index;
  CUTLASS_DEVICE int operator*() const { return index; }
  CUTLASS_DEVICE KTile& operator++() {
    ++index;
    return *this;
  }
};

// `Mainloop` and `Epilogue` are collectives of one warpgroup and of clusters of one CTA.
template <class Mainloop, class Epilogue, int Splits>
struct ClusterSplitKernel {
  using ProblemShape = cute::Shape<int, int, int, int>;  // (M,N,K,L)
  using TileShape = typename Mainloop::TileShape;
  using TiledMma = typename Mainloop::TiledMma;
  using Accum = typename Mainloop::ElementAccumulator;
  // Every CTA frees its stages in all CTAs of the cluster, as if they had shared what they loaded: CUTLASS's pipeline
  // knows no other clusters. So all slices have the same number of k tiles.
  using PipelineCluster = cute::Shape<cute::Int<Splits>, cute::_1, cute::_1>;

  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});
  static constexpr int kConsumers = cute::size(TiledMma{});
  static constexpr int kAccums = kTileM * kTileN / kConsumers;  // of one thread
  static constexpr int kVector = 4;                             // accumulators that one access moves
  static constexpr int kUnrolledSlices = kAccums <= 16 ? Splits : 1;
  static_assert(kConsumers == cutlass::NumThreadsPerWarpGroup && kAccums % kVector == 0 && sizeof(Accum) == 4);

  struct SharedStorage {
    typename Mainloop::TensorStorage mainloop;  // after the mainloop: partial sums
    typename Epilogue::TensorStorage epilogue;
    alignas(16) typename Mainloop::PipelineStorage mainloop_pipeline;
    alignas(16) typename Epilogue::PipelineStorage epilogue_pipeline;
    uint64_t sums_ready;  // in the first CTA: each consumer of the others arrives when its sums are written
  };
  static_assert(sizeof(typename Mainloop::TensorStorage) >= kTileM * kTileN * sizeof(Accum));

  static constexpr int SharedStorageSize = sizeof(SharedStorage);
  static constexpr int kSmBytes = 228 * 1024, kReservedBytes = 1024;  // shared memory of an SM, and what a CTA costs
  static constexpr uint32_t MaxThreadsPerBlock = kConsumers + cutlass::NumThreadsPerWarp;
  static constexpr uint32_t MinBlocksPerMultiprocessor = 2 * (SharedStorageSize + kReservedBytes) <= kSmBytes ? 2 : 1;

  struct Arguments {
    cutlass::gemm::GemmUniversalMode mode;
    ProblemShape problem_shape;
    typename Mainloop::Arguments mainloop;
    typename Epilogue::Arguments epilogue;
    cutlass::KernelHardwareInfo hardware;
  };

  struct Params {
    ProblemShape problem_shape;
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
  };

  static Params to_underlying_arguments(Arguments const& args, void* workspace) {
    return {args.problem_shape, Mainloop::to_underlying_arguments(args.problem_shape, args.mainloop, workspace),
            Epilogue::to_underlying_arguments(args.problem_shape, args.epilogue, workspace)};
  }
  static size_t get_workspace_size(Arguments const&) { return 0; }
  static cutlass::Status initialize_workspace(Arguments const&, void*, cudaStream_t, cutlass::CudaHostAdapter*) {
    return cutlass::Status::kSuccess;
  }
  static dim3 get_block_shape() { return dim3(MaxThreadsPerBlock, 1, 1); }
  static dim3 get_grid_shape(Params const& params) {
    auto [M, N, K, L] = params.problem_shape;
    return dim3(Splits * cute::ceil_div(M, int{kTileM}) * cute::ceil_div(N, int{kTileN}) * L, 1, 1);
  }

  CUTLASS_DEVICE void operator()(Params const& params, char* smem) {
    auto& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const warp = cutlass::canonical_warp_idx_sync();
    bool const is_producer = warp == kConsumers / cutlass::NumThreadsPerWarp;
    if (warp == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue);
      if constexpr (Splits > 1) {
        cutlass::arch::ClusterBarrier::init(&storage.sums_ready, (Splits - 1) * kConsumers);
        cutlass::arch::fence_barrier_init();
      }
    }

    using Pipeline = typename Mainloop::MainloopPipeline;
    typename Pipeline::Params pipeline_params;
    pipeline_params.role = is_producer ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
    pipeline_params.is_leader = is_producer;  // one elected thread of that warp does everything
    pipeline_params.num_consumers = kConsumers;
    pipeline_params.transaction_bytes = params.mainloop.tma_transaction_bytes;
    Pipeline pipeline(storage.mainloop_pipeline, pipeline_params, PipelineCluster{});

    using LoadPipeline = typename Epilogue::LoadPipeline;
    typename LoadPipeline::Params load_params;
    load_params.role = is_producer ? LoadPipeline::ThreadCategory::Producer : LoadPipeline::ThreadCategory::Consumer;
    load_params.dst_blockid = cute::block_rank_in_cluster();
    load_params.producer_arv_count = cutlass::NumThreadsPerWarp;
    load_params.consumer_arv_count = kConsumers;
    if constexpr (Epilogue::RequiresTransactionBytes) {
      load_params.transaction_bytes = params.epilogue.tma_transaction_bytes;
    }
    LoadPipeline load_pipeline(storage.epilogue_pipeline, load_params);

    __syncthreads();  // the barriers are ready; racecheck does not see that from the cluster's barrier
    if constexpr (Splits > 1) {
      cluster_arrive();
      cluster_wait();
    }

    auto [M, N, K, L] = params.problem_shape;
    int const tiles_m = cute::ceil_div(M, int{kTileM}), tiles_n = cute::ceil_div(N, int{kTileN});
    int const tile = blockIdx.x / Splits, rank = blockIdx.x % Splits;
    // neighbours share the tiles of A
    auto coord = cute::make_coord(tile / tiles_n % tiles_m, tile % tiles_n, cute::_, tile / tiles_n / tiles_m);
    int const k_tiles = cute::ceil_div(cute::ceil_div(K, int{kTileK}), Splits);

    Mainloop mainloop;
    Epilogue epilogue(params.epilogue, storage.epilogue);
    if (is_producer) {
      int const lane = cutlass::canonical_lane_idx();
      auto inputs = mainloop.load_init(params.problem_shape, params.mainloop);
      mainloop.load(params.mainloop, pipeline, cutlass::make_producer_start_state<Pipeline>(), inputs, coord,
                    KTile{rank * k_tiles}, k_tiles, lane, 0, storage.mainloop);
      __syncwarp();
      if constexpr (Splits > 1) { cluster_arrive(); }
      if (rank == 0 && epilogue.is_producer_load_needed()) {
        auto state = epilogue.load(load_pipeline, cutlass::make_producer_start_state<LoadPipeline>(),
                                   params.problem_shape, TileShape{}, coord, TiledMma{}, lane, storage.epilogue);
        epilogue.load_tail(load_pipeline, state);
        __syncwarp();
      }
    } else {
      cute::Tensor accum = cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(TileShape{}));
      typename Mainloop::PipelineState state;
      mainloop.mma(pipeline, state, accum, k_tiles, threadIdx.x, storage.mainloop, params.mainloop);
      mainloop.mma_tail(pipeline, state, k_tiles);
      if constexpr (Splits > 1) { add_slices(accum, rank, storage); }
      if (rank == 0) { store(epilogue, load_pipeline, params, coord, accum, storage); }
      __syncwarp();
    }
    if constexpr (Splits > 1) { cluster_wait(); }  // nobody reads another's shared memory any more
  }

 private:
  // Adds the sums of all slices in the first CTA. Ends with the arrival at the cluster's last barrier.
  template <class Accumulators>
  CUTLASS_DEVICE static void add_slices(Accumulators& accum, int rank, SharedStorage& storage) {
    auto* partials = reinterpret_cast<uint4*>(&storage.mainloop) + threadIdx.x;
    if (rank != 0) {
      // every warp's WGMMAs have read what is overwritten here
      cutlass::arch::NamedBarrier::sync(kConsumers, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccums; i += kVector) {
        partials[i / kVector * kConsumers] = {bits(accum(i)), bits(accum(i + 1)), bits(accum(i + 2)),
                                              bits(accum(i + 3))};
      }
      arrive_at_rank(&storage.sums_ready, 0);
    } else {
      wait_for_cluster(&storage.sums_ready);
#pragma unroll kUnrolledSlices
      for (int other = 1; other < Splits; ++other) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccums; i += kVector) {
          uint4 sums = load_from_rank(cute::cast_smem_ptr_to_uint(partials + i / kVector * kConsumers), other);
          accum(i) += of_bits(sums.x);
          accum(i + 1) += of_bits(sums.y);
          accum(i + 2) += of_bits(sums.z);
          accum(i + 3) += of_bits(sums.w);
        }
      }
    }
    __syncwarp();
    cluster_arrive();
  }

  template <class Coord, class Accumulators>
  CUTLASS_DEVICE static void store(Epilogue& epilogue, typename Epilogue::LoadPipeline load_pipeline,
                                   Params const& params, Coord const& coord, Accumulators const& accum,
                                   SharedStorage& storage) {
    typename Epilogue::StorePipeline::Params store_params;
    store_params.always_wait = true;
    typename Epilogue::StorePipeline store_pipeline(store_params);
    typename Epilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<typename Epilogue::StorePipeline>();
    auto [load_end, store_end] =
        epilogue.store(load_pipeline, load_state, store_pipeline, store_state, params.problem_shape, TileShape{}, coord,
                       accum, TiledMma{}, threadIdx.x, storage.epilogue);
    epilogue.store_tail(load_pipeline, load_end, store_pipeline, store_end);
  }

  CUTLASS_DEVICE static uint32_t bits(Accum x) {
    if constexpr (std::is_same_v<Accum, float>) {
      return __float_as_uint(x);
    } else {
      return static_cast<uint32_t>(x);
    }
  }
  CUTLASS_DEVICE static Accum of_bits(uint32_t x) {
    if constexpr (std::is_same_v<Accum, float>) {
      return __uint_as_float(x);
    } else {
      return static_cast<Accum>(x);
    }
  }
};

}  // namespace gemmgen
