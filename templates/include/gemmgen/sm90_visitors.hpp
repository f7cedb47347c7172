// Epilogue visitors that CUTLASS does not have. Tensor names and shape comments follow CUTLASS: tC* is a thread's part
// of the CTA tile, (CPY,CPY_M,CPY_N,EPI_M,EPI_N).
#pragma once
#include <utility>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/fusion/callbacks.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_store_tma_warpspecialized.hpp>

#include "gemmgen/functor.hpp"

namespace gemmgen {

namespace evt = cutlass::epilogue::fusion::detail;

struct NoStorage {};

// What our nodes have in common: no workspace, no TMA loads, and Arguments that are their Params.
template <class Params_, class SharedStorage_ = NoStorage>
struct Node {
  using SharedStorage = SharedStorage_;
  using Arguments = Params_;
  using Params = Params_;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) { return args; }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) { return true; }

  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) { return 0; }

  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE Node() {}
  CUTLASS_HOST_DEVICE Node(Params const& params, SharedStorage const& storage)
      : params(&params), storage(const_cast<SharedStorage*>(&storage)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  template <class... Ts>
  CUTLASS_DEVICE auto get_producer_load_callbacks(evt::ProducerLoadArgs<Ts...> const&) {
    return evt::EmptyProducerLoadCallbacks{};
  }

  Params const* params = nullptr;
  SharedStorage* storage = nullptr;
};

using TileStride = cute::Stride<int64_t, cute::_1, int64_t>;  // (M,N,L), row-major

template <class Element>
constexpr int kTmaElements = 128 / cutlass::sizeof_bits<Element>::value;
template <>
inline constexpr int kTmaElements<void> = 1;

// A row vector [N] and a column vector [M], of any alignment.
template <class Epi, class Element>
using RowLoad = cutlass::epilogue::fusion::Sm90RowBroadcast<0, typename Epi::TileShape, Element, float,
                                                            cute::Stride<cute::_0, cute::_1, int64_t>, 1, false>;
template <class Epi, class Element>
using ColLoad = cutlass::epilogue::fusion::Sm90ColBroadcast<0, typename Epi::TileShape, Element, float,
                                                            cute::Stride<cute::_1, cute::_0, int64_t>, 1, false>;

// One number per batch: `ptr[l * batch_stride]`, or `value` where `ptr` is null.
template <class Element>
struct ScalarParams {
  Element const* ptr = nullptr;
  int64_t batch_stride = 0;
  float value = 0;
};

template <class Element>
struct ScalarLoad : Node<ScalarParams<Element>> {
  using Node<ScalarParams<Element>>::Node;

  struct Callbacks : evt::EmptyConsumerStoreCallbacks {
    float value;

    CUTLASS_DEVICE explicit Callbacks(float value) : value(value) {}

    template <class Accum, int N>
    CUTLASS_DEVICE cutlass::Array<float, N> visit(cutlass::Array<Accum, N> const&, int, int, int) {
      cutlass::Array<float, N> fragment;
      fragment.fill(value);
      return fragment;
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const& args) {
    auto const& scalar = *this->params;
    if (scalar.ptr == nullptr) { return Callbacks(scalar.value); }
    int64_t l = cute::get<3>(args.tile_coord_mnkl);
    return Callbacks(cutlass::NumericConverter<float, Element>{}(scalar.ptr[l * scalar.batch_stride]));
  }
};

// A vector along M (Mode 0) or N (Mode 1), or one number for each batch, in shared memory before a tile is finished:
// the warp that loads for the epilogue brings what the CTA tile needs of it, as fp32.
template <class Element>
struct VectorParams {
  Element const* ptr = nullptr;
  int64_t batch_stride = 0;
};

template <class Epi, int Mode, class Element>
struct StagedVector : Node<VectorParams<Element>, cute::array_aligned<float, cute::size<Mode>(typename Epi::TileShape{})>> {
  using TileShape = typename Epi::TileShape;
  static constexpr int kTile = cute::size<Mode>(TileShape{});
  using SharedStorage = cute::array_aligned<float, kTile>;
  using Node<VectorParams<Element>, SharedStorage>::Node;

  CUTLASS_DEVICE bool is_producer_load_needed() const { return true; }

  struct ProducerCallbacks : evt::EmptyProducerLoadCallbacks {
    Element const* gmem;
    int count;
    float* smem;
    int lane;

    CUTLASS_DEVICE ProducerCallbacks(Element const* gmem, int count, float* smem, int lane)
        : gmem(gmem), count(count), smem(smem), lane(lane) {}

    CUTLASS_DEVICE void step(uint64_t*, int, int, int, bool) {
      constexpr int kEach = cute::ceil_div(kTile, cutlass::NumThreadsPerWarp);
      Element values[kEach];  // all on their way before the first is stored
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const at = i * cutlass::NumThreadsPerWarp + lane;
        values[i] = at < count ? gmem[at] : Element(0);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const at = i * cutlass::NumThreadsPerWarp + lane;
        if (at < kTile) { smem[at] = cutlass::NumericConverter<float, Element>{}(values[i]); }
      }
    }
  };

  template <class... Ts>
  CUTLASS_DEVICE auto get_producer_load_callbacks(evt::ProducerLoadArgs<Ts...> const& args) {
    int const first = int(cute::get<Mode>(args.tile_coord_mnkl)) * kTile;
    int64_t const l = cute::get<3>(args.tile_coord_mnkl);
    int const count = int(cute::get<Mode>(args.problem_shape_mnkl)) - first;
    return ProducerCallbacks(this->params->ptr + l * this->params->batch_stride + first, count, this->storage->data(),
                             args.thread_idx);
  }

  template <class Smem>
  struct Callbacks : evt::EmptyConsumerStoreCallbacks {
    using Registers = decltype(cute::make_tensor_like<float>(cute::take<0, 3>(Smem{}.layout())));

    Smem tCsVector;  // (CPY,CPY_M,CPY_N,EPI_M,EPI_N)
    Registers tCrVector;

    CUTLASS_DEVICE explicit Callbacks(Smem const& tCsVector) : tCsVector(tCsVector) {}

    CUTLASS_DEVICE void previsit(int epi_m, int epi_n, int, bool) {
      cute::copy_aligned(cute::filter_zeros(tCsVector(cute::_, cute::_, cute::_, epi_m, epi_n)),
                         cute::filter_zeros(tCrVector));
    }

    template <class Accum, int N>
    CUTLASS_DEVICE cutlass::Array<float, N> visit(cutlass::Array<Accum, N> const&, int epi_v, int, int) {
      cutlass::Array<float, N> fragment;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) { fragment[i] = tCrVector(epi_v * N + i); }
      return fragment;
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const& args) {
    using Stride = cute::Stride<cute::Int<Mode == 0>, cute::Int<Mode == 1>>;
    cute::Tensor sVector = cute::make_tensor(cute::make_smem_ptr(this->storage->data()),
                                             cute::make_layout(cute::take<0, 2>(TileShape{}), Stride{}));
    cute::Tensor tCsVector =
        evt::sm90_partition_for_epilogue<ReferenceSrc>(sVector, args.epi_tile, args.tiled_copy, args.thread_idx);
    return Callbacks<decltype(tCsVector)>(tCsVector);
  }
};

template <class Element>
struct StagedScalar : Node<ScalarParams<Element>, cute::array<float, 1>> {
  using Node<ScalarParams<Element>, cute::array<float, 1>>::Node;

  CUTLASS_DEVICE bool is_producer_load_needed() const { return true; }

  struct ProducerCallbacks : evt::EmptyProducerLoadCallbacks {
    ScalarParams<Element> const& scalar;
    int64_t l;
    float* smem;
    int lane;

    CUTLASS_DEVICE ProducerCallbacks(ScalarParams<Element> const& scalar, int64_t l, float* smem, int lane)
        : scalar(scalar), l(l), smem(smem), lane(lane) {}

    CUTLASS_DEVICE void step(uint64_t*, int, int, int, bool) {
      if (lane != 0) { return; }
      *smem = scalar.ptr == nullptr ? scalar.value
                                    : cutlass::NumericConverter<float, Element>{}(scalar.ptr[l * scalar.batch_stride]);
    }
  };

  template <class... Ts>
  CUTLASS_DEVICE auto get_producer_load_callbacks(evt::ProducerLoadArgs<Ts...> const& args) {
    return ProducerCallbacks(*this->params, cute::get<3>(args.tile_coord_mnkl), this->storage->data(), args.thread_idx);
  }

  struct Callbacks : evt::EmptyConsumerStoreCallbacks {
    float const* smem;
    float value = 0;

    CUTLASS_DEVICE explicit Callbacks(float const* smem) : smem(smem) {}

    CUTLASS_DEVICE void previsit(int, int, int, bool) { value = *smem; }

    template <class Accum, int N>
    CUTLASS_DEVICE cutlass::Array<float, N> visit(cutlass::Array<Accum, N> const&, int, int, int) {
      cutlass::Array<float, N> fragment;
      fragment.fill(value);
      return fragment;
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const&) {
    return Callbacks(this->storage->data());
  }
};

struct NoParams {};

// The row (Mode 0) or column (Mode 1) number of each element of D.
template <int Mode>
struct IndexLoad : Node<NoParams> {
  using Node<NoParams>::Node;

  template <class Coords>
  struct Callbacks : evt::EmptyConsumerStoreCallbacks {
    Coords tCcD;  // coordinates relative to the thread's first element
    int first;    // coordinate of the thread's first element

    CUTLASS_DEVICE Callbacks(Coords const& tCcD, int first) : tCcD(tCcD), first(first) {}

    template <class Accum, int N>
    CUTLASS_DEVICE cutlass::Array<int, N> visit(cutlass::Array<Accum, N> const&, int epi_v, int epi_m, int epi_n) {
      cute::Tensor coords = tCcD(cute::_, cute::_, cute::_, epi_m, epi_n);
      cutlass::Array<int, N> fragment;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) { fragment[i] = first + int(cute::get<Mode>(coords(epi_v * N + i))); }
      return fragment;
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const& args) {
    int first = cute::get<Mode>(args.problem_shape_mnkl) - cute::get<Mode>(args.residue_tCcD);
    return Callbacks<decltype(args.tCcD)>(args.tCcD, first);
  }
};

// Reduction operators. As in torch, a NaN wins over every number in max and min.
struct Sum {
  CUTLASS_DEVICE static float identity() { return 0.f; }
  CUTLASS_DEVICE static float reduce(float a, float b) { return a + b; }
};

struct Max {
  CUTLASS_DEVICE static float identity() { return __int_as_float(0xff800000); }
  CUTLASS_DEVICE static float reduce(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
};

struct Min {
  CUTLASS_DEVICE static float identity() { return __int_as_float(0x7f800000); }
  CUTLASS_DEVICE static float reduce(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
};

// Partials of a reduction: one vector per CTA tile along the reduced mode, `tile_stride` apart.
struct PartialsParams {
  float* ptr = nullptr;
  int64_t tile_stride = 0;
  int64_t batch_stride = 0;
};

// In the accumulators of a WGMMA, a warp's lanes 4i..4i+3 hold the rows i and i + 8 of 16, each lane other columns.
constexpr int kLanesPerRow = 4;
constexpr int kRowsPerWarp = 8;

// Reduces M within the CTA tile: partials [L, P, N], P = ceil(M / TileM). `Warps` share one epilogue subtile.
template <class Op, class TileShape, int Warps>
struct RowReduction
    : Node<PartialsParams, cute::array<float, Warps * decltype(cute::size<1>(TileShape{}))::value>> {
  static constexpr int TileM = cute::size<0>(TileShape{});
  static constexpr int TileN = cute::size<1>(TileShape{});
  using SharedStorage = cute::array<float, Warps * TileN>;
  using Node<PartialsParams, SharedStorage>::Node;

  template <class WarpPartials, class Coords>
  struct Callbacks : evt::EmptyConsumerStoreCallbacks {
    using Registers = decltype(cute::make_tensor_like<float>(cute::take<0, 3>(WarpPartials{}.layout())));

    WarpPartials tCsRow;  // stride 0 along M
    Registers tCrRow;     // the same for one column of subtiles
    Coords tCcD;
    int rows_left;        // in-range rows from the thread's first
    float* smem;
    float* gmem;          // the partials of this CTA tile, or null outside the problem
    int columns;          // in-range columns of the CTA tile
    int thread;

    CUTLASS_DEVICE Callbacks(WarpPartials const& tCsRow, Coords const& tCcD, int rows_left, float* smem, float* gmem,
                             int columns, int thread)
        : tCsRow(tCsRow), tCcD(tCcD), rows_left(rows_left), smem(smem), gmem(gmem), columns(columns), thread(thread) {}

    // Reduces over the rows of a warp. Each step halves the lanes that share a value, and where it can also the values
    // of a lane: one half of the lanes keeps one half. Returns which value the lane's first one is.
    template <int kHalf, int kCount, class Values>
    CUTLASS_DEVICE static int exchange(Values& values, int row) {
      if constexpr (kHalf == 0) {
        return 0;
      } else if constexpr (kCount % 2 == 0) {
        bool upper = row & kHalf;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kCount / 2; ++j) {
          float keep = upper ? values(j + kCount / 2) : values(j);
          float send = upper ? values(j) : values(j + kCount / 2);
          values(j) = Op::reduce(keep, __shfl_xor_sync(0xffffffff, send, kHalf * kLanesPerRow));
        }
        return (upper ? kCount / 2 : 0) + exchange<kHalf / 2, kCount / 2>(values, row);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kCount; ++j) {
          values(j) = Op::reduce(values(j), __shfl_xor_sync(0xffffffff, values(j), kHalf * kLanesPerRow));
        }
        return exchange<kHalf / 2, kCount>(values, row);
      }
    }

    // How many of `count` values `exchange` leaves to a lane.
    static constexpr int kept(int count) {
      for (int half = kRowsPerWarp / 2; half > 0; half /= 2) { count = count % 2 == 0 ? count / 2 : count; }
      return count;
    }

    // The previous tile's `end` must have read the partials in shared memory before this tile writes its own.
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    CUTLASS_DEVICE void begin_loop(int epi_m, int) {
      if (epi_m == 0) { cute::fill(tCrRow, Op::identity()); }
    }

    template <class Accum, int N>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accum, N> const&, int epi_v, int epi_m, int epi_n,
                              cutlass::Array<float, N> const& values) {
      cute::Tensor coords = tCcD(cute::_, cute::_, cute::_, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        int v = epi_v * N + i;
        if (cute::get<0>(coords(v)) < rows_left) { tCrRow(v) = Op::reduce(tCrRow(v), values[i]); }
      }
      return values;
    }

    template <class STensor, class SyncFn, class VTensor>
    CUTLASS_DEVICE void reduce(STensor&&, SyncFn const&, int epi_m, int epi_n, bool, VTensor) {
      if (epi_m != cute::size<3>(tCsRow) - 1) { return; }
      cute::Tensor values = cute::filter_zeros(tCrRow);
      cute::Tensor partials = cute::filter_zeros(tCsRow(cute::_, cute::_, cute::_, epi_m, epi_n));
      int row = (thread % cutlass::NumThreadsPerWarp) / kLanesPerRow;
      constexpr int kValues = decltype(cute::size(values))::value;
      int first = exchange<kRowsPerWarp / 2, kValues>(values, row);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kept(kValues); ++j) { partials(first + j) = values(j); }
    }

    // The collective has synchronized since the last `reduce`.
    CUTLASS_DEVICE void end() {
      if (gmem == nullptr) { return; }
      for (int n = thread; n < columns; n += Warps * cutlass::NumThreadsPerWarp) {
        float total = smem[n];
        CUTLASS_PRAGMA_UNROLL
        for (int warp = 1; warp < Warps; ++warp) { total = Op::reduce(total, smem[warp * TileN + n]); }
        gmem[n] = total;
      }
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const& args) {
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    float* smem = this->storage->data();
    float* warp_smem = smem + args.thread_idx / cutlass::NumThreadsPerWarp * TileN;
    cute::Tensor sRow =
        cute::make_tensor(cute::make_smem_ptr(warp_smem),
                          cute::make_layout(cute::take<0, 2>(TileShape{}), cute::Stride<cute::_0, cute::_1>{}));
    cute::Tensor tCsRow =
        evt::sm90_partition_for_epilogue<ReferenceSrc>(sRow, args.epi_tile, args.tiled_copy, args.thread_idx);
    auto const& p = *this->params;
    float* gmem = m * TileM < M ? p.ptr + l * p.batch_stride + m * p.tile_stride + int64_t(n) * TileN : nullptr;
    int columns = cute::min(int(TileN), N - n * TileN);
    return Callbacks<decltype(tCsRow), decltype(args.tCcD)>(tCsRow, args.tCcD, cute::get<0>(args.residue_tCcD), smem,
                                                            gmem, columns, args.thread_idx);
  }
};

// Reduces N within the CTA tile: partials [L, P, M], P = ceil(N / TileN). Each row lies in one quad of lanes.
template <class Op, class TileShape>
struct ColReduction : Node<PartialsParams> {
  static constexpr int TileN = cute::size<1>(TileShape{});
  using Node<PartialsParams>::Node;

  template <class Registers, class Coords>
  struct Callbacks : evt::EmptyConsumerStoreCallbacks {
    Registers tCrCol;  // stride 0 along N
    Coords tCcD;
    int rows_left;     // in-range rows and columns from the thread's first element
    int columns_left;
    float* gmem;       // the partial of the thread's first row, or null outside the problem
    int lane;

    CUTLASS_DEVICE Callbacks(Registers const& tCrCol, Coords const& tCcD, int rows_left, int columns_left, float* gmem,
                             int lane)
        : tCrCol(tCrCol), tCcD(tCcD), rows_left(rows_left), columns_left(columns_left), gmem(gmem), lane(lane) {}

    template <class Accum, int N>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accum, N> const&, int epi_v, int epi_m, int epi_n,
                              cutlass::Array<float, N> const& values) {
      cute::Tensor coords = tCcD(cute::_, cute::_, cute::_, epi_m, epi_n);
      cute::Tensor totals = tCrCol(cute::_, cute::_, cute::_, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        int v = epi_v * N + i;
        if (cute::get<1>(coords(v)) < columns_left) { totals(v) = Op::reduce(totals(v), values[i]); }
      }
      return values;
    }

    CUTLASS_DEVICE void end() {
      cute::Tensor totals = cute::filter_zeros(tCrCol);
      cute::Tensor coords = cute::filter_zeros(tCcD, tCrCol.stride());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(totals); ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int mask = 1; mask < kLanesPerRow; mask *= 2) {
          totals(i) = Op::reduce(totals(i), __shfl_xor_sync(0xffffffff, totals(i), mask));
        }
        int row = cute::get<0>(coords(i));
        if (gmem != nullptr && i % kLanesPerRow == lane % kLanesPerRow && row < rows_left) { gmem[row] = totals(i); }
      }
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const& args) {
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    cute::Tensor column = cute::make_tensor(
        cute::make_smem_ptr(static_cast<float*>(nullptr)),  // for its layout only
        cute::make_layout(cute::take<0, 2>(TileShape{}), cute::Stride<cute::_1, cute::_0>{}));
    cute::Tensor tCrCol = cute::make_tensor_like<float>(
        evt::sm90_partition_for_epilogue<ReferenceSrc>(column, args.epi_tile, args.tiled_copy, args.thread_idx));
    cute::fill(tCrCol, Op::identity());
    auto const& p = *this->params;
    int rows_left = cute::get<0>(args.residue_tCcD);
    float* gmem = n * TileN < N ? p.ptr + l * p.batch_stride + n * p.tile_stride + (M - rows_left) : nullptr;
    return Callbacks<decltype(tCrCol), decltype(args.tCcD)>(tCrCol, args.tCcD, rows_left,
                                                            cute::get<1>(args.residue_tCcD), gmem, args.thread_idx);
  }
};

// D itself: the collective stores what the root returns.
struct StoreD : evt::Sm90VisitorImpl<> {
  using evt::Sm90VisitorImpl<>::Sm90VisitorImpl;

  struct Callbacks : evt::EmptyConsumerStoreCallbacks {
    template <class Accum, class Stored, int N>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accum, N> const&, int, int, int, cutlass::Array<Stored, N> const& values) {
      return values;
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const&) {
    return Callbacks{};
  }
};

// An index reaches the functor as an int; every other operand as fp32.
template <class Load>
struct IsIndex : std::false_type {};
template <int Mode>
struct IsIndex<IndexLoad<Mode>> : std::true_type {};

// The root. Visits each load once, calls each output's functor on every element, rounds its values to the output's
// element type and hands them to the output's store. The collective stores as D what output `kD` makes (-1: no D).
template <int kD, class Loads, class Stores, class... Functors>
struct FunctorVisitor;

template <int kD, class... Loads, class... Stores, class... Functors>
struct FunctorVisitor<kD, cute::tuple<Loads...>, cute::tuple<Stores...>, Functors...>
    : evt::Sm90VisitorImpl<Loads..., Stores...> {
  using Impl = evt::Sm90VisitorImpl<Loads..., Stores...>;
  using Impl::Impl;
  using ElementAux = cutlass::bfloat16_t;  // sizes the collective's buffers where there is no D

  template <class CallbacksImpl>
  struct Callbacks : CallbacksImpl {
    using CallbacksImpl::callbacks_tuple;

    CUTLASS_DEVICE explicit Callbacks(CallbacksImpl&& impl) : CallbacksImpl(cute::forward<CallbacksImpl>(impl)) {}

    template <class Accum, int N>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accum, N> const& accum, int epi_v, int epi_m, int epi_n) {
      return emit(accum, epi_v, epi_m, epi_n, fetch(accum, epi_v, epi_m, epi_n, std::index_sequence_for<Loads...>{}),
                  std::index_sequence_for<Functors...>{});
    }

   private:
    template <class Accum, int N, size_t... I>
    CUTLASS_DEVICE auto fetch(cutlass::Array<Accum, N> const& accum, int epi_v, int epi_m, int epi_n,
                              std::index_sequence<I...>) {
      return cute::make_tuple(operand<Loads>(cute::get<I>(callbacks_tuple).visit(accum, epi_v, epi_m, epi_n))...);
    }

    template <class Load, class Element, int N>
    CUTLASS_DEVICE static auto operand(cutlass::Array<Element, N> const& fragment) {
      if constexpr (IsIndex<Load>::value) {
        return fragment;
      } else {
        return to_operand(fragment);
      }
    }

    template <class Functor, class Accum, int N, class Operands>
    CUTLASS_DEVICE static auto value(cutlass::Array<Accum, N> const& accum, Operands const& operands) {
      cutlass::Array<typename Functor::Value, N> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] = cute::apply(operands, [&](auto const&... fragment) CUTLASS_LAMBDA_FUNC_INLINE {
          return Functor::call(accum[i], fragment[i]...);
        });
      }
      return to_stored<typename Functor::Stored>(values);
    }

    template <class Accum, int N, class Operands, size_t... O>
    CUTLASS_DEVICE auto emit(cutlass::Array<Accum, N> const& accum, int epi_v, int epi_m, int epi_n,
                             Operands const& operands, std::index_sequence<O...>) {
      auto stored = cute::make_tuple(cute::get<sizeof...(Loads) + O>(callbacks_tuple)
                                         .visit(accum, epi_v, epi_m, epi_n, value<Functors>(accum, operands))...);
      return cute::get<(kD < 0 ? 0 : kD)>(stored);
    }
  };

  template <bool ReferenceSrc, class... Ts>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(evt::ConsumerStoreArgs<Ts...> const& args) {
    auto impl = Impl::template get_consumer_store_callbacks<ReferenceSrc>(args);
    return Callbacks<decltype(impl)>(cute::move(impl));
  }
};

}  // namespace gemmgen

namespace cutlass::epilogue::fusion {

// The element type in which the collective holds C in registers: fp32, also under int accumulators.
template <int kD, class... Ts>
struct FusionCallbacksTraits<gemmgen::FunctorVisitor<kD, Ts...>> {
  using DispatchPolicy = void;
  using Callbacks = gemmgen::FunctorVisitor<kD, Ts...>;
  using Operation = FusionOperation;
  using CtaTile_MNK = void;
  using EpilogueTile_MN = void;
  using ElementCompute = float;
};

}  // namespace cutlass::epilogue::fusion
