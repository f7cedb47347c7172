// What the launcher of an sm80 kernel hands to its device code. Plain data: the launcher includes no CUTLASS.
#pragma once
#include <gemmgen/abi.h>

namespace gemmgen::sm80 {

struct Params {
  Args args;
  int32_t grid_m, grid_n;  // CTA tiles
  int32_t along_n;         // neighbouring CTAs walk along N
  int32_t slices;          // of K
  int32_t slice_k;         // K of one slice, a multiple of the tile's
  int32_t* arrivals;       // [tiles] slices that are done, zeroed before each launch
  void* partials;          // [tiles, slices] accumulators, 4 bytes each
};

}  // namespace gemmgen::sm80
