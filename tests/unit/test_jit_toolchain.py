"""Each fault of the toolchain, made with fake tools: the error says which tool, and how to mend it."""

import importlib.machinery
import os
from pathlib import Path

import pytest

from gemmgen.errors import ToolchainError
from gemmgen.jit import toolchain
from gemmgen.settings import Settings

FAKE_NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  *) echo '#$ TOP={top}' >&2; echo '#$ CICC_PATH={top}/nvvm/bin' >&2
     echo '#$ INCLUDES="-I{top}/include"  ' >&2; echo '#$ SYSTEM_INCLUDES="-isystem" "{top}/include/cccl"  ' >&2 ;;
esac
"""
HEADERS = ("cuda_runtime.h", "cuda.h", "crt/host_config.h", "cccl/cuda/std/utility")


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_toolkit(top: Path, release: str = "13.0") -> Path:
    """A folder that looks like a CUDA toolkit to gemmgen; the path of its nvcc."""
    for header in HEADERS:
        (top / "include" / header).parent.mkdir(parents=True, exist_ok=True)
        (top / "include" / header).touch()
    executable(top / "nvvm/bin/cicc")
    return executable(top / "bin/nvcc", FAKE_NVCC.format(release=release, top=top))


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with nothing but g++ on PATH, and NVRTC and nvJitLink 13.0."""
    bare = tmp_path / "bin"
    executable(bare / "g++")
    monkeypatch.setenv("PATH", f"{bare}:/bin")
    for name in ("GEMMGEN_NVCC", "GEMMGEN_CXX", "NVCC_CCBIN", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "no-system-cuda")
    monkeypatch.setattr(toolchain, "_nvidia_folders", list)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(toolchain, "nvjitlink_version", lambda: (13, 0))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: toolchain.Cutlass((tmp_path,), "4.2.0"))
    return bare


def expect(*texts: str):
    """The toolchain is refused with a message that has all of `texts`."""
    with pytest.raises(ToolchainError) as caught:
        toolchain.toolchain()
    for text in texts:
        assert text in str(caught.value)


def test_a_complete_toolkit_is_accepted(monkeypatch, tmp_path, machine):
    nvcc = make_toolkit(tmp_path / "cuda with space")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda with space"))

    found = toolchain.toolchain()

    assert (found.nvcc, found.nvcc_version, found.host_compiler) == (nvcc, "13.0.88", machine / "g++")


def test_no_nvcc_names_the_wheels():
    expect("nvcc was not found", 'pip install "nvidia-cuda-nvcc==13.0.*"', "nvidia-cuda-cccl", "GEMMGEN_NVCC")


def test_a_wrong_GEMMGEN_NVCC_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMGEN_NVCC", str(tmp_path / "nope"))
    expect(f"GEMMGEN_NVCC={tmp_path / 'nope'} is not an executable file")


def test_a_CUDA_HOME_without_nvcc_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    expect(f"CUDA_HOME={tmp_path} has no bin/nvcc", "unset it")


def test_an_old_nvcc_is_refused_and_a_newer_one_is_pointed_out(monkeypatch, tmp_path, machine):
    make_toolkit(tmp_path / "old", release="11.8")
    monkeypatch.setenv("PATH", f"{tmp_path / 'old/bin'}:{machine}:/bin")
    newer = make_toolkit(tmp_path / "newer")
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", newer.parents[1])
    expect("is version 11.8.88", "needs 12.8", str(newer))


def test_an_nvcc_that_is_not_one_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMGEN_NVCC", str(executable(tmp_path / "bin/nvcc", "#!/bin/sh\necho hello\n")))
    expect("does not print a version", "hello")


def test_an_nvcc_newer_than_nvjitlink_is_refused(monkeypatch, tmp_path):
    make_toolkit(tmp_path / "cuda", release="13.5")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    expect("nvcc 13.5.88 does not fit nvJitLink 13.0", '"nvidia-cuda-nvcc==13.0.*"', '"nvidia-nvjitlink>=13.5"')


def test_an_nvjitlink_of_an_older_cuda_is_refused_with_a_mend_that_leaves_torch_alone(monkeypatch, tmp_path):
    make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(toolchain, "nvjitlink_version", lambda: (12, 8))
    expect("nvcc 13.0.88 does not fit nvJitLink 12.8", '"nvidia-nvjitlink==13.0.*"', "beside torch's own")


@pytest.mark.parametrize("loaded, taken", [((), False), ((12,), True), ((13,), False), ((12, 13), False)], ids=str)
@pytest.mark.parametrize("what, stem", [("nvJitLink", "libnvJitLink"), ("NVRTC", "libnvrtc")])
def test_the_wheels_library_is_taken_beside_an_older_one_of_torchs(monkeypatch, tmp_path, what, stem, loaded, taken):
    opened = []
    library = executable(tmp_path / f"nvidia/cu13/lib/{stem}.so.13")
    builtins = executable(tmp_path / "nvidia/cu13/lib/libnvrtc-builtins.so.13.0")

    def cdll(path, mode=0):
        if mode == os.RTLD_NOLOAD and path not in [f"{stem}.so.{major}" for major in loaded]:
            raise OSError
        if mode == 0:
            opened.append(Path(path))

    monkeypatch.setattr(toolchain, "_nvidia_folders", lambda: [tmp_path / "nvidia"])
    monkeypatch.setattr(toolchain, "distribution_version", lambda name: "13.0.3")
    monkeypatch.setattr(toolchain.ctypes, "CDLL", cdll)
    toolchain._load_wheels_library(what)
    assert opened == ([] if not taken else [builtins, library] if what == "NVRTC" else [library])


def test_a_missing_host_compiler_is_named(monkeypatch, tmp_path, machine):
    make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    (machine / "g++").unlink()
    monkeypatch.setenv("PATH", str(machine))
    expect("g++ is not on PATH", "apt-get install g++", "GEMMGEN_CXX")


def test_a_wrong_GEMMGEN_CXX_is_named(monkeypatch, tmp_path):
    make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("GEMMGEN_CXX", "g++-99")
    expect("'g++-99'", "GEMMGEN_CXX")


def test_a_host_compiler_that_does_not_work_is_named(monkeypatch, tmp_path, machine):
    nvcc = make_toolkit(tmp_path / "cuda")
    fatal = "nvcc fatal   : Failed to preprocess host compiler properties."
    text = nvcc.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\n[ "$3" = -dryrun ] && echo "{fatal}" >&2 && exit 1\n')
    executable(nvcc, text)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    expect(fatal, str(machine / "g++"), "GEMMGEN_CXX")


@pytest.mark.parametrize(
    "lost, wheel",
    [
        ("include/cuda_runtime.h", "nvidia-cuda-runtime==13.0.*"),
        ("include/crt/host_config.h", "nvidia-cuda-crt==13.0.*"),
        ("include/cccl/cuda/std/utility", "nvidia-cuda-cccl==13.0.*"),
        ("nvvm/bin/cicc", "nvidia-nvvm==13.0.*"),
    ],
)
def test_a_missing_part_of_the_toolkit_names_its_wheel(monkeypatch, tmp_path, lost, wheel):
    make_toolkit(tmp_path / "cuda")
    (tmp_path / "cuda" / lost).unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    expect("has no", wheel)


def test_wheels_are_found_and_must_be_of_one_version(monkeypatch, tmp_path):
    nvcc = make_toolkit(tmp_path / "nvidia/cu13")
    versions = dict.fromkeys(toolchain.TOOLKIT_WHEELS, "13.0.88") | {"nvidia-cuda-cccl": "13.3.5", "nvidia-nvvm": ""}
    monkeypatch.setattr(toolchain, "_nvidia_folders", lambda: [tmp_path / "nvidia"])
    monkeypatch.setattr(toolchain, "distribution_version", lambda name: versions[name])

    assert toolchain.find_nvcc(Settings()) == nvcc
    expect("nvidia-nvvm (missing), nvidia-cuda-cccl 13.3.5", '"nvidia-cuda-cccl==13.0.*"')


def test_the_wheels_libraries_are_linked_from_lib(monkeypatch, tmp_path):
    make_toolkit(tmp_path / "nvidia/cu13")
    (tmp_path / "nvidia/cu13/lib").mkdir()
    (tmp_path / "nvidia/cu13/lib/libcudart_static.a").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nvidia/cu13"))

    assert toolchain.toolchain().library_dirs == (tmp_path / "nvidia/cu13/lib",)


def test_missing_cutlass_names_its_wheel(monkeypatch):
    monkeypatch.undo()
    toolchain.find_cutlass.cache_clear()
    monkeypatch.setattr(toolchain, "_cutlass_source", lambda: None)
    try:
        with pytest.raises(ToolchainError, match=r"nvidia-cutlass==4\.2"):
            toolchain.find_cutlass()
    finally:
        toolchain.find_cutlass.cache_clear()


def test_damaged_cutlass_is_told_apart_from_missing(monkeypatch, tmp_path):
    monkeypatch.undo()
    toolchain.find_cutlass.cache_clear()
    monkeypatch.setattr(toolchain, "_cutlass_source", lambda: tmp_path)
    try:
        with pytest.raises(ToolchainError, match="force-reinstall"):
            toolchain.find_cutlass()
    finally:
        toolchain.find_cutlass.cache_clear()


def test_cutlass_is_found_without_importing_it(monkeypatch):
    monkeypatch.undo()
    import sys

    found = toolchain.find_cutlass()

    assert (found.include_dirs[0] / "cutlass/cutlass.h").is_file()
    assert found.version.startswith("4.2")
    assert "cutlass_library" not in sys.modules


def test_a_missing_library_names_its_wheel(monkeypatch):
    def missing(_):
        raise RuntimeError("Failure finding libnvJitLink.so\nlong story")

    monkeypatch.setattr(toolchain.importlib, "import_module", missing)
    with pytest.raises(ToolchainError, match=r'nvJitLink was not found.*\n.*"nvidia-nvjitlink==13\.\*"'):
        toolchain._binding("nvjitlink", "nvJitLink", "nvidia-nvjitlink", "version")


@pytest.mark.parametrize(
    "nvcc, nvrtc, nvjitlink, fault",
    [
        ((13, 0, 88), (13, 0), (13, 0), None),
        ((13, 0, 88), (13, 0), (13, 5), None),
        (None, (13, 0), (13, 0), None),
        ((13, 0, 88), (13, 5), (13, 0), "NVRTC 13.5 does not fit nvJitLink 13.0"),
        ((13, 5, 37), (13, 0), (13, 0), "nvcc 13.5.37 does not fit nvJitLink 13.0"),
        ((12, 9, 86), (13, 0), (13, 0), "nvcc 12.9.86 does not fit nvJitLink 13.0"),
        ((13, 0, 88), (13, 0), (12, 9), "nvcc 13.0.88 does not fit nvJitLink 12.9"),
    ],
)
def test_ltoir_needs_an_nvjitlink_of_its_major_version_that_is_as_new(nvcc, nvrtc, nvjitlink, fault):
    found = toolchain.fit_fault(nvcc, nvrtc, nvjitlink)
    assert found is None if fault is None else fault in (found or "")


def test_versions_for_the_cache_leave_out_what_is_missing(monkeypatch, tmp_path):
    assert not {"nvcc", "cutlass"} & toolchain.tool_versions(Settings()).keys()
    nvcc = make_toolkit(tmp_path / "cuda")
    versions = toolchain.tool_versions(Settings(nvcc=str(nvcc)))
    assert (versions["nvcc"], versions["cutlass"]) == ("13.0.88", "4.2.0")


def test_a_replaced_nvcc_is_asked_for_its_version_again(tmp_path):
    nvcc = make_toolkit(tmp_path / "cuda")
    assert toolchain.nvcc_version(nvcc) == (13, 0, 88)
    make_toolkit(tmp_path / "cuda", release="13.10")
    assert toolchain.nvcc_version(nvcc) == (13, 10, 88)


def test_the_real_spec_of_a_namespace_package_is_understood(monkeypatch, tmp_path):
    monkeypatch.undo()
    spec = importlib.machinery.ModuleSpec("nvidia", None)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda _: spec)
    assert toolchain._nvidia_folders() == [tmp_path]
