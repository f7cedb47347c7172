"""The cache of compiled kernels: a folder of entries that are published whole, verified on use, and evicted by age.

Layout: `<root>/<kind>/<key>/<tools>/` holds the files of one entry and its `manifest.json`. The key is a digest of
everything that the text of a kernel says (sources, headers, flags, arch, ABI); `<tools>` is a digest of the versions
of the tools that built it. An entry of exactly the tools installed here is preferred. Where nothing can be built (no
nvcc, or compiling is forbidden), an entry of any tools is accepted, since it means the same: so a folder that was
filled on one machine serves another that has no compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmgen.errors import CacheError, CompileError
from gemmgen.settings import Settings

log = logging.getLogger(__name__)

SKELETONS, KERNELS, MODULES, INPUTS, LIBRARIES = "skeletons", "kernels", "modules", "inputs", "libraries"
KINDS = (SKELETONS, KERNELS, MODULES, INPUTS, LIBRARIES)
MANIFEST = "manifest.json"
GRACE_S = 600.0  # entries used this recently may be in a running build's hands: they are not evicted
_TRUSTED_ROOT = 0  # the uid that may fill a cache for others
_UNWRITABLE = (
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EIO, errno.EMFILE, errno.ENOLCK, errno.ENOSYS),
)


def digest(*parts: str | bytes) -> str:
    """blake2b of the parts, each with its length, so that no two lists of parts read alike."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def cache_root(current: Settings) -> Path:
    """The cache folder of these settings; it need not exist."""
    if current.cache_dir is not None:
        return current.cache_dir.absolute()
    import platformdirs

    return platformdirs.user_cache_path("gemmgen")


@dataclass(frozen=True)
class Entry:
    """One verified entry: its folder, what its manifest records of it, and the tools that built it."""

    path: Path
    facts: Mapping[str, Any]
    tools: Mapping[str, str]

    def file(self, name: str) -> Path:
        return self.path / name


@dataclass(frozen=True)
class Listed:
    """One entry as `gemmgen cache ls` shows it; `size_bytes` counts a file that is linked n times as 1/n."""

    kind: str
    path: Path
    size_bytes: int
    used: float
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Cache:
    """The cache folder `root`. Where it cannot be written, new entries go to a private temporary folder."""

    root: Path
    max_bytes: int = 10_000_000_000

    @property
    def failed_dir(self) -> Path:
        """Where sources that did not compile are kept."""
        return self.root / "failed"

    @property
    def tuned_dir(self) -> Path:
        """Where the tuner keeps what it measured."""
        return self.root / "tuned"

    # ---- reading

    def find(self, kind: str, key: str, tools: Mapping[str, str], *, any_tools: bool = False) -> Entry | None:
        """The entry of `key`, verified and marked as used, or None.

        A faulty entry is None too, with a warning that says what is wrong with it.
        """
        for path in self._candidates(kind, key, tools, any_tools):
            entry = read_entry(path, key)
            if isinstance(entry, Entry):
                _touch(path)
                return entry
            if entry:
                log.warning("the cached kernel %s is not used: %s", path, entry)
        return None

    def fault(self, kind: str, key: str) -> str | None:
        """Why the entries of `key` that exist are not used, or None; for error messages."""
        folder = self.root / kind / key
        faults = [(path, read_entry(path, key)) for path in _folders(folder)]
        return next((f"{path}: {fault}" for path, fault in faults if isinstance(fault, str) and fault), None)

    def _candidates(self, kind: str, key: str, tools: Mapping[str, str], any_tools: bool) -> Iterator[Path]:
        for root in (self.root, *_private_roots):
            folder = root / kind / key
            exact = folder / tools_id(tools)
            yield exact
            if any_tools:
                others = [path for path in _folders(folder) if path != exact]
                yield from sorted(others, key=_mtime, reverse=True)

    # ---- writing

    def note(self, kind: str, key: str, facts: Mapping[str, Any]) -> None:
        """Keep `facts` under `key`, if the cache can be written: something that is only faster to know."""
        with contextlib.suppress(OSError):
            _publish(self.root, kind, key, {}, {}, facts)

    def publish(
        self, kind: str, key: str, tools: Mapping[str, str], files: Mapping[str, bytes | Path], facts: Mapping[str, Any]
    ) -> Entry:
        """Make an entry of `files` appear at once, complete and durable. Losing a race against an equal entry is fine.

        Raises:
            CacheError: neither the cache folder nor a temporary folder can be written.
        """
        try:
            return _publish(self.root, kind, key, tools, files, facts)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            reason = error
        try:
            return _publish(_private_root(self.root, str(reason)), kind, key, tools, files, facts)
        except OSError as error:
            raise CacheError(
                f"neither the cache folder {self.root} ({reason.strerror}) nor a temporary one ({error}) can be "
                "written.\n  Free space, or set GEMMGEN_CACHE_DIR to a folder that can be written."
            ) from error

    @contextlib.contextmanager
    def lock(self, kind: str, key: str, cancelled: threading.Event | None = None) -> Iterator[None]:
        """Hold the right to build `key`, against every other process and thread; waits while another has it.

        The operating system frees the lock of a process that dies. A folder that cannot hold locks is used without:
        then two processes may build the same entry, and one of them publishes it.
        """
        acquired = _acquire(self._lock_path(kind, key), cancelled)
        try:
            yield
        finally:
            if acquired is not None:
                acquired.release()

    def _lock_path(self, kind: str, key: str) -> Path:
        return self.root / "locks" / f"{kind}-{key}.lock"

    # ---- upkeep

    def entries(self) -> list[Listed]:
        """Every entry in the folder, unverified."""
        found = []
        for kind in KINDS:
            for path in (tools for key in _folders(self.root / kind) for tools in _folders(key)):
                with contextlib.suppress(OSError):  # evicted meanwhile
                    found.append(Listed(kind, path, _size(path), _mtime(path), _peek(path)))
        return found

    def evict(self) -> list[Path]:
        """Remove the least recently used entries while the folder is over its cap: skeletons first.

        Skeletons only save time when another epilogue needs them; a kernel holds its own launcher.
        """
        entries = self.entries()
        excess = sum(entry.size_bytes for entry in entries) - self.max_bytes
        removed = []
        for entry in sorted(entries, key=lambda entry: (entry.kind != SKELETONS, entry.used)):
            if excess <= 0:
                break
            if time.time() - entry.used > GRACE_S and self.remove(entry.path):
                removed.append(entry.path)
                excess -= entry.size_bytes
        return removed

    def remove(self, path: Path) -> bool:
        """Take one entry out of the folder at once, then delete it; False when it cannot be."""
        dead = self.root / "tmp" / f"dead-{os.urandom(8).hex()}"
        try:
            _make_folder(dead.parent)
            os.rename(path, dead)
        except OSError:
            return False
        shutil.rmtree(dead, ignore_errors=True)
        with contextlib.suppress(OSError):  # another entry of the key is still there
            path.parent.rmdir()
        return True

    def sweep(self) -> None:
        """Delete what killed builders left behind: temporary folders whose lock nobody holds."""
        for path in _folders(self.root / "tmp"):
            kind, _, rest = path.name.partition("-")
            if kind == "dead":
                shutil.rmtree(path, ignore_errors=True)
            elif (held := _try_acquire(self._lock_path(kind, rest.partition("-")[0]))) is not None:
                shutil.rmtree(path, ignore_errors=True)
                held.release()

    def clear(self) -> tuple[int, int]:
        """Remove every entry, every kept failure and all measured times; (entries, bytes) that are gone."""
        gone = [entry for entry in self.entries() if self.remove(entry.path)]
        self.sweep()
        for folder in (self.failed_dir, self.tuned_dir):
            shutil.rmtree(folder, ignore_errors=True)
        return len(gone), sum(entry.size_bytes for entry in gone)

    def verify(self) -> list[tuple[Path, str]]:
        """Every entry that would not be used, with the reason."""
        results = [(entry.path, read_entry(entry.path, entry.path.parent.name)) for entry in self.entries()]
        return [(path, fault) for path, fault in results if isinstance(fault, str) and fault]


def cache_of(current: Settings) -> Cache:
    """The cache that these settings name."""
    return Cache(cache_root(current), current.cache_max_bytes)


# ---- one entry


def tools_id(tools: Mapping[str, str]) -> str:
    """The folder name of the tools that built an entry."""
    return digest(json.dumps(dict(tools), sort_keys=True))[:12]


def is_private(path: Path) -> bool:
    """Whether `path` is in a temporary folder that stands in for a cache that cannot be written."""
    return any(path.is_relative_to(root) for root in _private_roots)


def read_entry(path: Path, key: str) -> Entry | str:
    """The entry at `path`, verified, or why it cannot be used; the empty string when there is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        checksum = manifest.pop("checksum")
        if fault := _ownership_fault(path) or _manifest_fault(manifest, checksum, key):
            return fault
        for name, expected in manifest["files"].items():
            if fault := _ownership_fault(path / name):
                return fault
            if digest((path / name).read_bytes()) != expected:
                return f"{name} is damaged"
        return Entry(path, manifest["facts"], manifest["tools"])
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing" if path.is_dir() else ""
    except NotADirectoryError:
        return ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is damaged"
    except OSError as error:
        return f"it cannot be read: {error}"


def _manifest_fault(manifest: Mapping[str, Any], checksum: str, key: str) -> str | None:
    if checksum != digest(_canonical(manifest)):
        return "its manifest is damaged"
    return None if manifest["key"] == key else f"it belongs to {manifest['key']}"


def _ownership_fault(path: Path) -> str | None:
    """Why code at `path` is not ours to run, or None: it is owned by us or root and nobody else may write it."""
    stat = path.stat()
    if stat.st_uid not in (os.geteuid(), _TRUSTED_ROOT):
        return f"{path.name} is owned by uid {stat.st_uid}, and only uid {os.geteuid()} or root are trusted"
    if stat.st_mode & 0o022:
        return f"{path.name} may be written by others (mode {stat.st_mode & 0o777:o}); chmod go-w it"
    return None


def _canonical(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True)


def _publish(
    root: Path,
    kind: str,
    key: str,
    tools: Mapping[str, str],
    files: Mapping[str, bytes | Path],
    facts: Mapping[str, Any],
) -> Entry:
    target = root / kind / key / tools_id(tools)
    temporary = root / "tmp" / f"{kind}-{key}-{os.urandom(8).hex()}"
    _make_folder(temporary)
    try:
        _write_entry(temporary, key, tools, files, facts)
        _make_folder(target.parent)
        _replace(temporary, target, key, root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    published = read_entry(target, key)
    if isinstance(published, str):
        raise OSError(errno.EIO, f"the new entry cannot be used: {published or 'it is gone'}", str(target))
    return published


def _write_entry(
    folder: Path, key: str, tools: Mapping[str, str], files: Mapping[str, bytes | Path], facts: Mapping[str, Any]
) -> None:
    for name, content in files.items():
        if isinstance(content, Path):
            _link_or_copy(content, folder / name)
        else:
            _write(folder / name, content)
    manifest = {
        "key": key,
        "tools": dict(tools),
        "created": time.time(),
        "files": {name: digest((folder / name).read_bytes()) for name in files},
        "facts": dict(facts),
    }
    _write(folder / MANIFEST, json.dumps({**manifest, "checksum": digest(_canonical(manifest))}, indent=1).encode())
    _sync_folder(folder)


def _replace(temporary: Path, target: Path, key: str, root: Path) -> None:
    """Rename `temporary` to `target`, unless a good entry got there first; a faulty one is moved out of the way."""
    if target.exists():
        if not isinstance(read_entry(target, key), str):
            return
        os.rename(target, root / "tmp" / f"dead-{os.urandom(8).hex()}")
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise  # else another process published in this very moment
    _sync_folder(target.parent)


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:  # another file system, or one without links
        _write(destination, source.read_bytes())


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _make_folder(path: Path) -> None:
    """Create `path` and its parents, writable by nobody else whatever the umask."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was first
            folder.mkdir(mode=0o755)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as found:
            return [Path(item.path) for item in found if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    with os.scandir(path) as files:
        stats = [file.stat(follow_symlinks=False) for file in files]
    return sum(stat.st_size // max(stat.st_nlink, 1) for stat in stats)


def _peek(path: Path) -> Mapping[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return {**manifest["facts"], "tools": manifest["tools"], "created": manifest["created"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only cache has no order of use, and needs none
        os.utime(path)


# ---- the private cache, and locks

_private_roots: list[Path] = []
_private_guard = threading.Lock()


def _private_root(wanted: Path, reason: str) -> Path:
    """The temporary cache of this process, made at the first need with one warning and deleted at exit."""
    with _private_guard:
        if not _private_roots:
            _private_roots.append(Path(tempfile.mkdtemp(prefix="gemmgen-cache-")))
            atexit.register(_delete_private_root, _private_roots[0], os.getpid())
            log.warning(
                "the cache folder %s cannot be written (%s): kernels of this process go to %s and are lost at its end. "
                "Set GEMMGEN_CACHE_DIR to a folder that can be written.",
                *(wanted, reason, _private_roots[0]),
            )
        return _private_roots[0]


def _delete_private_root(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not delete its parent's cache
        shutil.rmtree(path, ignore_errors=True)


def _acquire(path: Path, cancelled: threading.Event | None) -> Any:
    import filelock

    try:
        _make_folder(path.parent)
        lock = filelock.FileLock(path, mode=0o644)
        while not (cancelled and cancelled.is_set()):
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=1.0)
                return lock
    except (OSError, NotImplementedError) as error:
        log.debug("no lock at %s: %s", path, error)
        return None
    raise CompileError("the build was cancelled")


def _try_acquire(path: Path) -> Any:
    import filelock

    try:
        lock = filelock.FileLock(path, mode=0o644)
        lock.acquire(blocking=False)
    except (OSError, NotImplementedError, RuntimeError, filelock.Timeout):
        return None
    return lock
