"""Loading and launching: the ctypes mirror against the C++ header, and a driver that is a fake."""

import ctypes
import subprocess
import threading
from pathlib import Path

import pytest

from gemmgen.errors import CacheError, LaunchError
from gemmgen.jit import load
from gemmgen.jit.build import BuiltKernel
from gemmgen.jit.load import Args, InputArgs, Kernel, MatrixArgs, Module, OutputArgs, load_kernel, load_module
from gemmgen.jit.toolchain import template_include_dir

LAUNCHER = """
#include <gemmgen/abi.h>
extern "C" int gemmgen_abi_version() { return ABI; }
extern "C" int gemmgen_smem_bytes() { return 200 * 1024; }
extern "C" int64_t gemmgen_workspace_bytes(gemmgen::Args const* args) { return int64_t(args->m) * args->n * 4; }
extern "C" int gemmgen_partial_count(gemmgen::Args const* args, int i) { return args->split_k + i; }
extern "C" int gemmgen_run(void* kernel, gemmgen::Args const* args, void* workspace, void* stream) {
  if (kernel != (void*)77 || workspace != (void*)0x7f0000000010 || stream != (void*)0x7f0000000020) { return 1; }
  return args->outputs[7].batch_stride == 1 << 30 ? 0 : args->k;
}
"""


def gxx(*args: str) -> None:
    subprocess.run(["g++", "-std=c++17", f"-I{template_include_dir()}", *args], check=True)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> dict[int, Path]:
    """Launcher libraries, by the ABI version that they report."""
    folder = tmp_path_factory.mktemp("launcher")
    (folder / "launcher.cpp").write_text(LAUNCHER)
    found = {}
    for abi in (load.ABI_VERSION, load.ABI_VERSION + 1):
        found[abi] = folder / f"launcher{abi}.so"
        gxx("-shared", "-fPIC", f"-DABI={abi}", "-o", str(found[abi]), str(folder / "launcher.cpp"))
    return found


class FakeDriver:
    """As much of libcuda as loading needs. `contexts` has the current context; `refuse` the calls that fail."""

    def __init__(self):
        self.context = 5
        self.refuse: dict[str, int] = {}
        self.loaded: list[bytes] = []
        self.launches: list[tuple[object, ...]] = []
        self.capture_mode, self.modes = 0, []
        self.attributes: list[tuple[int, int]] = []

    def _status(self, name: str) -> int:
        return self.refuse.get(name, 0)

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return self._status("cuCtxGetCurrent")

    def cuModuleLoadData(self, module, image):
        self.loaded.append(image)
        self.modes.append(self.capture_mode)
        module._obj.value = 42
        return self._status("cuModuleLoadData")

    def cuThreadExchangeStreamCaptureMode(self, mode):
        mode._obj.value, self.capture_mode = self.capture_mode, mode._obj.value
        return 0

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = 77
        return 0 if name in (b"mangled", b"plain") else 500

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((attribute, value))
        return self._status("cuFuncSetAttribute")

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, pointers, extra = rest
        values = [ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int64)).contents.value for pointer in pointers]
        self.launches.append((function.value, *shape, stream, values, extra))
        return self._status("cuLaunchKernel")

    def cuGetErrorName(self, status, text):
        text._obj.value = f"CUDA_ERROR_{status}".encode()
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"words of the driver"
        return 0


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(load, "driver", lambda: fake)
    monkeypatch.setattr(load, "_kernels", {})
    monkeypatch.setattr(load, "_modules", {})
    return fake


@pytest.fixture
def built(tmp_path, launcher) -> BuiltKernel:
    (tmp_path / "kernel.cubin").write_bytes(b"cubin")
    library = launcher[load.ABI_VERSION]
    return BuiltKernel("gelu", "sm90", tmp_path / "kernel.cubin", library, "mangled", 168, 0, 30.0, 3.0)


def runnable_args() -> Args:
    args = Args(m=3, n=5, k=700, split_k=2)
    args.outputs[7].batch_stride = 1 << 30
    return args


def test_the_mirror_has_the_layout_of_the_header(tmp_path):
    structs = {"Args": Args, "MatrixArgs": MatrixArgs, "InputArgs": InputArgs, "OutputArgs": OutputArgs}
    lines = [f'std::printf("{name} %zu\\n", sizeof(gemmgen::{name}));' for name in structs]
    expected = [f"{name} {ctypes.sizeof(struct)}" for name, struct in structs.items()]
    for name, struct in structs.items():
        for field, *_ in struct._fields_:
            lines.append(f'std::printf("{name}.{field} %zu\\n", offsetof(gemmgen::{name}, {field}));')
            expected.append(f"{name}.{field} {getattr(struct, field).offset}")
    lines.append('std::printf("%d %d %d\\n", gemmgen::kAbiVersion, gemmgen::kMaxInputs, gemmgen::kMaxOutputs);')
    expected.append(f"{load.ABI_VERSION} {load.MAX_INPUTS} {load.MAX_OUTPUTS}")
    program = tmp_path / "layout.cpp"
    program.write_text("#include <cstdio>\n#include <gemmgen/abi.h>\nint main() {\n" + "\n".join(lines) + "\n}\n")
    gxx("-o", str(tmp_path / "layout"), str(program))

    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout

    assert printed.splitlines() == expected


def test_a_kernel_passes_its_arguments_through(driver, built):
    kernel = load_kernel(built)
    args = runnable_args()
    kernel.run(args, 0x7F0000000010, 0x7F0000000020)
    assert kernel.workspace_bytes(args) == 60
    assert kernel.partial_count(args, 3) == 5
    assert driver.attributes == [(8, 200 * 1024)]


def test_a_kernel_is_loaded_once_per_context(driver, built):
    first = load_kernel(built)
    assert load_kernel(built) is first
    driver.context = 6
    assert load_kernel(built) is not first
    assert len(driver.loaded) == 2


def test_a_module_may_be_loaded_while_the_thread_captures(driver, built):
    load_kernel(built)
    load_module(built.cubin)
    assert driver.modes == [2, 2]  # CU_STREAM_CAPTURE_MODE_RELAXED
    assert driver.capture_mode == 0  # as it was
    driver.refuse["cuModuleLoadData"] = 200
    driver.context += 1
    with pytest.raises(LaunchError):
        load_kernel(built)
    assert driver.capture_mode == 0


def test_threads_load_a_kernel_once(driver, built):
    kernels: list[Kernel] = []
    threads = [threading.Thread(target=lambda: kernels.append(load_kernel(built))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.loaded) == 1
    assert len(set(map(id, kernels))) == 1


def test_a_refused_launch_names_kernel_extents_and_the_drivers_words(driver, built):
    args = runnable_args()
    args.outputs[7].batch_stride = 0
    with pytest.raises(LaunchError, match=r"`gelu`.*CUDA_ERROR_700: words of the driver\n  M=3, N=5, K=700, L=0"):
        load_kernel(built).run(args, 0x7F0000000010, 0x7F0000000020)
    args.k = -1
    with pytest.raises(LaunchError, match="it cannot run these arguments"):
        load_kernel(built).run(args, 0x7F0000000010, 0x7F0000000020)


def test_no_current_context_is_an_error_with_a_mend(driver, built):
    driver.context = None
    with pytest.raises(LaunchError, match="no CUDA context is current"):
        load_kernel(built)
    driver.refuse["cuCtxGetCurrent"] = 3
    with pytest.raises(LaunchError, match="CUDA_ERROR_3"):
        load_kernel(built)


def test_what_the_driver_cannot_load_is_named(driver, built):
    driver.refuse["cuModuleLoadData"] = 209
    with pytest.raises(LaunchError, match=r"kernel\.cubin: CUDA_ERROR_209"):
        load_kernel(built)


def test_too_much_shared_memory_is_named(driver, built):
    driver.refuse["cuFuncSetAttribute"] = 1
    with pytest.raises(LaunchError, match="`gelu` cannot have 204800 bytes of shared memory"):
        load_kernel(built)


def test_an_evicted_kernel_says_to_build_it_again(driver, built):
    built.cubin.unlink()
    with pytest.raises(CacheError, match="build it again"):
        load_kernel(built)


def test_a_launcher_of_another_abi_is_refused(driver, built, launcher):
    other = BuiltKernel(**{**vars(built), "launcher": launcher[load.ABI_VERSION + 1]})
    with pytest.raises(LaunchError, match="ABI 2"):
        load_kernel(other)


def test_a_launcher_that_is_no_library_is_refused(driver, built, tmp_path):
    (tmp_path / "launcher.so").write_bytes(b"no library")
    with pytest.raises(LaunchError, match="launcher of kernel `gelu`"):
        load_kernel(BuiltKernel(**{**vars(built), "launcher": tmp_path / "launcher.so"}))


def test_handles_of_a_parent_process_are_refused_and_forgotten(driver, built, monkeypatch):
    kernel, module = load_kernel(built), load_module(built.cubin)
    monkeypatch.setattr(load, "_generation", load._generation)
    load._after_fork()  # what runs in the child
    for use in (lambda: kernel.run(runnable_args(), 0, 0), lambda: module.launch("plain", (1, 1, 1), (1, 1, 1), [], 0)):
        with pytest.raises(LaunchError, match="before this process was forked"):
            use()
    assert load_kernel(built) is not kernel


def test_a_module_launches_by_name_with_any_ctypes_values(driver, built):
    module = load_module(built.cubin)
    assert load_module(built.cubin) is module
    arguments = [ctypes.c_void_p(0x7F0000000010), ctypes.c_int64(-3), Args(m=9, n=0)]
    module.launch("plain", (4, 3, 2), (128, 1, 1), arguments, 11, smem_bytes=64)
    assert driver.launches == [(77, 4, 3, 2, 128, 1, 1, 64, 11, [0x7F0000000010, -3, 9], None)]


def test_a_module_names_what_it_cannot_launch(driver, built):
    module = Module(built.cubin)
    with pytest.raises(LaunchError, match="no function absent"):
        module.launch("absent", (1, 1, 1), (1, 1, 1), [], 0)
    driver.refuse["cuLaunchKernel"] = 1
    with pytest.raises(LaunchError, match=r"`plain` was not launched: CUDA_ERROR_1.*\n  grid \(0, 1, 1\)"):
        module.launch("plain", (0, 1, 1), (1, 1, 1), [], 0)


def test_a_machine_without_a_driver_is_told_so(monkeypatch):
    def missing(name, mode=0):
        raise OSError("libcuda.so.1: cannot open shared object file")

    load.driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(LaunchError, match="Install the NVIDIA driver"):
        load.driver()
