// The swapped problem D^T = B^T A^T: the kernel's M runs over the columns of D and its N over the rows, so that the
// tensor cores' short side takes the few rows. What has N contiguous in memory has M contiguous to the kernel.
#pragma once
#include <utility>

#include "gemmgen/abi.h"
#include "gemmgen/sm90_kernel.hpp"

namespace gemmgen {

template <class TileShape, class EpilogueTileOrAuto, class ElementC, class ElementD, class Schedule>
struct SwappedEpilogueShape : EpilogueShape<TileShape, EpilogueTileOrAuto, ElementC, ElementD, Schedule> {
  template <class ClusterShape, class ElementAccum, class Visitor>
  using Collective = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTileOrAuto, ElementAccum,
      float, ElementC, cutlass::layout::ColumnMajor, kTmaElements<ElementC>, ElementD, cutlass::layout::ColumnMajor,
      kTmaElements<ElementD>, Schedule, Visitor>::CollectiveOp;
};

using SwappedTileStride = cute::Stride<cute::_1, int64_t, int64_t>;  // (M,N,L), column-major

template <class Epi, class Element, class Aux = cutlass::epilogue::collective::detail::AuxLoadDescriptor<
                                        typename Epi::Descriptor, SwappedTileStride, Element>>
using SwappedTileLoad =
    cutlass::epilogue::fusion::Sm90AuxLoad<Aux::Stages, typename Aux::EpilogueTile, Element, SwappedTileStride,
                                           typename Aux::SmemLayoutAtom, typename Aux::CopyOpS2R, kTmaElements<Element>,
                                           false>;
template <class Epi, class Element, class Aux = cutlass::epilogue::collective::detail::AuxStoreDescriptor<
                                        typename Epi::Descriptor, SwappedTileStride, Element>>
using SwappedTileStore =
    cutlass::epilogue::fusion::Sm90AuxStore<Aux::Stages, typename Aux::EpilogueTile, Element,
                                            cutlass::FloatRoundStyle::round_to_nearest, SwappedTileStride,
                                            typename Aux::SmemLayoutAtom, typename Aux::CopyOpR2S,
                                            kTmaElements<Element>, false>;

// What the kernel sees of a caller's arguments. The skeleton has exchanged ROW and COL.
inline Args swapped(Args x) {
  std::swap(x.m, x.n);
  std::swap(x.a, x.b);
  return x;
}

}  // namespace gemmgen
