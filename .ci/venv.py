"""Makes a virtual environment for `make`: one that sees this Python's torch, or has a torch of its own.

    python3 .ci/venv.py FOLDER TORCH
"""

import subprocess
import sys
import sysconfig
from pathlib import Path


def main(folder: str, torch: str) -> None:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([Path(folder, "bin/pip"), "install", "--disable-pip-version-check", torch], check=True)
        return
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", folder], check=True)
    if sys.prefix != sys.base_prefix:
        share(Path(folder), sysconfig.get_path("purelib"))


def share(folder: Path, packages: str) -> None:
    """Show an environment the `packages` of the environment that made it; by itself it sees the base Python's alone."""
    (site,) = folder.glob("lib/python*/site-packages")
    line = f"import site; site.PREFIXES.append({sys.prefix!r}); site.addsitedir({packages!r})\n"
    site.joinpath("outer.pth").write_text(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
