// Element types for kernels that NVRTC compiles without headers: storage, and exact conversion to and from fp32.
namespace gg {

struct F32 {
  using Storage = float;
  static __device__ __forceinline__ float decode(Storage x) { return x; }
  static __device__ __forceinline__ Storage encode(float x) { return x; }
};
struct F64 {  // in memory only: the arithmetic is fp32
  using Storage = double;
  static __device__ __forceinline__ float decode(Storage x) { return static_cast<float>(x); }
  static __device__ __forceinline__ Storage encode(float x) { return x; }
};
struct I32 {
  using Storage = int;
  static __device__ __forceinline__ float decode(Storage x) { return static_cast<float>(x); }
  static __device__ __forceinline__ Storage encode(int x) { return x; }
};
struct I8 {
  using Storage = signed char;
  static __device__ __forceinline__ float decode(Storage x) { return static_cast<float>(x); }
  static __device__ __forceinline__ Storage encode(float x) {
    return static_cast<Storage>(static_cast<int>(round_i8(x)));
  }
};
struct BOOL {
  using Storage = unsigned char;
  static __device__ __forceinline__ float decode(Storage x) { return x ? 1.f : 0.f; }
};
struct BF16 {
  using Storage = unsigned short;
  static __device__ __forceinline__ float decode(Storage x) {
    return __uint_as_float(static_cast<unsigned>(x) << 16);
  }
  static __device__ __forceinline__ Storage encode(float x) {
    Storage y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
};
struct F16 {
  using Storage = unsigned short;
  static __device__ __forceinline__ float decode(Storage x) {
    float y;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "h"(x));
    return y;
  }
  static __device__ __forceinline__ Storage encode(float x) {
    Storage y;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(y) : "f"(x));
    return y;
  }
};
struct E4M3 {
  using Storage = unsigned char;
  static __device__ __forceinline__ float decode(Storage x) {
    unsigned magnitude = x & 0x7fu;
    // the exponent bias is 7, fp32's is 127: moving the bits and scaling by 2^120 is exact, subnormals included
    float y = __uint_as_float(magnitude << 20) * __uint_as_float(247u << 23);
    y = magnitude == 0x7fu ? __uint_as_float(0x7fc00000u) : y;
    return x & 0x80u ? -y : y;
  }
  static __device__ __forceinline__ Storage encode(float x) {
    float y = round_e4m3(x);
    unsigned sign = __float_as_uint(x) >> 31 << 7;
    unsigned magnitude = __float_as_uint(fabsf(y) * __uint_as_float(7u << 23)) >> 20;  // 2^-120
    return static_cast<Storage>(sign | (y != y ? 0x7fu : magnitude));
  }
};
struct E5M2 {
  using Storage = unsigned char;
  static __device__ __forceinline__ float decode(Storage x) {
    return F16::decode(static_cast<unsigned short>(x) << 8);  // the upper half of an fp16
  }
  static __device__ __forceinline__ Storage encode(float x) {
    return x != x ? 0x7fu : static_cast<Storage>(F16::encode(round_e5m2(x)) >> 8);
  }
};

// N consecutive elements, moved in accesses of at most 16 bytes; `ptr` is aligned to min(16, N * sizeof) bytes.
template <int Bytes> struct Chunk;
template <> struct Chunk<1> { using Type = unsigned char; };
template <> struct Chunk<2> { using Type = unsigned short; };
template <> struct Chunk<4> { using Type = unsigned; };
template <> struct Chunk<8> { using Type = uint2; };
template <> struct Chunk<16> { using Type = uint4; };

template <class Element, int N>
struct Vector {
  using Storage = typename Element::Storage;
  static constexpr int kBytes = N * static_cast<int>(sizeof(Storage));
  static constexpr int kChunkBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kChunks = kBytes / kChunkBytes;
  using ChunkType = typename Chunk<kChunkBytes>::Type;
  union {
    Storage elements[N];
    ChunkType chunks[kChunks];
  };
  __device__ __forceinline__ void load(void const* base, int64_t offset) {
    auto source = reinterpret_cast<ChunkType const*>(static_cast<Storage const*>(base) + offset);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) { chunks[i] = __ldcs(source + i); }
  }
  __device__ __forceinline__ void store(void* base, int64_t offset) const {
    auto target = reinterpret_cast<ChunkType*>(static_cast<Storage*>(base) + offset);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) { target[i] = chunks[i]; }
  }
};

}  // namespace gg
