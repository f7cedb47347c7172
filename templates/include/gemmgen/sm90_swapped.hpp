// The swapped problem D^T = B^T A^T: the kernel's M runs over the columns of D and its N over the rows, so that the
// tensor cores' short side takes the few rows. What has N contiguous in memory has M contiguous to the kernel.
#pragma once
#include <utility>

#include "gemmgen/abi.h"
#include "gemmgen/sm90_kernel.hpp"

namespace gemmgen {

template <class TileShape, class EpilogueTileOrAuto, class ElementC, class ElementD, class Schedule>
using SwappedEpilogueShape =
    EpilogueShape<TileShape, EpilogueTileOrAuto, ElementC, ElementD, Schedule, cutlass::layout::ColumnMajor>;

using SwappedTileStride = cute::Stride<cute::_1, int64_t, int64_t>;  // (M,N,L), column-major

template <class Epi, class Element>
using SwappedTileLoad = TileLoad<Epi, Element, SwappedTileStride>;
template <class Epi, class Element>
using SwappedTileStore = TileStore<Epi, Element, SwappedTileStride>;

// What the kernel sees of a caller's arguments. The skeleton has exchanged ROW and COL.
inline Args swapped(Args x) {
  std::swap(x.m, x.n);
  std::swap(x.a, x.b);
  return x;
}

}  // namespace gemmgen
