// fp8 mma.sync sums its products with fewer bits than fp32 has. `PromotedMultiplyAdd` adds each instruction's sum to the
// accumulator with an fp32 add: it needs no second set of accumulators, unlike adding once for each tile of K.
#pragma once
#include <cutlass/arch/mma_sm89.h>

namespace gemmgen::sm80 {

struct PromotedMultiplyAdd {};

template <class ElementA, class ElementB>
struct PromotedMma : cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, 32>, 32, ElementA, cutlass::layout::RowMajor,
                                        ElementB, cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor,
                                        cutlass::arch::OpMultiplyAddFastAccum> {
  using Base = cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, 32>, 32, ElementA, cutlass::layout::RowMajor, ElementB,
                                  cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor,
                                  cutlass::arch::OpMultiplyAddFastAccum>;
  using Operator = PromotedMultiplyAdd;

  CUTLASS_HOST_DEVICE
  void operator()(typename Base::FragmentC& d, typename Base::FragmentA const& a, typename Base::FragmentB const& b,
                  typename Base::FragmentC const& c) const {
    typename Base::FragmentC sum;
    sum.clear();
    Base::operator()(sum, a, b, sum);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Base::FragmentC::kElements; ++i) { d[i] = c[i] + sum[i]; }
  }
};

}  // namespace gemmgen::sm80

// One full specialization for each pair, because CUTLASS's own are partial in the operator.
namespace cutlass::arch {
template <>
struct Mma<gemm::GemmShape<16, 8, 32>, 32, float_e4m3_t, layout::RowMajor, float_e4m3_t, layout::ColumnMajor, float,
           layout::RowMajor, gemmgen::sm80::PromotedMultiplyAdd>
    : gemmgen::sm80::PromotedMma<float_e4m3_t, float_e4m3_t> {};
template <>
struct Mma<gemm::GemmShape<16, 8, 32>, 32, float_e4m3_t, layout::RowMajor, float_e5m2_t, layout::ColumnMajor, float,
           layout::RowMajor, gemmgen::sm80::PromotedMultiplyAdd>
    : gemmgen::sm80::PromotedMma<float_e4m3_t, float_e5m2_t> {};
template <>
struct Mma<gemm::GemmShape<16, 8, 32>, 32, float_e5m2_t, layout::RowMajor, float_e4m3_t, layout::ColumnMajor, float,
           layout::RowMajor, gemmgen::sm80::PromotedMultiplyAdd>
    : gemmgen::sm80::PromotedMma<float_e5m2_t, float_e4m3_t> {};
template <>
struct Mma<gemm::GemmShape<16, 8, 32>, 32, float_e5m2_t, layout::RowMajor, float_e5m2_t, layout::ColumnMajor, float,
           layout::RowMajor, gemmgen::sm80::PromotedMultiplyAdd>
    : gemmgen::sm80::PromotedMma<float_e5m2_t, float_e5m2_t> {};
}  // namespace cutlass::arch
