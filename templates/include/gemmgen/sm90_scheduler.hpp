// The order of tiles in a persistent kernel: groups of `max_swizzle_size` clusters along the minor axis, walked along
// the major one, and a last group of the clusters that are left. CUTLASS's own scheduler rounds both axes up to whole
// groups and multiplies the tiles beyond the problem like all others: 43 columns of tiles cost as much as 48 at 8.
#pragma once
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

namespace gemmgen {

struct GroupedTiles {};  // the tag of the scheduler below

class GroupedTileScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  using Base::Arguments;
  using Base::RasterOrder;
  using Base::WorkTileInfo;

  struct Params : Base::Params {
    cutlass::FastDivmod groups_;  // by the clusters of a whole group
    cutlass::FastDivmod height_;  // by its clusters along the minor axis
    cutlass::FastDivmod last_height_;
    int whole_groups_ = 0;
  };

  template <class ProblemShape, class TileShape, class ClusterShape>
  static Params to_underlying_arguments(ProblemShape const& problem, TileShape tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware, Arguments const& args,
                                        void* = nullptr, uint32_t = 1, uint32_t = 1) {
    Arguments whole = args;
    whole.max_swizzle_size = 1;
    Params params;
    static_cast<Base::Params&>(params) = Base::to_underlying_arguments(problem, tile, cluster, hardware, whole);
    bool const along_n = params.raster_order_ == RasterOrder::AlongN;
    int const majors = along_n ? params.problem_tiles_n_ : params.problem_tiles_m_;
    int const minors = along_n ? params.problem_tiles_m_ : params.problem_tiles_n_;
    int const height = cute::max(args.max_swizzle_size, 1);
    params.groups_ = cutlass::FastDivmod(height * majors);
    params.height_ = cutlass::FastDivmod(height);
    params.last_height_ = cutlass::FastDivmod(cute::max(minors % height, 1));
    params.whole_groups_ = minors / height;
    return params;
  }

  CUTLASS_HOST_DEVICE GroupedTileScheduler() {}

  CUTLASS_DEVICE explicit GroupedTileScheduler(Params const& params) : Base(params), params_(params) {
    step_ = gridDim.x * gridDim.y * gridDim.z;
    next_ = is_along_n() ? blockIdx.x + blockIdx.y * gridDim.x : blockIdx.x * gridDim.y + blockIdx.y;
  }

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) const { return get_current_work(); }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return tile_at(next_); }

  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { next_ += uint64_t(step_) * count; }

  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo const&, uint32_t count = 1) const {
    return next_ + uint64_t(step_) * count >= params_.blocks_per_problem_;
  }

  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const&) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

  template <class Pipeline, class PipelineState>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const& work, Pipeline&, PipelineState) {
    return fetch_next_work(work);
  }

 private:
  CUTLASS_DEVICE bool is_along_n() const { return params_.raster_order_ == RasterOrder::AlongN; }

  // CTAs count along the minor axis of a cluster first, then along the major one, then through the clusters.
  CUTLASS_DEVICE WorkTileInfo tile_at(uint64_t index) const {
    if (index >= params_.blocks_per_problem_) { return WorkTileInfo::invalid_work_tile(); }
    uint64_t batch, in_batch, in_major, cluster;
    params_.divmod_batch_(batch, in_batch, index);
    params_.divmod_cluster_shape_major_(cluster, in_major, params_.divmod_cluster_shape_minor_.divide(in_batch));
    int group, in_group, major, minor;
    params_.groups_(group, in_group, int(cluster));
    cutlass::FastDivmod const height = group < params_.whole_groups_ ? params_.height_ : params_.last_height_;
    height(major, minor, in_group);
    minor += group * params_.height_.divisor;
    auto [cta_m, cta_n, cta_l] = cute::block_id_in_cluster();
    bool const along_n = is_along_n();
    int const major_tile = major * int(params_.divmod_cluster_shape_major_.divisor) + int(in_major);
    int const minor_tile = minor * int(params_.divmod_cluster_shape_minor_.divisor) + int(along_n ? cta_m : cta_n);
    return {along_n ? minor_tile : major_tile, along_n ? major_tile : minor_tile, int(batch), true};
  }

  Params params_;
  uint32_t step_ = 0;  // CTAs of the grid
  uint64_t next_ = 0;
};

}  // namespace gemmgen

namespace cutlass::gemm::kernel::detail {

template <class ArchTag, class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<gemmgen::GroupedTiles, ArchTag, TileShape, ClusterShape, Stages> {
  using Scheduler = gemmgen::GroupedTileScheduler;
};

}  // namespace cutlass::gemm::kernel::detail
