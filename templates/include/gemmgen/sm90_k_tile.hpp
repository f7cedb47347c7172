// What CUTLASS's mainloops take for the coordinate of a k tile, also beyond K.
#pragma once
#include <cutlass/cutlass.h>

namespace gemmgen {

// Counts k tiles. Those beyond K load zeros.
struct KTile {
  int index;
  CUTLASS_DEVICE int operator*() const { return index; }
  CUTLASS_DEVICE KTile& operator++() {
    ++index;
    return *this;
  }
};

}  // namespace gemmgen
