// A two-stage mainloop for 8-bit operands that are not contiguous along K, which mma.sync reads both operands along:
// threads gather such an operand element by element and write it to shared memory as if K had been contiguous.
#pragma once
#include <cutlass/gemm/threadblock/default_mma.h>

namespace gemmgen::sm80 {

// Reads tiles of A ([M, K], ColumnMajor) or B ([K, N], RowMajor) in the order of `ThreadMap`, whose contiguous axis is K.
// Like CUTLASS's iterators it visits the partial tile of K first, so that the two can be mixed.
template <class Shape, class Element_, class Layout, class ThreadMap_, bool kIsA>
class StridedTileIterator {
 public:
  using Element = Element_;
  using ThreadMap = ThreadMap_;
  using Fragment = cutlass::Array<Element, ThreadMap::Iterations::kCount * ThreadMap::kElementsPerAccess>;

  struct Params {
    int64_t k_stride;
    __device__ explicit Params(Layout const& layout) : k_stride(layout.stride(0)) {}
  };

  __device__ StridedTileIterator(Params const& params, Element* ptr, cutlass::MatrixCoord extent, int thread,
                                 cutlass::MatrixCoord offset)
      : k_stride_(params.k_stride) {
    auto first = ThreadMap::initial_offset(thread);
    int k_extent = kIsA ? extent.column() : extent.row(), k_begin = kIsA ? offset.column() : offset.row();
    int mn_extent = kIsA ? extent.row() : extent.column(), mn_begin = kIsA ? offset.row() : offset.column();
    int residue = (k_extent - k_begin) % kTileK;
    k_step_ = residue ? residue : kTileK;
    k_left_ = k_step_ - first.contiguous();
    mn_left_ = mn_extent - mn_begin - first.strided();
    ptr_ = ptr + (k_begin + first.contiguous()) * k_stride_ + mn_begin + first.strided();
  }

  __device__ void load(Fragment& fragment) const {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < ThreadMap::Iterations::kStrided; ++s) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < ThreadMap::Iterations::kContiguous; ++c) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < ThreadMap::kElementsPerAccess; ++i) {
          int k = c * ThreadMap::Delta::kContiguous + i, mn = s * ThreadMap::Delta::kStrided;
          int index = i + ThreadMap::kElementsPerAccess * (c + s * ThreadMap::Iterations::kContiguous);
          if (k < k_left_ && mn < mn_left_) { fragment[index] = ptr_[k * k_stride_ + mn]; }
        }
      }
    }
  }

  __device__ StridedTileIterator& operator++() {
    ptr_ += k_step_ * k_stride_;
    k_left_ += kTileK - k_step_;  // the tiles after the first are full
    k_step_ = kTileK;
    return *this;
  }

  __device__ void clear_mask(bool enable = true) { k_left_ = enable ? 0 : k_left_; }

 private:
  static constexpr int kTileK = kIsA ? Shape::kColumn : Shape::kRow;

  Element const* ptr_;
  int64_t k_stride_;
  int k_step_;             // from this tile to the next
  int k_left_, mn_left_;   // elements in range, counted from this thread's first
};

// The same parameters as CUTLASS's DefaultMma.
template <class ElementA, class LayoutA, int kAlignmentA, class ElementB, class LayoutB, int kAlignmentB, class Accum,
          class LayoutC, class OperatorClass, class ArchTag, class Tile, class Warp, class Instruction, int kStages,
          class Operator>
struct StridedMma {
  static_assert(kStages == 2, "elements are gathered through registers");
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using Core = cutlass::gemm::threadblock::DefaultMmaCore<Tile, Warp, Instruction, ElementA, RowMajor, ElementB,
                                                          ColumnMajor, Accum, LayoutC, OperatorClass, 2, Operator>;
  using ShapeA = cutlass::MatrixShape<Tile::kM, Tile::kK>;
  using ShapeB = cutlass::MatrixShape<Tile::kK, Tile::kN>;

  // Only the operand that needs it is gathered.
  using IteratorA = cutlass::platform::conditional_t<
      cutlass::platform::is_same<LayoutA, RowMajor>::value,
      cutlass::transform::threadblock::PredicatedTileIterator<ShapeA, ElementA, RowMajor, 1,
                                                              typename Core::IteratorThreadMapA, kAlignmentA>,
      StridedTileIterator<ShapeA, ElementA, LayoutA, typename Core::IteratorThreadMapA, true>>;
  using IteratorB = cutlass::platform::conditional_t<
      cutlass::platform::is_same<LayoutB, ColumnMajor>::value,
      cutlass::transform::threadblock::PredicatedTileIterator<ShapeB, ElementB, ColumnMajor, 0,
                                                              typename Core::IteratorThreadMapB, kAlignmentB>,
      StridedTileIterator<ShapeB, ElementB, LayoutB, typename Core::IteratorThreadMapB, false>>;

  using ThreadblockMma =
      cutlass::gemm::threadblock::MmaPipelined<Tile, IteratorA, typename Core::SmemIteratorA, IteratorB,
                                               typename Core::SmemIteratorB, Accum, LayoutC, typename Core::MmaPolicy>;
};

}  // namespace gemmgen::sm80
