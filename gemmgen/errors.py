"""Every error that gemmgen raises on purpose.

A message says what happened, where in the user's function, why, and what to do about it. Code that
needs to react to a failure catches the class; the objects involved are attributes.
"""

from __future__ import annotations


class GemmgenError(Exception):
    """Base of all gemmgen errors."""


class TraceError(GemmgenError):
    """The epilogue function cannot be turned into a graph: its signature, operands or outputs are wrong."""


class VerifyError(GemmgenError):
    """A graph breaks a rule of the IR: a reduction used as an operand, a dtype with no meaning there."""


class OperandError(GemmgenError, TypeError):
    """An operand of a call is missing, unexpected, or has the wrong kind, dtype or device."""


class ShapeMismatch(GemmgenError, ValueError):
    """An extent of an operand differs from the axis that it was declared to vary along."""


class UnsupportedOp(GemmgenError, NotImplementedError):
    """The architecture or mainloop cannot carry an op, dtype or operand of the graph."""


class UnsupportedArch(GemmgenError, NotImplementedError):
    """No template exists for the GPU's architecture."""


class IllegalConfig(GemmgenError, ValueError):
    """A `GemmConfig` cannot run the problem on the architecture; the message gives the reason."""


class ToolchainError(GemmgenError, RuntimeError):
    """nvcc, NVRTC, nvJitLink, the headers or the host compiler are missing or do not fit each other."""


class CompileError(GemmgenError, RuntimeError):
    """A compiler refused generated code.

    Attributes:
        log: the complete output of the compiler.
        source_path: where the source that failed is kept, or None.
    """

    def __init__(self, message: str, log: str = "", source_path: str | None = None):
        super().__init__(message)
        self.log = log
        self.source_path = source_path


class UnfitKernel(CompileError):
    """A kernel that the compilers made, and that is not used, as it would be slow; made again, it would be the same."""


class CompileForbidden(GemmgenError, RuntimeError):
    """`GEMMGEN_COMPILE=0` forbids the compilation that a call would need."""


class CacheError(GemmgenError, RuntimeError):
    """The kernel cache cannot be read or written and no fallback is possible."""


class LaunchError(GemmgenError, RuntimeError):
    """The driver refused to load or launch a kernel."""


class NoBackward(GemmgenError, NotImplementedError):
    """A gradient was asked for that gemmgen cannot compute."""
