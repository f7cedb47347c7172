"""One value per GPU architecture: what its templates are and what it can hold.

No other module compares SM numbers; each asks the `Arch` value instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmgen.errors import UnsupportedArch


@dataclass(frozen=True)
class Arch:
    """A compilation target.

    Attributes:
        name: the name used in Python, the CLI and the docs, such as `sm90`.
        target: the suffix of nvcc's `compute_` / `sm_` / `lto_` targets, such as `90a`.
        capability: the compute capability (major, minor) that a device reports.
        families: template families that run here, the preferred first.
        smem_bytes: shared memory that one CTA may use.
        sm_count: multiprocessors of the largest common part; the planning default without a GPU.
    """

    name: str
    target: str
    capability: tuple[int, int]
    families: tuple[str, ...]
    smem_bytes: int
    sm_count: int

    @property
    def has_fp8_mma(self) -> bool:
        """Whether `mma.sync` multiplies fp8; sm80 and sm86 do not."""
        return self.capability >= (8, 9)


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm80", "80", (8, 0), ("sm80",), 163 * 1024, 108),
        Arch("sm86", "86", (8, 6), ("sm80",), 99 * 1024, 84),
        Arch("sm89", "89", (8, 9), ("sm80",), 99 * 1024, 142),
        Arch("sm90", "90a", (9, 0), ("sm90", "sm80"), 227 * 1024, 132),
        Arch("sm100", "100a", (10, 0), ("sm100", "sm80"), 227 * 1024, 148),
        Arch("sm120", "120a", (12, 0), ("sm80",), 99 * 1024, 170),
    )
}


def arch_named(name: str) -> Arch:
    """The `Arch` called `name`; `sm90a`, `sm_90a` and `90` mean `sm90` too."""
    key = "sm" + str(name).lower().removeprefix("sm").lstrip("_").rstrip("a")
    if key not in ARCHS:
        raise UnsupportedArch(f"unknown arch {name!r}; gemmgen knows {', '.join(ARCHS)}")
    return ARCHS[key]


def arch_of_capability(capability: tuple[int, int], device_name: str = "this GPU") -> Arch:
    """The `Arch` of a device that reports compute `capability`."""
    for arch in ARCHS.values():
        if arch.capability == capability:
            return arch
    known = ", ".join(f"{a.name} ({a.capability[0]}.{a.capability[1]})" for a in ARCHS.values())
    raise UnsupportedArch(
        f"{device_name} has compute capability {capability[0]}.{capability[1]}, for which gemmgen has no template.\n"
        f"  Known: {known}.\n"
        "  Run on the CPU implementation (move the tensors to the CPU), or use a gemmgen release that knows this GPU."
    )
