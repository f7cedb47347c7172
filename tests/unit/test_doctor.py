"""`gemmgen doctor` and the cache commands, on fakes: what is printed and which exit code."""

import pytest
from click.testing import CliRunner

from gemmgen import doctor
from gemmgen.__main__ import main
from gemmgen.errors import ToolchainError
from gemmgen.jit import toolchain
from gemmgen.jit.cache import KERNELS, SKELETONS, Cache


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine whose tools are all in order, with no GPU."""
    nvcc = tmp_path / "nvcc"
    fine = toolchain.Toolchain(nvcc, "13.0.88", toolchain.Cutlass((tmp_path,), "4.2.0"), tmp_path / "g++", ())
    monkeypatch.setattr(toolchain, "find_nvcc", lambda _: nvcc)
    monkeypatch.setattr(toolchain, "nvcc_version", lambda _: (13, 0, 88))
    monkeypatch.setattr(toolchain, "wheels_fault", lambda *_: None)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(toolchain, "nvjitlink_version", lambda: (13, 0))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: fine.cutlass)
    monkeypatch.setattr(toolchain, "find_host_compiler", lambda _: fine.host_compiler)
    monkeypatch.setattr(toolchain, "toolchain", lambda: fine)
    monkeypatch.setattr(doctor, "_driver_version", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("GEMMGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GEMMGEN_COMPILE", raising=False)
    monkeypatch.setenv("COLUMNS", "250")


def finding(topic: str) -> doctor.Finding:
    return next(found for found in doctor.diagnose() if found.topic == topic)


def run(*args: str):
    return CliRunner().invoke(main, args)


def test_a_machine_without_gpu_is_a_warning_and_exit_code_0():
    assert finding("GPU").status == "warn"
    assert finding("driver").status == "warn"
    result = run("doctor")
    assert result.exit_code == 0
    assert "13.0.88" in result.output


def test_a_fault_is_a_failure_with_its_mend_and_exit_code_1(monkeypatch):
    def missing(_):
        raise ToolchainError("nvcc was not found.\n  Install it with\n  pip")

    monkeypatch.setattr(toolchain, "find_nvcc", missing)
    assert finding("nvcc") == doctor.Finding("nvcc", "fail", "nvcc was not found.", "Install it with pip")
    result = run("doctor")
    assert result.exit_code == 1
    assert "Install it with pip" in result.output


def test_a_mend_is_one_line_on_a_narrow_terminal_and_said_once(monkeypatch):
    command = "pip install " + " ".join(f"nvidia-part-{i}==13.0.*" for i in range(8))

    def missing(*_):
        raise ToolchainError(f"nvcc was not found.\n  Install it with {command}")

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(toolchain, "find_nvcc", missing)
    monkeypatch.setattr(toolchain, "toolchain", missing)
    lines = run("doctor").output.splitlines()
    assert [line for line in lines if "nvidia-part-0" in line] == [f"nvcc, fit: Install it with {command}"]


def test_an_old_nvcc_is_a_failure(monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc_version", lambda _: (11, 8, 89))
    assert finding("nvcc").status == "fail"
    assert "needs 12.8" in finding("nvcc").mend


def test_tools_that_do_not_fit_are_a_failure(monkeypatch):
    def unfit():
        raise ToolchainError("NVRTC 13.5 does not fit nvJitLink 13.0")

    monkeypatch.setattr(toolchain, "toolchain", unfit)
    assert finding("fit").status == "fail"


def test_a_driver_older_than_the_linker_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "_driver_version", lambda: (12, 8))
    assert finding("driver").status == "fail"
    monkeypatch.setattr(doctor, "_driver_version", lambda: (13, 0))
    assert finding("driver").status == "ok"


def test_gpus_are_named_with_their_arch(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    assert finding("GPU").text == "NVIDIA H200 (sm90)"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    assert finding("GPU").status == "fail"


def test_an_old_torch_is_a_failure(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.4.1+cu124")
    assert finding("torch").status == "fail"


def test_forbidden_compilation_is_a_warning(monkeypatch):
    monkeypatch.setenv("GEMMGEN_COMPILE", "0")
    assert finding("compiling").status == "warn"


def test_a_cache_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "cache").touch()
    assert finding("cache").status == "warn"
    assert "GEMMGEN_CACHE_DIR" in finding("cache").mend


def test_a_wrong_setting_is_a_failure_and_not_a_traceback(monkeypatch):
    monkeypatch.setenv("GEMMGEN_COMPILE", "perhaps")
    assert finding("compiling").status == "fail"
    result = run("cache", "ls")
    assert result.exit_code == 1
    assert "GEMMGEN_COMPILE='perhaps'" in result.output
    assert "Traceback" not in result.output


def test_nothing_is_created_by_looking(tmp_path):
    doctor.diagnose()
    assert not (tmp_path / "cache").exists()


def test_the_cache_commands_list_verify_and_clear(tmp_path):
    cache = Cache(tmp_path / "cache")
    tools = {"nvcc": "13.0.88"}
    entry = cache.publish(KERNELS, "k", tools, {"kernel.cubin": b"x"}, {"name": "gelu [sm90]", "arch": "sm90"})
    cache.publish(SKELETONS, "s", tools, {"skeleton.ltoir": b"x"}, {"name": "gelu", "arch": "sm90"})

    listing = run("cache", "ls")
    assert listing.exit_code == 0
    for text in ("kernel", "skeleton", "gelu [sm90]", "13.0.88", "now", "2 entries"):
        assert text in listing.output

    assert run("cache", "verify").exit_code == 0
    entry.file("kernel.cubin").write_bytes(b"y")
    verified = run("cache", "verify")
    assert verified.exit_code == 1
    assert "kernel.cubin is damaged" in verified.output
    assert "1 entries are good, 1 are not" in verified.output

    assert run("cache", "clear").exit_code != 0  # asks, and is not answered
    assert "removed 2 entries" in run("cache", "clear", "--yes").output
    assert "0 entries" in run("cache", "ls").output


def test_ages_are_readable():
    from gemmgen.__main__ import _ago

    assert [_ago(s) for s in (0, 59, 60, 7300, 200_000)] == ["now", "now", "1 min ago", "2 h ago", "2 d ago"]
