// Tiles at the edges of a problem. TMA fills what lies beyond a tensor without reading memory, so that a CTA with few
// rows in its tile of A would get ahead of those that read the same tiles of B: L2 would not hold these any more when
// the others come, and B be read twice, which takes up to 40 % longer (ragged-h200.json). So a CTA loads the first rows
// of the tensor in the place of those beyond it. What is multiplied there is never stored.
#pragma once
#include <type_traits>

#include <cute/tensor.hpp>

#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cutlass/cutlass.h>

namespace gemmgen {

constexpr int kEdgeRows = 32;  // of a block, where layouts allow: so few may still be filled in

// Rows of a block of a tile of `tile` rows, of which each of `multicast` CTAs loads whole atoms of the layout in shared
// memory, by powers of two of them, as swizzles need; `tile` where there are no such blocks.
constexpr int edge_rows(int tile, int atom, int multicast) {
  int rows = atom * multicast;
  if (tile % rows != 0) { return tile; }
  while (2 * rows <= kEdgeRows && tile % (2 * rows) == 0) { rows *= 2; }
  return rows;
}

// The element types that a collective makes its descriptors with.
template <class Base, class = void>
struct TmaElements {
  using A = typename Base::ElementA;
  using B = typename Base::ElementB;
};
template <class Base>
struct TmaElements<Base, std::void_t<typename Base::InternalElementA>> {
  using A = typename Base::InternalElementA;
  using B = typename Base::InternalElementB;
};

// A or B of a collective. Tiler: (rows, K) of its tile, Rows: of a block of it, Multicast: the CTAs that share a tile.
// Which descriptor loads a tile depends on that tile alone, as the CTAs that share it must load it alike.
template <class Op, class Element, class Stride, class SmemLayout, class Tiler, int Rows, int Multicast>
struct EdgeOperand {
  static constexpr int kTile = cute::size<0>(Tiler{});
  static constexpr int kBlocks = kTile / Rows;
  static constexpr bool kHasBlocks = kBlocks > 1;
  using Block = cute::Shape<cute::Int<Rows>, cute::tuple_element_t<1, Tiler>>;
  using Stage = decltype(SmemLayout{}(cute::_, cute::_, cute::Int<0>{}));
  using BlockLayout = decltype(cute::flat_divide(Stage{}, Block{})(cute::_, cute::_, cute::_0{}, cute::_0{}));

  // `extents` and `stride` are (rows, K, batches).
  template <class Extents>
  static auto make_copy(Element const* ptr, Extents const& extents, Stride const& stride) {
    auto tensor = cute::make_tensor(ptr, cute::make_layout(extents, stride));
    return cute::make_tma_copy(Op{}, tensor, BlockLayout{}, Block{}, cute::Int<Multicast>{});
  }
  struct NoCopy {};
  using Copy = cute::conditional_t<
      kHasBlocks, decltype(make_copy(nullptr, cute::repeat_like(Stride{}, int32_t(0)), Stride{})), NoCopy>;

  CUTLASS_HOST_DEVICE static bool has_cut_tile(int rows) { return rows % kTile != 0; }

  // What loads blocks; empty where no tile is cut by the end of the tensor.
  template <class Extents>
  static Copy copy_of(Element const* ptr, Extents const& extents, Stride const& stride) {
    if constexpr (kHasBlocks) {
      if (has_cut_tile(cute::get<0>(extents))) { return make_copy(ptr, extents, stride); }
    }
    return {};
  }

  CUTLASS_DEVICE static void prefetch(Copy const& copy, int rows) {
    if constexpr (kHasBlocks) {
      if (has_cut_tile(rows)) { cute::prefetch_tma_descriptor(copy.get_tma_descriptor()); }
    }
  }

  // Whether a tile is not to be loaded as CUTLASS does it.
  CUTLASS_DEVICE static bool is_edge(int tile, int rows) {
    return kHasBlocks ? (tile + 1) * kTile > rows : tile * kTile >= rows;
  }

  // What loads tile `tile` of a tensor of `rows` rows, or the first one in the place of one beyond, a K tile at a time:
  // `(barrier, k, stage)`.
  template <class Whole, class Data>
  CUTLASS_DEVICE static auto loader(Whole const& whole, Copy const& copy, Data const& smem, int rows, int k_tiles,
                                    int batches, int tile, int batch, uint32_t rank, uint16_t mask) {
    using namespace cute;
    auto const extents = make_shape(rows, k_tiles * size<1>(Block{}), batches);
    int const here = tile * kTile < rows ? tile : 0;
    auto tiles = local_tile(whole.get_tma_tensor(extents), Tiler{}, make_coord(here, _, batch));  // (ROWS,BLK_K,k)
    auto from_tile = whole.get_slice(rank).partition_S(tiles);  // (TMA,TMA_M,TMA_K,k)
    auto to_tile = whole.get_slice(rank).partition_D(smem);     // (TMA,TMA_M,TMA_K,PIPE)
    auto load_tile = [=, &whole](auto& barrier, int k, int stage) {
      cute::copy(whole.with(barrier, mask), from_tile(_, _, _, k), to_tile(_, _, _, stage));
    };
    if constexpr (!kHasBlocks) {
      return load_tile;
    } else {
      auto blocks = local_tile(copy.get_tma_tensor(extents), Block{}, make_coord(_, _, batch));
      auto from = copy.get_slice(rank).partition_S(blocks);                    // (TMA,TMA_M,TMA_K,blocks,k)
      auto to = copy.get_slice(rank).partition_D(flat_divide(smem, Block{}));  // (TMA,TMA_M,TMA_K,blocks,1,PIPE)
      int const first = here * kBlocks, valid = (rows + Rows - 1) / Rows;
      bool const is_cut = (here + 1) * kTile > rows;
      return [=, &copy](auto& barrier, int k, int stage) {
        if (!is_cut) { return load_tile(barrier, k, stage); }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBlocks; ++i) {
          int const block = first + i < valid ? first + i : 0;
          cute::copy(copy.with(barrier, mask), from(_, _, _, block, k), to(_, _, _, i, _0{}, stage));
        }
      };
    }
  }
};

// CUTLASS's collective `Base` with a `load` of its own at the edges.
template <class Base>
struct EdgeMainloop : Base {
  using typename Base::Arguments;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TileShape;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;
  using Elements = TmaElements<Base>;

  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  template <class Op, class Element, class Stride, class SmemLayout, class Atom, int Mode, int Multicast>
  using Operand = EdgeOperand<Op, Element, Stride, SmemLayout,
                              cute::Shape<cute::tuple_element_t<Mode, TileShape>, cute::tuple_element_t<2, TileShape>>,
                              edge_rows(cute::size<Mode>(TileShape{}), cute::size<0>(Atom{}), Multicast), Multicast>;
  using OperandA = Operand<typename Base::GmemTiledCopyA, typename Elements::A, typename Base::StrideA,
                           typename Base::SmemLayoutA, typename Base::SmemLayoutAtomA, 0, kClusterN>;
  using OperandB = Operand<typename Base::GmemTiledCopyB, typename Elements::B, typename Base::StrideB,
                           typename Base::SmemLayoutB, typename Base::SmemLayoutAtomB, 1, kClusterM>;

  struct Params : Base::Params {
    typename OperandA::Copy edge_a;
    typename OperandB::Copy edge_b;
    int rows, columns, batches;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args, void* workspace) {
    auto const [M, N, K, L] = cute::append<4>(problem, 1);
    auto const* a = reinterpret_cast<typename Elements::A const*>(args.ptr_A);
    auto const* b = reinterpret_cast<typename Elements::B const*>(args.ptr_B);
    return {Base::to_underlying_arguments(problem, args, workspace),
            OperandA::copy_of(a, cute::make_shape(M, K, L), args.dA),
            OperandB::copy_of(b, cute::make_shape(N, K, L), args.dB), M, N, L};
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    OperandA::prefetch(params.edge_a, params.rows);
    OperandB::prefetch(params.edge_b, params.columns);
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& coord, KTileIterator k_tile,
                           int k_tile_count, int thread, uint32_t rank, TensorStorage& storage) {
    using namespace cute;
    auto const [m, n, k, l] = coord;
    if (!OperandA::is_edge(m, params.rows) && !OperandB::is_edge(n, params.columns)) {
      return Base::load(params, pipeline, write, inputs, coord, k_tile, k_tile_count, thread, rank, storage);
    }
    if (!elect_one_sync()) { return; }
    Tensor sA = make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(storage.smem_B.data()), typename Base::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    // ranks count along M first; CTAs in a row of the cluster share A, those in a column B
    int const at_m = rank % kClusterM, at_n = rank / kClusterM;
    constexpr uint32_t kRow = ((uint64_t(1) << kClusterM * kClusterN) - 1) / ((1 << kClusterM) - 1);
    constexpr uint32_t kColumn = (1 << kClusterM) - 1;
    int const k_tiles = size<3>(get<0>(inputs));
    auto load_a = OperandA::loader(params.tma_load_a, params.edge_a, sA, params.rows, k_tiles, params.batches, m, l,
                                   at_n, uint16_t(kRow << at_m));
    auto load_b = OperandB::loader(params.tma_load_b, params.edge_b, sB, params.columns, k_tiles, params.batches, n, l,
                                   at_m, uint16_t(kColumn << at_n * kClusterM));
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tile_count > 0; --k_tile_count, ++k_tile, ++write) {
      pipeline.producer_acquire(write);
      auto& barrier = *pipeline.producer_get_barrier(write);
      load_a(barrier, *k_tile, write.index());
      load_b(barrier, *k_tile, write.index());
    }
  }
};

}  // namespace gemmgen
