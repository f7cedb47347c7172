// The device parts of an sm80 kernel that do not depend on its epilogue: tile order, mainloop, split-K and staging.
#pragma once
#include <cutlass/gemm/threadblock/default_mma.h>
#include <gemmgen/sm80_params.hpp>
#include <gemmgen/sm80_promoted_mma.hpp>
#include <gemmgen/sm80_strided_mma.hpp>
#include <gemmgen/sm80_visitors.hpp>

namespace gemmgen::sm80 {

// The tile of this CTA. `swizzle` neighbouring rows (or columns) of tiles are walked together so that they share L2 lines.
template <int kTileM, int kTileN>
__device__ Tile locate(Params const& params) {
  uint32_t tiles = uint32_t(params.grid_m) * uint32_t(params.grid_n);  // the launcher keeps the grid below 2^31
  uint32_t batch = blockIdx.x / tiles, index = blockIdx.x % tiles;
  uint32_t major = params.along_n ? params.grid_n : params.grid_m, minor = params.along_n ? params.grid_m : params.grid_n;
  uint32_t first = index / (params.args.swizzle * major) * params.args.swizzle;
  uint32_t height = min(uint32_t(params.args.swizzle), minor - first);
  uint32_t rest = index - first * major;
  int i = first + rest % height, j = rest / height;

  Tile tile;
  tile.batch = batch;
  tile.grid_row = params.along_n ? i : j;
  tile.grid_column = params.along_n ? j : i;
  tile.row = tile.grid_row * kTileM;
  tile.column = tile.grid_column * kTileN;
  tile.rows = params.args.m - tile.row;
  tile.columns = params.args.n - tile.column;
  return tile;
}

// accum += A[tile] @ B[tile] over this CTA's slice of K.
template <class Mma, class LayoutA, class LayoutB>
__device__ void multiply(Params const& params, Tile const& tile, typename Mma::SharedStorage& storage,
                         typename Mma::FragmentC& accum) {
  using ElementA = typename Mma::IteratorA::Element;
  using ElementB = typename Mma::IteratorB::Element;
  Args const& args = params.args;
  int k_begin = blockIdx.y * params.slice_k;
  int k_size = min(args.k - k_begin, params.slice_k);
  if (k_size <= 0) { return; }
  int k_end = k_begin + k_size;

  auto ptr_a = static_cast<ElementA const*>(args.a.ptr) + tile.batch * args.a.batch_stride;
  auto ptr_b = static_cast<ElementB const*>(args.b.ptr) + tile.batch * args.b.batch_stride;
  int thread = threadIdx.x, lane = thread % 32;
  int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  typename Mma::IteratorA iterator_a(typename Mma::IteratorA::Params(LayoutA(args.a.ld)), const_cast<ElementA*>(ptr_a),
                                     {args.m, k_end}, thread, {tile.row, k_begin});
  typename Mma::IteratorB iterator_b(typename Mma::IteratorB::Params(LayoutB(args.b.ld)), const_cast<ElementB*>(ptr_b),
                                     {k_end, args.n}, thread, {k_begin, tile.column});
  Mma mma(storage, thread, warp, lane);
  mma((k_size - 1) / Mma::Shape::kK + 1, accum, iterator_a, iterator_b, accum);
}

// Adds the accumulators of all slices in the order of the slices; true in the one CTA, the last to arrive, that has the sum.
template <int kThreads, class Fragment>
__device__ bool reduce_slices(Params const& params, Fragment& accum, int* shared) {
  using Element = typename Fragment::Element;
  if (params.slices == 1) { return true; }
  constexpr int64_t kStride = int64_t(Fragment::kElements) * kThreads;
  Element* partials = static_cast<Element*>(params.partials) + int64_t(blockIdx.x) * params.slices * kStride + threadIdx.x;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Fragment::kElements; ++i) { partials[blockIdx.y * kStride + i * kThreads] = accum[i]; }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) { *shared = atomicAdd(params.arrivals + blockIdx.x, 1); }
  __syncthreads();
  bool is_last = *shared == params.slices - 1;
  if (!is_last) { return false; }
  __threadfence();
  accum.clear();
  for (int slice = 0; slice < params.slices; ++slice) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i) { accum[i] += __ldcg(partials + slice * kStride + i * kThreads); }
  }
  return true;
}

// Accumulators of a CTA tile in shared memory, row by row. The padding spreads the fragments' rows over the banks.
template <class Element, class Map>
struct StagedTile {
  static constexpr int kStride = Map::kTileN + 8;
  Element data[Map::kTileM * kStride];

  __device__ void read(int row, Element (&values)[Map::kVector]) const {
    constexpr int kWidth = Map::kVector < 4 ? Map::kVector : 4;
    using Access = Vector<Element, kWidth>;
    auto source = reinterpret_cast<Access const*>(data + row * kStride + Map::column());
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) { values[i] = source[i / kWidth].data[i % kWidth]; }
  }
};

// Writes each warp's accumulators to the staged tile. mma.sync m16n8: a lane holds 2 neighbours of rows lane / 4 and + 8.
template <class Mma, class Staged>
struct StageTensorOp {
  using Warp = typename Mma::Operator;
  using Element = typename Mma::FragmentC::Element;

  static __device__ void stage(typename Mma::FragmentC const& accum, Staged& staged) {
    using Pair = Vector<Element, 2>;
    constexpr int kWarpsM = Mma::Base::WarpCount::kM;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row = warp % kWarpsM * Warp::Shape::kM + lane / 4, column = warp / kWarpsM * Warp::Shape::kN + lane % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < Warp::MmaIterations::kColumn; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < Warp::MmaIterations::kRow; ++m) {
        int i = 4 * (m + n * Warp::MmaIterations::kRow);
        Element* target = staged.data + (row + m * 16) * Staged::kStride + column + n * 8;
        *reinterpret_cast<Pair*>(target) = {accum[i], accum[i + 1]};
        *reinterpret_cast<Pair*>(target + 8 * Staged::kStride) = {accum[i + 2], accum[i + 3]};
      }
    }
  }
};

template <class Mma, class Staged>
struct StageSimt {
  static __device__ void stage(typename Mma::FragmentC const& accum, Staged& staged) {
    constexpr int kWarpsM = Mma::Base::WarpCount::kM;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    typename Mma::Operator::IteratorC iterator({staged.data, cutlass::layout::RowMajor(Staged::kStride)}, lane);
    iterator.add_tile_offset({warp % kWarpsM, warp / kWarpsM});
    iterator.store(accum);
  }
};

}  // namespace gemmgen::sm80
