// The parts of CUTLASS that an sm100 skeleton needs, and the epilogue's shape-dependent types. The loads are those of
// sm90: CUTLASS's sm100 epilogue hands its visitors the same arguments.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder_decl.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm100_mma_warpspecialized.hpp>
#include <cutlass/gemm/collective/builders/sm100_umma_builder.inl>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <cutlass/gemm/kernel/sm100_gemm_tma_warpspecialized.hpp>

#include "gemmgen/sm90_visitors.hpp"

namespace gemmgen {

template <class TileShape_, class MmaTile, class EpilogueTileOrAuto, class ElementC, class ElementD, class Schedule>
struct EpilogueShape {
  using TileShape = TileShape_;

  template <class ClusterShape, class ElementAccum, class Visitor>
  using Collective = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, MmaTile, ClusterShape, EpilogueTileOrAuto, ElementAccum,
      float, ElementC, cutlass::layout::RowMajor, kTmaElements<ElementC>, ElementD, cutlass::layout::RowMajor,
      kTmaElements<ElementD>, Schedule, Visitor>::CollectiveOp;
};

}  // namespace gemmgen
