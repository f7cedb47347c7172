// Runs two copies of one launcher under a driver that only counts, and prints what each call made it do.
#include <cuda.h>
#include <dlfcn.h>
#include <gemmgen/abi.h>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {
int encoded, cleared, launched;
CUresult encode_result = CUDA_SUCCESS;
std::vector<char> params;
size_t (*params_bytes)();
}  // namespace

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address,
                                           cuuint64_t const* extents, cuuint64_t const* strides, cuuint32_t const*,
                                           cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ++encoded;
  std::memset(map, 0, sizeof *map);
  map->opaque[0] = reinterpret_cast<cuuint64_t>(address);
  std::memcpy(map->opaque + 1, extents, rank * sizeof *extents);
  std::memcpy(map->opaque + 1 + rank, strides, (rank - 1) * sizeof *strides);
  return encode_result;
}

extern "C" CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream) {
  ++cleared;
  return CUDA_SUCCESS;
}

extern "C" CUresult cuLaunchKernelEx(CUlaunchConfig const*, CUfunction, void** kernel_params, void**) {
  ++launched;
  auto const* bytes = static_cast<char const*>(kernel_params[0]);
  params.assign(bytes, bytes + params_bytes());
  return CUDA_SUCCESS;
}

namespace {

using Run = int (*)(CUfunction, gemmgen::Args const*, void*, CUstream);

Run loaded(char const* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) { std::puts(dlerror()); }
  params_bytes = reinterpret_cast<size_t (*)()>(dlsym(library, "params_bytes"));
  return reinterpret_cast<Run>(dlsym(library, "gemmgen_run"));
}

void* address(int64_t number) { return reinterpret_cast<void*>(0x7f0000000000 + number * 0x100000); }

gemmgen::Args call_of(int weight, int32_t m = 512, int64_t ld = 256) {
  gemmgen::Args x{};
  x.m = m, x.n = 384, x.k = 256, x.l = 1;
  x.a = {address(1), ld, 0};
  x.b = {address(100 + weight), 256, 0};
  x.inputs[0].ptr = address(2);
  x.outputs[0] = {address(3), 384, 0};
  x.sm_count = 132, x.swizzle = 1, x.split_k = 2;
  return x;
}

bool passed(uint64_t word) {
  for (size_t at = 0; at + sizeof word <= params.size(); at += sizeof word) {
    if (std::memcmp(params.data() + at, &word, sizeof word) == 0) { return true; }
  }
  return false;
}

bool passed(void const* pointer) { return passed(reinterpret_cast<uint64_t>(pointer)); }

// Whether what was launched has the pointers, M and the stride of A that the call has.
bool is_right(gemmgen::Args const& x, void* workspace) {
  return passed(x.a.ptr) && passed(x.b.ptr) && passed(x.inputs[0].ptr) && passed(x.outputs[0].ptr) &&
         passed(workspace) && passed(uint64_t(x.m)) && passed(uint64_t(x.a.ld * 2));
}

void report(char const* name, Run run, std::vector<gemmgen::Args> const& calls, void* workspace = address(9)) {
  encoded = cleared = launched = 0;
  int status = 0, right = 0;
  for (auto const& x : calls) {
    int before = launched;
    int code = run(nullptr, &x, workspace, nullptr);
    status = code != 0 ? code : status;
    right += launched > before && is_right(x, workspace);
  }
  std::printf("%s: status %d, encoded %d, cleared %d, launched %d, right %d\n", name, status, encoded, cleared,
              launched, right);
}

}  // namespace

int main(int, char** paths) {
  Run run = loaded(paths[1]), other = loaded(paths[2]);
  auto x = call_of(0);
  encode_result = CUDA_ERROR_INVALID_VALUE;
  report("refused", run, {x});
  encode_result = CUDA_SUCCESS;
  report("first", run, {x});
  report("again", run, {x, x, x});
  auto bias = x, output = x;
  bias.inputs[0].ptr = address(4);
  output.outputs[0].ptr = address(5);
  report("other pointers", run, {bias, output, call_of(1), x, bias, output, call_of(1)});
  report("other workspace", run, {x}, address(8));
  report("other shape and stride", run, {call_of(0, 256), call_of(0, 512, 512), x, call_of(0, 256)});
  std::vector<gemmgen::Args> layers, many;
  for (int i = 0; i < 300; ++i) { (i < 80 ? layers : many).push_back(call_of(i)); }
  report("layers", run, layers);
  report("layers again", run, layers);
  report("evicting", run, many);
  report("evicted", run, {x, x});
  std::thread([&] { report("a thread", run, {x, x}); }).join();
  report("the first thread", run, {x});
  report("another launcher", other, {x, x});
  x.a.ptr = static_cast<char const*>(x.a.ptr) + 2;
  report("misaligned", run, {x});
}
