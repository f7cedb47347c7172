"""The whole build path with the real compilers, on a skeleton without CUTLASS so that it takes a second."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmgen.arch import ARCHS, arch_named
from gemmgen.errors import CompileError, LaunchError
from gemmgen.jit import Args, build, build_module, find, load_kernel, load_module
from gemmgen.jit.cache import SKELETONS, Cache
from gemmgen.jit.compile import compile_cubin, compile_functor, compile_skeleton
from gemmgen.jit.link import link
from gemmgen.source import KernelSource

pytestmark = pytest.mark.compile

SM90 = arch_named("sm90")
SKELETON = """
#include <gemmgen/abi.h>
#ifndef GEMMGEN_LAUNCHER
extern "C" __device__ float gemmgen_functor_0(float accum, float row);
__global__ void add_row(gemmgen::Args args) {
  int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
  if (n < args.n) {
    float accum = static_cast<float const*>(args.a.ptr)[m * args.a.ld + n];
    float row = static_cast<float const*>(args.inputs[0].ptr)[n];
    static_cast<float*>(args.outputs[0].ptr)[m * args.outputs[0].row_stride + n] = gemmgen_functor_0(accum, row);
  }
}
#else
#include <cuda.h>
extern "C" int gemmgen_abi_version() { return gemmgen::kAbiVersion; }
extern "C" int gemmgen_smem_bytes() { return 64 * 1024; }
extern "C" int64_t gemmgen_workspace_bytes(gemmgen::Args const* args) { return args->m; }
extern "C" int gemmgen_partial_count(gemmgen::Args const*, int i) { return i; }
extern "C" int gemmgen_run(CUfunction kernel, gemmgen::Args const* args, void*, CUstream stream) {
  if (args->k != 1) { return -1; }
  gemmgen::Args copy = *args;
  void* params[] = {&copy};
  return cuLaunchKernel(kernel, (args->n + 127) / 128, args->m, 1, 128, 1, 1, 64 * 1024, stream, params, nullptr);
}
#endif
"""
FUNCTOR = 'extern "C" __device__ float gemmgen_functor_0(float accum, float row) { return accum * 2.f + row; }\n'
# 600 values that are all live at once do not fit into 255 registers
SPILLING = """
extern "C" __device__ float gemmgen_functor_0(float accum, float row) {
  float x[600];
#pragma unroll
  for (int i = 0; i < 600; ++i) { asm volatile("mov.b32 %0, %%clock;" : "=f"(x[i])); }
#pragma unroll
  for (int i = 599; i >= 0; --i) { row = row * x[i] + accum; }
  return row;
}
"""


@pytest.fixture(scope="module")
def skeleton():
    return compile_skeleton(SKELETON, SM90)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Cache:
    monkeypatch.setenv("GEMMGEN_CACHE_DIR", str(tmp_path / "cache é"))
    return Cache(tmp_path / "cache é")


def test_a_kernel_goes_through_the_whole_path_once(cache):
    source = KernelSource("add_row", SM90, SKELETON, FUNCTOR)
    (built,) = build([source])

    assert built.cubin.read_bytes().startswith(b"\x7fELF")
    assert "add_row" in built.function
    assert 0 < built.registers < 64
    started = time.perf_counter()
    assert find(source) == built
    assert time.perf_counter() - started < 0.5  # it compiled nothing
    symbols = subprocess.run(["nm", "-D", built.launcher], capture_output=True, text=True, check=True).stdout
    for export in ("abi_version", "smem_bytes", "workspace_bytes", "partial_count", "run"):
        assert f" T gemmgen_{export}\n" in symbols


def test_a_second_epilogue_reuses_the_skeleton(cache):
    build([KernelSource("first", SM90, SKELETON, FUNCTOR)])
    (skeleton,) = (entry for entry in cache.entries() if entry.kind == SKELETONS)
    build([KernelSource("second", SM90, SKELETON, FUNCTOR.replace("2.f", "3.f"))])
    assert [entry.path for entry in cache.entries() if entry.kind == SKELETONS] == [skeleton.path]


def test_a_source_of_known_inputs_is_found_without_rendering(cache):
    def source() -> KernelSource:
        return KernelSource("add_row", SM90, lambda: SKELETON, lambda: FUNCTOR, inputs="row")

    def never() -> str:
        raise AssertionError("rendered")

    (built,) = build([source()])
    assert find(KernelSource("add_row", SM90, never, never, inputs="row")) == built
    assert find(KernelSource("add_row", SM90, SKELETON, FUNCTOR)) == built  # the entry itself goes by the texts
    with pytest.raises(AssertionError, match="rendered"):
        find(KernelSource("add_row", SM90, never, never, inputs="another row"))


def test_the_functor_is_inlined(skeleton):
    linked = link({"skeleton": skeleton.ltoir, "functor": compile_functor(FUNCTOR, SM90)}, SM90)
    assert linked.stack_bytes == 0
    assert b"gemmgen_functor_0" not in linked.cubin


def test_a_missing_functor_is_named(skeleton):
    other = 'extern "C" __device__ float other() { return 0.f; }'
    with pytest.raises(CompileError, match="gemmgen_functor_0"):
        link({"skeleton": skeleton.ltoir, "functor": compile_functor(other, SM90)}, SM90)


def test_spills_are_refused_unless_allowed(skeleton):
    parts = {"skeleton": skeleton.ltoir, "functor": compile_functor(SPILLING, SM90)}
    with pytest.raises(CompileError, match="spills"):
        link(parts, SM90)
    assert link(parts, SM90, allow_spills=True).spill_bytes > 0


def test_a_kernel_that_spilled_is_refused_again_without_being_built(cache, monkeypatch):
    source = KernelSource("spilling", SM90, SKELETON, SPILLING)
    with pytest.raises(CompileError, match="spills"):
        build([source])
    monkeypatch.setattr(sys.modules["gemmgen.jit.build"], "link", None)
    with pytest.raises(CompileError, match="spills"):
        build([source])
    assert find(source) is None


def test_two_kernels_in_a_cubin_are_refused(skeleton):
    second = FUNCTOR + 'extern "C" __global__ void second(float* x) { x[0] = 1.f; }'
    with pytest.raises(CompileError, match="holds 2"):
        link({"skeleton": skeleton.ltoir, "functor": compile_functor(second, SM90)}, SM90)


def test_nvccs_first_error_is_shown_and_the_source_kept(cache):
    broken = SKELETON.replace("args.a.ld", "args.a.no_such_field")
    with pytest.raises(CompileError, match=r"skeleton\.cu\(8\): error: .*no_such_field") as caught:
        build([KernelSource("broken", SM90, broken, FUNCTOR)])
    assert Path(caught.value.source_path).read_text() == broken


def test_nvrtcs_first_error_is_shown_and_the_source_kept(cache):
    with pytest.raises(CompileError, match=r"\(1\): error: identifier \"b\" is undefined") as caught:
        build([KernelSource("broken", SM90, SKELETON, FUNCTOR.replace("row;", "b;"))])
    assert Path(caught.value.source_path).read_text() == FUNCTOR.replace("row;", "b;")


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_every_arch_compiles_functors_and_modules(arch):
    assert compile_functor(FUNCTOR, arch)
    assert compile_cubin('extern "C" __global__ void fill(float* x) { x[threadIdx.x] = 1.f; }', arch)


def test_a_module_needs_no_nvcc(cache, monkeypatch):
    monkeypatch.setenv("GEMMGEN_NVCC", "/nonexistent")
    text = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = 1.f; }'
    cubin = build_module(text, SM90)
    assert cubin.read_bytes().startswith(b"\x7fELF")
    assert build_module(text, SM90) == cubin


def test_a_program_that_ends_during_a_background_build_ends_at_once(cache, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import threading, time\n"
        "from gemmgen.arch import arch_named\n"
        "from gemmgen.jit import build\n"
        "from gemmgen.source import KernelSource\n"
        "slow = '#include <cute/tensor.hpp>\\n#include <cutlass/gemm/collective/collective_builder.hpp>\\n'\n"
        "source = KernelSource('slow', arch_named('sm90'), slow, '')\n"
        "threading.Thread(target=build, args=([source],), daemon=True).start()\n"
        "time.sleep(1.0)\n"
        "print(time.time(), flush=True)\n"
    )
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=120)
    assert time.time() - float(result.stdout) < 5
    assert not (tmp_path / "cache é/failed").exists()


@pytest.mark.gpu(sm=90)
def test_the_same_kernel_is_linked_again_though_the_driver_caches(skeleton):
    import torch

    torch.zeros(1, device="cuda")  # nvJitLink's cache is the driver's
    functor = compile_functor(FUNCTOR.replace("*", " * ", 1), SM90)
    first, again = (link({"skeleton": skeleton.ltoir, "functor": functor}, SM90) for _ in range(2))
    assert (again.kernel, again.registers, again.cubin) == (first.kernel, first.registers, first.cubin)


@pytest.mark.gpu(sm=90)
def test_a_built_kernel_and_a_module_run_on_the_gpu(cache):
    import ctypes

    import torch

    (built,) = build([KernelSource("add_row", SM90, SKELETON, FUNCTOR)])
    A = torch.randint(-9, 9, (3, 200), device="cuda").float()
    row, D = torch.arange(200, device="cuda").float(), torch.full((3, 200), -1.0, device="cuda")
    kernel, stream = load_kernel(built), torch.cuda.current_stream().cuda_stream
    args = Args(m=3, n=200, k=1, l=1)
    args.a.ptr, args.a.ld = A.data_ptr(), 200
    args.inputs[0].ptr, args.outputs[0].ptr, args.outputs[0].row_stride = row.data_ptr(), D.data_ptr(), 200

    kernel.run(args, 0, stream)
    assert torch.equal(D, A * 2 + row)
    assert (kernel.smem_bytes, kernel.workspace_bytes(args)) == (64 * 1024, 3)
    args.k = 2
    with pytest.raises(LaunchError, match="it cannot run these arguments"):
        kernel.run(args, 0, stream)

    text = 'extern "C" __global__ void fill(float* x, float y, int n) { if (threadIdx.x < n) x[threadIdx.x] = y; }'
    module = load_module(build_module(text, SM90))
    arguments = [ctypes.c_void_p(D.data_ptr()), ctypes.c_float(7.0), ctypes.c_int(200)]
    module.launch("fill", (1, 1, 1), (256, 1, 1), arguments, stream)
    assert D[0].eq(7).all()
    with pytest.raises(LaunchError, match="INVALID_VALUE"):
        module.launch("fill", (0, 1, 1), (256, 1, 1), arguments, stream)
