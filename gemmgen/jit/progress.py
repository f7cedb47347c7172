"""Tells a waiting person what is being compiled: nothing for the first 2 s, then a line every 5 s."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

QUIET_S = 2.0
LINE_EVERY_S = 5.0


class Progress:
    """One line on stderr for a build: live on a terminal, plain lines elsewhere. Use as a context manager."""

    def __init__(self, total: int, *, quiet_s: float = QUIET_S, every_s: float = LINE_EVERY_S):
        self._total, self._done = total, 0
        self._quiet_s, self._every_s = quiet_s, every_s
        self._active: list[str] = []
        self._guard = threading.Lock()
        self._finished = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._show, name="gemmgen-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()

    @contextlib.contextmanager
    def step(self, what: str, *, counts: bool = False) -> Iterator[None]:
        """Show `what` while the block runs; `counts` makes its end one of the `total`."""
        with self._guard:
            self._active.append(what)
        try:
            yield
        finally:
            with self._guard:
                self._active.remove(what)
                self._done += counts

    def line(self) -> str:
        """The state in one line."""
        with self._guard:
            active = ", ".join(self._active[:2]) + (f" and {len(self._active) - 2} more" * (len(self._active) > 2))
            done = self._done
        seconds = time.monotonic() - self._started
        return f"gemmgen: {done} of {self._total} kernels built, {seconds:.0f} s: {active or 'waiting'}"

    def _show(self) -> None:
        if self._finished.wait(self._quiet_s):
            return
        if sys.stderr is not None and sys.stderr.isatty():
            self._show_live()
        else:
            self._show_lines()

    def _show_live(self) -> None:
        from rich.console import Console

        with Console(stderr=True).status(self.line()) as status:
            while not self._finished.wait(0.5):
                status.update(self.line())

    def _show_lines(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed; a build must not fail of that
                print(self.line(), file=sys.stderr, flush=True)
            if self._finished.wait(self._every_s):
                return
