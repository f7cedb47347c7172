"""Finds and fills the CUDA templates."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

_PACKAGE = Path(__file__).parent


def templates_dir() -> Path:
    """The folder of the templates: inside an installed wheel, else beside the package in a checkout.

    Its `include` folder belongs on the compilers' include path.
    """
    installed = _PACKAGE / "_templates"
    return installed if installed.is_dir() else _PACKAGE.parent / "templates"


def render(name: str, /, **values: object) -> str:
    """The text of template `name` with `values` filled in.

    Raises:
        jinja2.UndefinedError: the template uses a name that `values` lacks.
    """
    return _environment().get_template(name).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2  # only a kernel that is not in the cache needs it

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
