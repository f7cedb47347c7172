// The parts of CUTLASS that an sm90 skeleton needs, and the epilogue's shape-dependent types.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "gemmgen/sm90_visitors.hpp"

namespace gemmgen {

// What the epilogue's nodes have to know of the collective around them. `Layout` is that of C and D.
template <class TileShape_, class EpilogueTileOrAuto, class ElementC, class ElementD, class Schedule,
          class Layout = cutlass::layout::RowMajor>
struct EpilogueShape {
  using TileShape = TileShape_;
  using BufferedD = cute::conditional_t<cute::is_void_v<ElementD>, cutlass::bfloat16_t, ElementD>;
  using Descriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<TileShape, EpilogueTileOrAuto, ElementC,
                                                                               BufferedD, Schedule>;
  static constexpr bool kIsCooperative = cutlass::epilogue::collective::detail::sm90_is_cooperative_v<Schedule>;
  static constexpr int kWarps = kIsCooperative ? 8 : 4;  // that share one epilogue subtile

  template <class ClusterShape, class ElementAccum, class Visitor>
  using Collective = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTileOrAuto, ElementAccum,
      float, ElementC, Layout, kTmaElements<ElementC>, ElementD, Layout, kTmaElements<ElementD>, Schedule,
      Visitor>::CollectiveOp;
};

// Tiles beside C and D, by TMA.
template <class Epi, class Element, class Stride = TileStride, class Aux = cutlass::epilogue::collective::detail::AuxLoadDescriptor<
                                        typename Epi::Descriptor, Stride, Element>>
using TileLoad =
    cutlass::epilogue::fusion::Sm90AuxLoad<Aux::Stages, typename Aux::EpilogueTile, Element, Stride,
                                           typename Aux::SmemLayoutAtom, typename Aux::CopyOpS2R, kTmaElements<Element>,
                                           false>;
template <class Epi, class Element, class Stride = TileStride, class Aux = cutlass::epilogue::collective::detail::AuxStoreDescriptor<
                                        typename Epi::Descriptor, Stride, Element>>
using TileStore =
    cutlass::epilogue::fusion::Sm90AuxStore<Aux::Stages, typename Aux::EpilogueTile, Element,
                                            cutlass::FloatRoundStyle::round_to_nearest, Stride,
                                            typename Aux::SmemLayoutAtom, typename Aux::CopyOpR2S,
                                            kTmaElements<Element>, false>;

template <class Epi, class Op>
using RowPartials = RowReduction<Op, typename Epi::TileShape, Epi::kWarps>;
template <class Epi, class Op>
using ColPartials = ColReduction<Op, typename Epi::TileShape>;

}  // namespace gemmgen
