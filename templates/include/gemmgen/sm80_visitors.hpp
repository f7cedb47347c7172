// The sm80 epilogue's nodes: what one thread loads, stores and reduces while the CTA walks its tile row by row.
//
// A thread owns kVector neighbouring columns and every kRowThreads-th row of the CTA tile. Nodes address memory relative
// to the tile's origin, so that 32-bit offsets stay inside a tile and everything else is 64-bit.
#pragma once
#include <cutlass/numeric_conversion.h>
#include <gemmgen/abi.h>

namespace gemmgen::sm80 {

// One CTA tile: its batch, its grid position, the matrix coordinates of its origin, and how much of it is in range.
struct Tile {
  int batch, grid_row, grid_column;
  int row, column;
  int rows, columns;
};

// How the threads of a CTA cover a tile in the epilogue.
template <int kTileM_, int kTileN_, int kThreads_, int kVector_, int kSlots_>
struct ThreadMap {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kThreads = kThreads_, kVector = kVector_;
  static constexpr int kSlots = kSlots_;  // rows whose loads are in flight together
  static constexpr int kColumnThreads = kTileN / kVector;
  static constexpr int kRowThreads = kThreads / kColumnThreads;
  static constexpr int kSteps = kTileM / kRowThreads;
  // Lanes of a warp that share a row, and the partial sums that a row of the tile leaves.
  static constexpr int kRowLanes = kColumnThreads < 32 ? kColumnThreads : 32;
  static constexpr int kPartialsPerRow = kColumnThreads / kRowLanes;
  static constexpr int kScratchBytes = kRowThreads * kTileN * int(sizeof(float));

  static_assert(kTileN % kVector == 0 && kThreads % kColumnThreads == 0, "a thread owns one column vector");
  static_assert(kTileM % kRowThreads == 0 && kSteps % kSlots == 0, "every thread takes the same steps");

  static __device__ int column() { return int(threadIdx.x) % kColumnThreads * kVector; }
  static __device__ int row(int step) { return int(threadIdx.x) / kColumnThreads + step * kRowThreads; }
};

template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T data[N];
};

template <class To, class From, int N>
struct Rounded {
  static __device__ Vector<To, N> of(From const (&values)[N]) {
    cutlass::Array<float, N> source;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { source[i] = values[i]; }
    auto rounded = cutlass::NumericArrayConverter<To, float, N, cutlass::FloatRoundStyle::round_to_nearest>{}(source);
    Vector<To, N> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { result.data[i] = rounded[i]; }
    return result;
  }
};

// float to float, and int32 to int32: nothing to round.
template <class T, int N>
struct Rounded<T, T, N> {
  static __device__ Vector<T, N> of(T const (&values)[N]) {
    Vector<T, N> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { result.data[i] = values[i]; }
    return result;
  }
};

template <int N>
struct Rounded<double, float, N> {
  static __device__ Vector<double, N> of(float const (&values)[N]) {
    Vector<double, N> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { result.data[i] = values[i]; }
    return result;
  }
};

template <int N>
struct Rounded<bool, float, N> {
  static __device__ Vector<bool, N> of(float const (&values)[N]) {
    Vector<bool, N> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { result.data[i] = values[i] != 0.f; }
    return result;
  }
};

template <int N>
struct Rounded<int8_t, float, N> {
  static __device__ Vector<int8_t, N> of(float const (&values)[N]) {
    Vector<int8_t, N> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) {
      int32_t saturated;
      asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(saturated) : "f"(values[i]));
      result.data[i] = static_cast<int8_t>(saturated);
    }
    return result;
  }
};

// ---- Inputs. `fetch(slot, row)` starts the loads of one row of the tile; `value(slot, i)` is column `i` of it. ----

template <class T, class Map>
struct ScalarBroadcast {
  float scalar;

  __device__ ScalarBroadcast(InputArgs const& args, Tile const& tile) : scalar(args.value) {
    if (args.ptr) { scalar = static_cast<float>(static_cast<T const*>(args.ptr)[tile.batch * args.batch_stride]); }
  }
  __device__ void fetch(int, int) {}
  __device__ float value(int, int) const { return scalar; }
};

template <class T, class Map>
struct RowBroadcast {
  float values[Map::kVector];

  __device__ RowBroadcast(InputArgs const& args, Tile const& tile) {
    T const* ptr = static_cast<T const*>(args.ptr) + tile.batch * args.batch_stride + tile.column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) {
      int column = Map::column() + i;
      values[i] = column < tile.columns ? static_cast<float>(ptr[column]) : 0.f;
    }
  }
  __device__ void fetch(int, int) {}
  __device__ float value(int, int i) const { return values[i]; }
};

template <class T, class Map>
struct ColBroadcast {
  T const* ptr;
  int rows;
  T fetched[Map::kSlots];

  __device__ ColBroadcast(InputArgs const& args, Tile const& tile)
      : ptr(static_cast<T const*>(args.ptr) + tile.batch * args.batch_stride + tile.row), rows(tile.rows) {}
  __device__ void fetch(int slot, int row) { fetched[slot] = row < rows ? ptr[row] : T{}; }
  __device__ float value(int slot, int) const { return static_cast<float>(fetched[slot]); }
};

template <class T, class Map>
struct AuxLoad {
  using Access = Vector<T, Map::kVector>;
  T const* ptr;
  int64_t row_stride;
  int rows, columns;
  Access fetched[Map::kSlots];

  __device__ AuxLoad(InputArgs const& args, Tile const& tile)
      : ptr(static_cast<T const*>(args.ptr) + tile.batch * args.batch_stride + tile.row * args.row_stride +
            tile.column + Map::column()),
        row_stride(args.row_stride), rows(tile.rows), columns(tile.columns - Map::column()) {}
  __device__ void fetch(int slot, int row) {
    T const* source = ptr + row * row_stride;
    if (row < rows && columns >= Map::kVector) {
      fetched[slot] = *reinterpret_cast<Access const*>(source);
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) { fetched[slot].data[i] = row < rows && i < columns ? source[i] : T{}; }
  }
  __device__ float value(int slot, int i) const { return static_cast<float>(fetched[slot].data[i]); }
};

template <class T, class Map>
struct RowIndex {
  int origin;
  int fetched[Map::kSlots];

  __device__ RowIndex(InputArgs const&, Tile const& tile) : origin(tile.row) {}
  __device__ void fetch(int slot, int row) { fetched[slot] = origin + row; }
  __device__ int value(int slot, int) const { return fetched[slot]; }
};

template <class T, class Map>
struct ColIndex {
  int origin;

  __device__ ColIndex(InputArgs const&, Tile const& tile) : origin(tile.column + Map::column()) {}
  __device__ void fetch(int, int) {}
  __device__ int value(int, int i) const { return origin + i; }
};

// ---- Outputs. `put(row, values)` takes one row of functor results; `finish(scratch)` ends the tile. ----

template <class T, class From, class Map>
struct AuxStore {
  using Access = Vector<T, Map::kVector>;
  T* ptr;
  int64_t row_stride;
  int rows, columns;

  __device__ AuxStore(OutputArgs const& args, Tile const& tile)
      : ptr(static_cast<T*>(args.ptr) + tile.batch * args.batch_stride + tile.row * args.row_stride + tile.column +
            Map::column()),
        row_stride(args.row_stride), rows(tile.rows), columns(tile.columns - Map::column()) {}
  __device__ void put(int row, From const (&values)[Map::kVector]) {
    Access rounded = Rounded<T, From, Map::kVector>::of(values);
    T* target = ptr + row * row_stride;
    if (row >= rows) { return; }
    if (columns >= Map::kVector) {
      *reinterpret_cast<Access*>(target) = rounded;
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) {
      if (i < columns) { target[i] = rounded.data[i]; }
    }
  }
  __device__ void finish(float*) {}
};

struct Sum {
  static __device__ float identity() { return 0.f; }
  static __device__ float apply(float a, float b) { return a + b; }
};

// max and min keep a NaN of either side, as torch.amax does; CUDA's fmaxf drops it.
struct Max {
  static __device__ float identity() { return -__int_as_float(0x7f800000); }
  static __device__ float apply(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
  }
};

struct Min {
  static __device__ float identity() { return __int_as_float(0x7f800000); }
  static __device__ float apply(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
  }
};

// Reduces M: one partial row vector for each row of CTA tiles, combined across the threads of a column in shared memory.
template <class Op, class Map>
struct RowReduction {
  float* ptr;
  int rows, columns;
  float reduced[Map::kVector];

  __device__ RowReduction(OutputArgs const& args, Tile const& tile)
      : ptr(static_cast<float*>(args.ptr) + tile.batch * args.batch_stride + tile.grid_row * args.row_stride +
            tile.column),
        rows(tile.rows), columns(tile.columns) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) { reduced[i] = Op::identity(); }
  }
  __device__ void put(int row, float const (&values)[Map::kVector]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) { reduced[i] = row < rows ? Op::apply(reduced[i], values[i]) : reduced[i]; }
  }
  __device__ void finish(float* scratch) {
    __syncthreads();  // a reduction before this one may still read the scratch
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) { scratch[Map::row(0) * Map::kTileN + Map::column() + i] = reduced[i]; }
    __syncthreads();
    for (int column = threadIdx.x; column < Map::kTileN && column < columns; column += Map::kThreads) {
      float total = scratch[column];
      for (int row = 1; row < Map::kRowThreads; ++row) { total = Op::apply(total, scratch[row * Map::kTileN + column]); }
      ptr[column] = total;
    }
  }
};

// Reduces N: kPartialsPerRow partial column vectors for each column of CTA tiles, combined across the lanes of a row.
template <class Op, class Map>
struct ColReduction {
  float* ptr;
  int rows, columns;

  __device__ ColReduction(OutputArgs const& args, Tile const& tile)
      : ptr(static_cast<float*>(args.ptr) + tile.batch * args.batch_stride +
            (int64_t(tile.grid_column) * Map::kPartialsPerRow + Map::column() / (Map::kRowLanes * Map::kVector)) *
                args.row_stride +
            tile.row),
        rows(tile.rows), columns(tile.columns - Map::column()) {}
  __device__ void put(int row, float const (&values)[Map::kVector]) {
    float total = Op::identity();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Map::kVector; ++i) { total = i < columns ? Op::apply(total, values[i]) : total; }
    CUTLASS_PRAGMA_UNROLL
    for (int lanes = Map::kRowLanes / 2; lanes > 0; lanes /= 2) {
      total = Op::apply(total, __shfl_xor_sync(0xffffffffu, total, lanes));
    }
    if (row < rows && threadIdx.x % Map::kRowLanes == 0) { ptr[row] = total; }
  }
  __device__ void finish(float*) {}
};

}  // namespace gemmgen::sm80
