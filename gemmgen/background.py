"""Builds that nobody waits for: a few daemon threads, one build per key, errors logged once."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from gemmgen.jit.workers import Workers, build_jobs
from gemmgen.settings import settings

logger = logging.getLogger(__name__)

T = TypeVar("T")
UNFUSED = "its calls stay unfused"


class Builds:
    """The background builds of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._futures: dict[Hashable, Future[Any]] = {}

    def submit(
        self, key: Hashable, what: str, build: Callable[[], T], otherwise: str = UNFUSED
    ) -> Future[T]:
        """Run `build` in the background, once for equal keys while it runs, and never again once it has failed.

        Args:
            what, otherwise: for the warning about a failure: what was to be built, and what is so without it.
        """
        with self._lock:
            if key not in self._futures:
                self._workers = self._workers or Workers(build_jobs(settings()))
                self._futures[key] = self._workers.submit(functools.partial(self._run, key, what, build, otherwise))
            return self._futures[key]

    def _run(self, key: Hashable, what: str, build: Callable[[], T], otherwise: str) -> T:
        try:
            result = build()
        except Exception as error:
            logger.warning("%s was not built in the background, and %s: %s", what, otherwise, error)
            raise
        with self._lock:
            self._futures.pop(key, None)  # the cache has it now
        return result


_builds = Builds()


def submit(
    key: Hashable, what: str, build: Callable[[], T], otherwise: str = UNFUSED
) -> Future[T]:
    """`Builds.submit` for this process."""
    return _builds.submit(key, what, build, otherwise)


def _after_fork() -> None:
    global _builds
    _builds = Builds()  # the threads are the parent's


os.register_at_fork(after_in_child=_after_fork)
