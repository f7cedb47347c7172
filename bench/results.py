"""Result lines: one JSON object for each rung of each problem, written as soon as it is known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class ResultFile:
    """A `.jsonl` file in `folder`, named after the suite, the time and `label`; every row carries `fixed` too."""

    def __init__(self, folder: Path, suite: str, fixed: Row, label: str = ""):
        folder.mkdir(parents=True, exist_ok=True)
        started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.path = folder / f"{suite}-{started}{label}.jsonl"
        self._fixed = {"suite": suite, "started": started, **fixed}
        self.rows: list[Row] = []

    def add(self, rows: Iterable[Row]) -> None:
        complete = [{**self._fixed, **row} for row in rows]
        self.rows += complete
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in complete)


def read(path: Path) -> list[Row]:
    """The rows of a result file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
