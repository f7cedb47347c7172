"""Measured times of the ways to run a call, kept on disk: one file per graph, signature, bucket of M and machine.

A bucket of M is 16, or a power of two, or one and a half of one; N, K and L are exact. An entry remembers every way
that was measured, at one M. For another M of the bucket the times are scaled by the model, which knows how waves of
tiles come out there; so no M of a bucket needs a measurement or a build of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gemmgen.bind import Binding
from gemmgen.device import Target, driver_version
from gemmgen.errors import ToolchainError
from gemmgen.jit.cache import cache_of, digest
from gemmgen.jit.toolchain import find_cutlass
from gemmgen.problem import representative_of
from gemmgen.settings import settings
from gemmgen.ways import Fused, Selection, Timed, Way, way_of

logger = logging.getLogger(__name__)

MOST = 20  # fused kernels that are built for a measurement

LEAST_BUCKET = 16
NEAR = 1.25  # ways that were so many times slower than the best are not reconsidered for another M


def bucket_of(M: int) -> int:
    """The bucket that M is in, named by its largest M."""
    power = max(LEAST_BUCKET, 1 << max(0, M - 1).bit_length())
    return power * 3 // 4 if power > LEAST_BUCKET and power * 3 // 4 >= M else power


@dataclass(frozen=True)
class Measured:
    """A way and its time; or, where it has none, what went wrong."""

    way: Way
    time_us: float | None
    failure: str = ""


@dataclass(frozen=True)
class Entry:
    """What was measured for one bucket.

    Attributes:
        M: that it was measured at.
        rows: the fastest first, failures last.
    """

    M: int
    rows: tuple[Measured, ...]
    _estimates_us: dict[Way, float] = field(default_factory=dict, compare=False, repr=False)  # at that M

    @staticmethod
    def of(M: int, rows: tuple[Measured, ...]) -> Entry:
        def by_time(row: Measured) -> float:
            return float("inf") if row.time_us is None else row.time_us

        return Entry(M, tuple(sorted(rows, key=by_time)))

    def __str__(self) -> str:
        lines = [f"measured at M = {self.M}"]
        lines += [f"  {row.time_us:9.1f} us  {row.way.label}" for row in self.rows if row.time_us is not None]
        return "\n".join([*lines, *(f"     failed     {way.label}: {why}" for way, why in self.failures.items())])

    @property
    def failures(self) -> dict[Way, str]:
        return {row.way: row.failure for row in self.rows if row.time_us is None}

    def selection(self, binding: Binding, target: Target) -> Selection | None:
        """What a call of this bucket runs; None where nothing was measured to work."""
        timed = [
            Timed(row.way, row.time_us)
            for row in self.rows
            if row.time_us is not None and _can_run(row.way, binding, target)
        ]
        if not timed:
            return None
        if representative_of(binding.extents) == representative_of(replace(binding.extents, M=self.M)):
            return Selection(tuple(t.way for t in timed), f"the fastest measured, at M = {self.M}", tuple(timed), True)
        near = [t for t in timed if t.time_us <= NEAR * timed[0].time_us]
        scaled = sorted((self._scaled(t, binding, target) for t in near), key=lambda t: t.time_us)
        why = f"the fastest measured at M = {self.M}, scaled to M = {binding.extents.M} by the model"
        return Selection(tuple(t.way for t in scaled), why, tuple(scaled), True)

    def _scaled(self, timed: Timed, binding: Binding, target: Target) -> Timed:
        extents = binding.extents
        way, there = timed.way.fitted_to(extents), self._estimates_us.get(timed.way)
        if there is None:
            there = timed.way.estimate_us(binding, replace(extents, M=self.M), target)
            self._estimates_us[timed.way] = there
        return Timed(way, timed.time_us * way.estimate_us(binding, extents, target) / there)


def _can_run(way: Way, binding: Binding, target: Target) -> bool:
    """Whether a way that ran one call of a key runs this one: torch's ops ask for more than the key knows."""
    return isinstance(way, Fused) or way.reject_reason(binding, target.arch) is None


# On disk


@dataclass(frozen=True)
class Key:
    """What an entry belongs to. `facts` is all of it, readable; `name` their digest and the name of the file."""

    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return digest(_canonical(self.facts))


def key_of(binding: Binding, target: Target) -> Key:
    """The key of a call: everything that a measured time depends on."""
    extents = binding.extents
    return Key({
        "graph": binding.graph.digest,
        "signature": repr(binding.signature),
        "copied": [binding.a.copied, binding.b.copied],
        "bucket": [bucket_of(extents.M), extents.N, extents.K, extents.L],
        "gpu": target.name,
        "sm_count": target.sm_count,
        "driver": driver_version(),
        **_versions(),
    })


@functools.lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    cutlass = ""
    with contextlib.suppress(ToolchainError):  # kernels may come from a cache that was filled elsewhere
        cutlass = find_cutlass().version
    version = sys.modules["gemmgen"].__version__  # an import of the package would be an import of all of it
    return {"cuda": torch.version.cuda or "", "cutlass": cutlass, "gemmgen": version}


_known: dict[tuple[Path, str], Entry] = {}  # read or written by this process
_lock = threading.Lock()


def find(key: Key) -> Entry | None:
    """What was measured for `key`, by this process or another, or None."""
    path = _path(key)
    entry = _known.get((path, key.name))
    if entry is None and (entry := _read(path, key)) is not None:
        _known[path, key.name] = entry
    return entry


def put(key: Key, entry: Entry) -> None:
    """Keep `entry`; where the folder cannot be written, for this process alone, with a warning."""
    path = _path(key)
    _known[path, key.name] = entry
    try:
        _write(path, key, entry)
    except OSError as error:
        logger.warning("measured times are not kept on disk: %s: %s", path, error)


def forget() -> None:
    """Read everything from disk again."""
    _known.clear()


def _path(key: Key) -> Path:
    return cache_of(settings()).tuned_dir / f"{key.name}.json"


def _write(path: Path, key: Key, entry: Entry) -> None:
    """Publish at once: other processes read the old file or the new one."""
    content = {"key": dict(key.facts), "M": entry.M, "rows": [_row_facts(row) for row in entry.rows]}
    text = json.dumps({**content, "checksum": digest(_canonical(content))}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _row_facts(row: Measured) -> dict[str, object]:
    return {**row.way.facts(), "time_us": row.time_us, "failure": row.failure}


def _read(path: Path, key: Key) -> Entry | None:
    try:
        content = json.loads(path.read_text())
        checksum = content.pop("checksum")
        if checksum != digest(_canonical(content)) or content["key"] != json.loads(_canonical(key.facts)):
            raise ValueError("its checksum or its key is wrong")
        rows = tuple(Measured(way_of(row), row["time_us"], row["failure"]) for row in content["rows"])
        return Entry(content["M"], rows)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the measured times in %s are not used: %s", path, error)
        return None


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True)
