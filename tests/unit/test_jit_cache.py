"""The cache folder: what is accepted, what is refused with a reason, and what happens when it cannot be written."""

import ast
import errno
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmgen.errors import CacheError, CompileError
from gemmgen.jit import cache as cache_module
from gemmgen.jit import identity
from gemmgen.jit.cache import GRACE_S, KERNELS, MODULES, SKELETONS, Cache, cache_root, digest
from gemmgen.settings import Settings

TOOLS = {"nvcc": "13.0.88", "cutlass": "4.2.0"}
OTHER_TOOLS = {"nvcc": "13.1.20", "cutlass": "4.2.0"}
FILES = {"kernel.cubin": b"cubin" * 100, "launcher.so": b"launcher" * 100}


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache with space é")


@pytest.fixture(autouse=True)
def no_private_cache(monkeypatch):
    monkeypatch.setattr(cache_module, "_private_roots", [])


def publish(cache: Cache, key: str = "k", kind: str = KERNELS, tools=TOOLS, files=FILES, **facts):
    return cache.publish(kind, key, tools, files, {"name": key, **facts})


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


# ---- keys


def test_digests_tell_apart_where_one_part_ends():
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("a", b"b") == digest(b"a", "b")
    assert digest("a") != digest("a", "")


def test_the_folder_is_the_setting_else_the_platforms(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(Settings()) == tmp_path / "gemmgen"
    assert cache_root(Settings(cache_dir=Path("relative"))) == Path.cwd() / "relative"


# ---- finding and publishing


def test_a_published_entry_is_found_with_its_facts(cache):
    assert cache.find(KERNELS, "k", TOOLS) is None
    publish(cache, registers=168)

    entry = cache.find(KERNELS, "k", TOOLS)

    assert entry is not None
    assert entry.file("kernel.cubin").read_bytes() == FILES["kernel.cubin"]
    assert (entry.facts["registers"], entry.tools) == (168, TOOLS)
    assert not list((cache.root / "tmp").iterdir())


def test_entries_of_several_tool_versions_live_side_by_side(cache):
    publish(cache, made_by="old")
    publish(cache, tools=OTHER_TOOLS, made_by="new")

    assert cache.find(KERNELS, "k", TOOLS).facts["made_by"] == "old"
    assert cache.find(KERNELS, "k", OTHER_TOOLS).facts["made_by"] == "new"


def test_another_versions_entry_serves_only_where_nothing_can_be_built(cache):
    publish(cache)
    assert cache.find(KERNELS, "k", OTHER_TOOLS) is None
    assert cache.find(KERNELS, "k", {}, any_tools=True) is not None


def test_a_copied_folder_works_elsewhere(cache, tmp_path):
    publish(cache)
    (cache.root).rename(tmp_path / "copy")
    assert Cache(tmp_path / "copy").find(KERNELS, "k", {}, any_tools=True) is not None


def test_publishing_what_is_already_there_keeps_the_first(cache):
    first = publish(cache, made_by="first")
    second = publish(cache, made_by="second")
    assert first.path == second.path
    assert second.facts["made_by"] == "first"
    assert not list((cache.root / "tmp").iterdir())


def test_losing_the_race_at_the_last_moment_is_fine(cache, monkeypatch):
    real_rename = os.rename

    def rename_after_a_rival(source, target):
        if Path(target).parent.name == "k":
            monkeypatch.setattr(os, "rename", real_rename)
            publish(cache, made_by="rival")
        real_rename(source, target)

    monkeypatch.setattr(os, "rename", rename_after_a_rival)
    assert publish(cache, made_by="us").facts["made_by"] == "rival"


def test_a_kernels_launcher_survives_the_eviction_of_its_skeleton(cache):
    skeleton = publish(cache, kind=SKELETONS)
    publish(cache, files={"launcher.so": skeleton.file("launcher.so")})
    assert cache.remove(skeleton.path)
    assert cache.find(KERNELS, "k", TOOLS).file("launcher.so").read_bytes() == FILES["launcher.so"]


def test_a_file_system_without_links_gets_copies(cache, monkeypatch):
    skeleton = publish(cache, kind=SKELETONS)

    def no_links(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    entry = publish(cache, files={"launcher.so": skeleton.file("launcher.so")})
    assert entry.file("launcher.so").read_bytes() == FILES["launcher.so"]


def test_nobody_else_may_write_what_we_publish_whatever_the_umask(cache):
    old = os.umask(0)
    try:
        entry = publish(cache)
    finally:
        os.umask(old)
    for path in (cache.root, *cache.root.rglob("*")):
        assert path.stat().st_mode & 0o022 == 0, path
    assert cache.find(KERNELS, "k", TOOLS) == entry


# ---- entries that are refused


def truncate(entry):
    os.truncate(entry.file("kernel.cubin"), 10)


def flip_a_bit(entry):
    data = bytearray(entry.file("launcher.so").read_bytes())
    data[17] ^= 4
    entry.file("launcher.so").write_bytes(data)


def change_a_fact(entry):
    manifest = entry.file("manifest.json")
    manifest.write_text(manifest.read_text().replace('"name": "k"', '"name": "x"'))


def cut_the_manifest(entry):
    os.truncate(entry.file("manifest.json"), 30)


def lose_a_file(entry):
    entry.file("kernel.cubin").unlink()


def open_to_all(entry):
    entry.file("launcher.so").chmod(0o666)


DAMAGES = [
    pytest.param(truncate, "kernel.cubin is damaged", id="truncated"),
    pytest.param(flip_a_bit, "launcher.so is damaged", id="bit-flipped"),
    pytest.param(change_a_fact, "its manifest is damaged", id="fact-changed"),
    pytest.param(cut_the_manifest, "its manifest is damaged", id="manifest-cut"),
    pytest.param(lose_a_file, "kernel.cubin is missing", id="file-lost"),
    pytest.param(open_to_all, "launcher.so may be written by others", id="world-writable"),
]


@pytest.mark.parametrize("damage, reason", DAMAGES)
def test_a_faulty_entry_is_a_warning_and_is_replaced(cache, caplog, damage, reason):
    damage(publish(cache))

    with caplog.at_level(logging.WARNING):
        assert cache.find(KERNELS, "k", TOOLS) is None
    assert reason in caplog.text
    assert reason in cache.fault(KERNELS, "k")
    assert reason in cache.verify()[0][1]

    publish(cache)
    assert cache.find(KERNELS, "k", TOOLS) is not None
    assert cache.verify() == []


def test_an_entry_of_another_user_is_not_loaded(cache, caplog, monkeypatch):
    publish(cache)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(cache_module, "_TRUSTED_ROOT", 4712)
    assert cache.find(KERNELS, "k", TOOLS) is None
    assert f"owned by uid {os.getuid()}, and only uid 4711 or root are trusted" in caplog.text


def test_an_entry_of_root_is_loaded(cache, monkeypatch):
    publish(cache)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(cache_module, "_TRUSTED_ROOT", os.getuid())
    assert cache.find(KERNELS, "k", TOOLS) is not None


def test_an_entry_moved_to_another_key_is_not_loaded(cache, caplog):
    publish(cache)
    (cache.root / KERNELS / "k").rename(cache.root / KERNELS / "other")
    assert cache.find(KERNELS, "other", TOOLS) is None
    assert "it belongs to k" in caplog.text


# ---- folders that cannot be written


def test_a_file_in_the_folders_place_leads_to_a_private_cache_with_one_warning(tmp_path, caplog):
    (tmp_path / "cache").touch()
    cache = Cache(tmp_path / "cache")

    publish(cache, "a")
    publish(cache, "b")

    assert cache.find(KERNELS, "a", TOOLS) is not None
    assert cache.find(KERNELS, "b", TOOLS) is not None
    assert caplog.text.count("cannot be written") == 1
    assert "GEMMGEN_CACHE_DIR" in caplog.text
    with cache.lock(KERNELS, "a"):  # no lock can be had there, and none is needed
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_read_only_disk_leads_to_a_private_cache(cache, caplog, monkeypatch, number):
    publish(cache, "present")
    real_open = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(str(cache.root)):
            raise OSError(number, os.strerror(number), str(path))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    publish(cache, "new")

    assert cache.find(KERNELS, "present", TOOLS) is not None
    assert cache.find(KERNELS, "new", TOOLS) is not None
    assert os.strerror(number) in caplog.text
    assert not (cache.root / KERNELS / "new").exists()
    assert not list((cache.root / "tmp").iterdir())


def test_a_read_only_folder_is_still_read(cache, monkeypatch):
    publish(cache)

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.find(KERNELS, "k", TOOLS) is not None


def test_no_folder_at_all_is_an_error_with_a_mend(cache, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "_write", refuse)
    with pytest.raises(CacheError, match="GEMMGEN_CACHE_DIR"):
        publish(cache)


# ---- eviction, sweeping, clearing


def test_skeletons_go_before_kernels_and_the_least_recently_used_first(cache):
    big = {"file": b"x" * 1000}
    for key, kind, days in [("a", KERNELS, 9), ("b", SKELETONS, 1), ("c", SKELETONS, 3), ("d", MODULES, 5)]:
        age(publish(cache, key, kind, files=big).path, days * 86400)
    size = sum(entry.size_bytes for entry in cache.entries())

    removed = Cache(cache.root, max_bytes=size // 3).evict()

    assert [path.parent.name for path in removed] == ["c", "b", "a"]
    assert [entry.path.parent.name for entry in cache.entries()] == ["d"]


def test_nothing_is_evicted_below_the_cap(cache):
    age(publish(cache).path, 9e6)
    assert cache.evict() == []


def test_what_was_used_just_now_is_not_evicted(cache):
    old, used = publish(cache, "old"), publish(cache, "used")
    for entry in (old, used):
        age(entry.path, GRACE_S + 60)
    assert cache.find(KERNELS, "used", TOOLS) is not None
    assert Cache(cache.root, max_bytes=0).evict() == [old.path]


def test_linked_files_count_once(cache):
    skeleton = publish(cache, kind=SKELETONS, files={"launcher.so": b"x" * 100_000})
    for key in "abc":
        publish(cache, key, files={"launcher.so": skeleton.file("launcher.so")})
    assert 100_000 <= sum(entry.size_bytes for entry in cache.entries()) < 105_000


def test_sweeping_removes_what_dead_builders_left_and_nothing_else(cache):
    for name in ("kernels-dead-0011", "kernels-live-0011", "dead-0011"):
        (cache.root / "tmp" / name).mkdir(parents=True)
    with cache.lock(KERNELS, "live"):
        (cache.root / "locks/kernels-dead.lock").touch()
        cache.sweep()
        assert [path.name for path in (cache.root / "tmp").iterdir()] == ["kernels-live-0011"]
    cache.sweep()
    assert not list((cache.root / "tmp").iterdir())


def test_clearing_removes_everything(cache):
    publish(cache, "a")
    publish(cache, "b", SKELETONS)
    cache.failed_dir.mkdir()
    count, size_bytes = cache.clear()
    assert count == 2
    assert size_bytes > 2000
    assert cache.entries() == []
    assert not cache.failed_dir.exists()


# ---- several processes


def test_the_lock_excludes_other_threads(cache):
    inside, most = 0, 0
    guard = threading.Lock()

    def work():
        nonlocal inside, most
        with cache.lock(KERNELS, "k"):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_waiting_for_a_lock_can_be_cancelled(cache):
    cancelled = threading.Event()
    caught = []

    def wait():
        try:
            with cache.lock(KERNELS, "k", cancelled):
                pass
        except CompileError as error:
            caught.append(error)

    with cache.lock(KERNELS, "k"):
        thread = threading.Thread(target=wait)
        thread.start()
        cancelled.set()
        thread.join()
    assert len(caught) == 1


def build_slowly(root: str, started, seconds: float) -> None:
    cache = Cache(Path(root))
    with cache.lock(KERNELS, "k"):
        if cache.find(KERNELS, "k", TOOLS) is None:
            with open(Path(root) / "builds", "a") as builds:
                builds.write("built\n")
            (cache.root / "tmp" / "kernels-k-0011").mkdir(parents=True, exist_ok=True)
            started.set()
            time.sleep(seconds)
            publish(cache)


def test_processes_that_want_the_same_entry_build_it_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    processes = [context.Process(target=build_slowly, args=(str(tmp_path), started, 0.3)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "builds").read_text() == "built\n"


def test_a_killed_builder_leaves_nothing_wrong(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=build_slowly, args=(str(tmp_path), started, 60))
    process.start()
    assert started.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    cache = Cache(tmp_path)
    assert cache.find(KERNELS, "k", TOOLS) is None
    with cache.lock(KERNELS, "k"):  # the dead process's lock is free
        publish(cache)
    cache.sweep()
    assert cache.find(KERNELS, "k", TOOLS) is not None
    assert not list((tmp_path / "tmp").iterdir())


def test_whatever_renders_a_kernel_is_part_of_its_identity():
    package = Path(identity.__file__).parents[1]

    def file_of(module: str) -> Path:
        path = package.joinpath(*module.split(".")[1:])
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def imported_by(path: Path) -> Iterator[Path]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gemmgen"):
                yield from map(file_of, (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))

    waiting, found = [package / "render.py", *(package / "lower").glob("*.py")], set()
    while waiting:
        path = waiting.pop()
        if path.is_file() and path not in found and path != package / "__init__.py":
            found.add(path)
            waiting += imported_by(path)
    generators = {path for pattern in identity._GENERATORS for path in package.glob(pattern)}
    assert package / "peephole.py" in found
    assert found - generators == {package / "errors.py"}
