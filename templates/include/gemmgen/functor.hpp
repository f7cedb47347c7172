// Conversions around a functor: operands to what it takes, its value to what is stored. No dependence on an arch.
#pragma once
#include <cstdint>
#include <type_traits>

#include <cutlass/array.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_conversion.h>

namespace gemmgen {

// An operand as functors take it: fp32, whatever its memory holds.
template <class Element, int N>
CUTLASS_DEVICE cutlass::Array<float, N> to_operand(cutlass::Array<Element, N> const& fragment) {
  return cutlass::NumericArrayConverter<float, Element, N>{}(fragment);
}

// A functor's value as it is stored: one rounding to nearest even; bool tensors are bytes that hold 0 or 1.
template <class Stored, class Value, int N>
CUTLASS_DEVICE cutlass::Array<Stored, N> to_stored(cutlass::Array<Value, N> const& fragment) {
  if constexpr (std::is_same_v<Stored, uint8_t>) {
    cutlass::Array<Stored, N> stored;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { stored[i] = fragment[i] != Value(0); }
    return stored;
  } else {
    return cutlass::NumericArrayConverter<Stored, Value, N, cutlass::FloatRoundStyle::round_to_nearest>{}(fragment);
  }
}

}  // namespace gemmgen
