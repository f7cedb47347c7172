"""Compiles kernels, keeps them in a cache, loads and launches them. Imports no compiler until one is needed."""

from gemmgen.jit.build import BuiltKernel, build, build_module, find
from gemmgen.jit.load import Args, InputArgs, Kernel, MatrixArgs, Module, OutputArgs, load_kernel, load_module

__all__ = [
    "Args",
    "BuiltKernel",
    "InputArgs",
    "Kernel",
    "MatrixArgs",
    "Module",
    "OutputArgs",
    "build",
    "build_module",
    "find",
    "load_kernel",
    "load_module",
]
