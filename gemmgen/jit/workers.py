"""Daemon worker threads for builds, and how many compilers the machine can take at a time."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from gemmgen.settings import Settings

T = TypeVar("T")

NVCC_PAIR_BYTES = 3_000_000_000  # memory of the two nvcc processes of one skeleton


class Workers:
    """Daemon threads that run tasks in the order of submission.

    Unlike `ThreadPoolExecutor`, they do not hold up the end of the interpreter: a program that ends while kernels
    are built in the background ends at once.
    """

    def __init__(self, count: int):
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        self._threads: list[threading.Thread] = []

    def submit(self, task: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put(functools.partial(_fulfil, future, task))
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name="gemmgen-build", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Let the threads end when everything submitted is done."""
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _fulfil(future: Future[T], task: Callable[[], T]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:  # handed to whoever asks for the result
        future.set_exception(error)


def build_jobs(current: Settings) -> int:
    """Kernels to compile at a time: the setting, else by cores (two compilers each) and free memory."""
    if current.build_jobs is not None:
        return current.build_jobs
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // 2, available_bytes() // NVCC_PAIR_BYTES))


def available_bytes() -> int:
    """Memory that new processes may use: what the kernel says is available, within the cgroup's limit."""
    lines = _lines("/proc/meminfo")
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        available.append(int(limit[0]) - int(used[0]))
    return max(0, min(available, default=NVCC_PAIR_BYTES))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split("\n")
    except OSError:
        return []
