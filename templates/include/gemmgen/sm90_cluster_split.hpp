// A kernel layer for few tiles and a long K. The CTAs of a cluster share one tile: each accumulates its slice of K, and
// then finishes its share of the columns; or the first finishes all. Who finishes columns adds what all have summed of
// them, through distributed shared memory, in the order of the slices. No workspace, no counters to clear. Not
// persistent: small CTAs may share an SM, so that one loads while another stores.
#pragma once
#include <type_traits>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/grid_dependency_control.h>
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

// Arrives at a barrier of CTA `rank`, at the address that `barrier` has in this CTA; whoever waits for it in the
// cluster sees what was written before.
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

// What the epilogue reads beside tiles: a vector along the kernel's M or N, or one number for each batch.
struct EpilogueVector {
  enum Along { kM = 0, kN = 1, kNothing = 2 };
  void const* ptr;  // null where a number is an argument
  int64_t batch_stride;
  size_t element_bytes;
  Along along;
};

// `Mainloop` and `Epilogue` are collectives of one warpgroup and of clusters of one CTA, the second of a CTA's share of
// a tile; it reads so many `Vectors`.
template <class Mainloop, class Epilogue, int Splits, int Vectors>
struct ClusterSplitKernel {
  using ProblemShape = cute::Shape<int, int, int, int>;  // (M,N,K,L)
  using TileShape = typename Mainloop::TileShape;
  using ShareShape = typename Epilogue::CtaTileMNK;
  using TiledMma = typename Mainloop::TiledMma;
  using Accum = typename Mainloop::ElementAccumulator;
  // Every CTA frees its stages in all CTAs of the cluster, as if they had shared what they loaded: CUTLASS's pipeline
  // knows no other clusters. So all slices have the same number of k tiles.
  using PipelineCluster = cute::Shape<cute::Int<Splits>, cute::_1, cute::_1>;

  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kTileK = cute::size<2>(TileShape{});
  static constexpr int kShareN = cute::size<1>(ShareShape{});
  static constexpr int kFinishers = kTileN / kShareN;  // the first CTAs of the cluster
  static constexpr int kConsumers = cute::size(TiledMma{});
  static constexpr int kAccums = kTileM * kShareN / kConsumers;  // of one thread and share
  static constexpr int kVector = 4;                              // accumulators that one access moves
  static constexpr int kUnrolledSlices = kAccums <= 16 ? Splits : 1;
  static_assert(kConsumers == cutlass::NumThreadsPerWarpGroup && kAccums % kVector == 0 && sizeof(Accum) == 4);
  static_assert(kFinishers * kShareN == kTileN && (kFinishers == 1 || (kFinishers == Splits && kTileM == 64)));

  // The accumulators of a thread: of a tile, and of a share, which are those of a narrower WGMMA.
  using Accums = decltype(cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(TileShape{})));
  using NarrowAccums = cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<kShareN / 8>>, cute::_1, cute::_1>;
  using Share = cute::conditional_t<kFinishers == 1, Accums, decltype(cute::make_tensor<Accum>(NarrowAccums{}))>;

  struct SharedStorage {
    typename Mainloop::TensorStorage mainloop;  // after the mainloop: partial sums
    typename Epilogue::TensorStorage epilogue;
    alignas(16) typename Mainloop::PipelineStorage mainloop_pipeline;
    alignas(16) typename Epilogue::PipelineStorage epilogue_pipeline;
    uint64_t sums_ready;  // of a CTA that finishes a share: each consumer of the others arrives with its sums written
  };
  static_assert(Splits == 1 || sizeof(typename Mainloop::TensorStorage) >= kTileM * kTileN * sizeof(Accum));

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
    cute::array<EpilogueVector, Vectors> vectors = {};
  };

  struct Params {
    ProblemShape problem_shape;
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
    cute::array<EpilogueVector, Vectors> vectors;
  };

  static Params to_underlying_arguments(Arguments const& args, void* workspace) {
    return {args.problem_shape, Mainloop::to_underlying_arguments(args.problem_shape, args.mainloop, workspace),
            Epilogue::to_underlying_arguments(args.problem_shape, args.epilogue, workspace), args.vectors};
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
    bool const is_finisher = rank < kFinishers;
    // neighbours share the tiles of A
    auto coord = cute::make_coord(tile / tiles_n % tiles_m, tile % tiles_n, cute::_, tile / tiles_n / tiles_m);
    auto share = cute::make_coord(cute::get<0>(coord), cute::get<1>(coord) * kFinishers + rank, cute::_,
                                  cute::get<3>(coord));
    int const k_tiles = cute::ceil_div(cute::ceil_div(K, int{kTileK}), Splits);

    Mainloop mainloop;
    Epilogue epilogue(params.epilogue, storage.epilogue);
    if (is_producer) {
      int const lane = cutlass::canonical_lane_idx();
      cutlass::arch::wait_on_dependent_grids();
      auto inputs = mainloop.load_init(params.problem_shape, params.mainloop);
      mainloop.load(params.mainloop, pipeline, cutlass::make_producer_start_state<Pipeline>(), inputs, coord,
                    KTile{rank * k_tiles}, k_tiles, lane, 0, storage.mainloop);
      __syncwarp();
      if constexpr (Splits > 1) { cluster_arrive(); }
      if (is_finisher && epilogue.is_producer_load_needed()) {
        auto state = epilogue.load(load_pipeline, cutlass::make_producer_start_state<LoadPipeline>(),
                                   params.problem_shape, ShareShape{}, share, TiledMma{}, lane, storage.epilogue);
        epilogue.load_tail(load_pipeline, state);
        __syncwarp();
      }
    } else {
      if (is_finisher) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Vectors; ++i) { prefetch(params.vectors[i], params.problem_shape, share); }
      }
      Accums accum;
      typename Mainloop::PipelineState state;
      mainloop.mma(pipeline, state, accum, k_tiles, threadIdx.x, storage.mainloop, params.mainloop);
      mainloop.mma_tail(pipeline, state, k_tiles);
      cutlass::arch::launch_dependent_grids();
      if constexpr (Splits > 1) {
        auto sums = sums_of_share(accum, rank, storage);
        if (is_finisher) { store(epilogue, load_pipeline, params, share, sums, storage); }
      } else {
        store(epilogue, load_pipeline, params, share, accum, storage);
      }
      __syncwarp();
    }
    if constexpr (Splits > 1) { cluster_wait(); }  // nobody reads another's shared memory any more
  }

 private:
  // From memory to L2 what the epilogue needs of `vector`: it asks for it when there is nothing else left to do.
  template <class Coord>
  CUTLASS_DEVICE static void prefetch(EpilogueVector const& vector, ProblemShape const& shape, Coord const& share) {
    constexpr int kSectorBytes = 32;
    int first = 0, elements = 1;
    if (vector.along == EpilogueVector::kM) {
      first = cute::get<0>(share) * kTileM;
      elements = cute::min(int{kTileM}, cute::get<0>(shape) - first);
    } else if (vector.along == EpilogueVector::kN) {
      first = cute::get<1>(share) * kShareN;
      elements = cute::min(int{kShareN}, cute::get<1>(shape) - first);
    }
    int const offset = threadIdx.x * kSectorBytes;
    if (vector.ptr != nullptr && offset < elements * int(vector.element_bytes)) {
      int64_t const element = cute::get<3>(share) * vector.batch_stride + first;
      auto const* start = static_cast<char const*>(vector.ptr) + element * int64_t(vector.element_bytes);
      asm volatile("prefetch.global.L2 [%0];" ::"l"(start + offset));
    }
  }

  // This CTA's share with the sums of all slices; of no use where it finishes none. Ends with the arrival at the
  // cluster's last barrier.
  CUTLASS_DEVICE static Share sums_of_share(Accums const& accum, int rank, SharedStorage& storage) {
    constexpr int kVectors = kAccums / kVector;  // of a share
    auto* partials = reinterpret_cast<uint4*>(&storage.mainloop) + threadIdx.x;  // (consumer,vector,share)
    if (kFinishers > 1 || rank != 0) {
      // every warp's WGMMAs have read what is overwritten here
      cutlass::arch::NamedBarrier::sync(kConsumers, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    }
    Share own, sums;
    CUTLASS_PRAGMA_UNROLL
    for (int share = 0; share < kFinishers; ++share) {
      if (share == rank) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccums; ++i) { own(i) = accum(share * kAccums + i); }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          partials[(share * kVectors + i) * kConsumers] = vector_of(accum, share * kAccums + i * kVector);
        }
        arrive_at_rank(&storage.sums_ready, share);
      }
    }
    if (rank < kFinishers) {
      cute::clear(sums);
      wait_for_cluster(&storage.sums_ready);
#pragma unroll kUnrolledSlices
      for (int slice = 0; slice < Splits; ++slice) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          auto const* there = partials + (rank * kVectors + i) * kConsumers;
          uint4 const part = slice == rank ? vector_of(own, i * kVector)
                                           : load_from_rank(cute::cast_smem_ptr_to_uint(there), slice);
          sums(i * kVector) += of_bits(part.x);
          sums(i * kVector + 1) += of_bits(part.y);
          sums(i * kVector + 2) += of_bits(part.z);
          sums(i * kVector + 3) += of_bits(part.w);
        }
      }
    }
    __syncwarp();
    cluster_arrive();
    return sums;
  }

  template <class Coord>
  CUTLASS_DEVICE static void store(Epilogue& epilogue, typename Epilogue::LoadPipeline load_pipeline,
                                   Params const& params, Coord const& share, Share const& sums,
                                   SharedStorage& storage) {
    typename Epilogue::StorePipeline::Params store_params;
    store_params.always_wait = true;
    typename Epilogue::StorePipeline store_pipeline(store_params);
    typename Epilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<typename Epilogue::StorePipeline>();
    auto [load_end, store_end] =
        epilogue.store(load_pipeline, load_state, store_pipeline, store_state, params.problem_shape, ShareShape{},
                       share, sums, TiledMma{}, threadIdx.x, storage.epilogue);
    epilogue.store_tail(load_pipeline, load_end, store_pipeline, store_end);
  }

  template <class Accumulators>
  CUTLASS_DEVICE static uint4 vector_of(Accumulators const& accum, int first) {
    return {bits(accum(first)), bits(accum(first + 1)), bits(accum(first + 2)), bits(accum(first + 3))};
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
