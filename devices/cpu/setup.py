"""Builds the native kernels when the package is installed.

A compiler that is missing or fails does not fail the installation: what it said is kept beside the package, the ledger
shows it, and torch's own kernels serve.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "sglcore_cpu"


def compiler_module() -> ModuleType:
    """`sglcore_cpu.compile`, without importing the package, whose needs are not installed yet."""
    spec = importlib.util.spec_from_file_location("sglcore_cpu_compile", PACKAGE / "compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """One shared library in place of Python's own kind of extension."""

    def get_ext_filename(self, fullname):
        """Its path, without what Python adds to names of its own extensions."""
        *folders, name = fullname.split(".")
        return str(Path(*folders, f"{name}.so"))

    def build_extension(self, ext):
        """Compile; on failure leave the words of the compiler in its place."""
        compile = compiler_module()
        is_here = self.editable_mode or self.inplace
        target = PACKAGE / compile.LIBRARY if is_here else Path(self.get_ext_fullpath(ext.name)).resolve()
        said = target.with_suffix(".error")
        said.unlink(missing_ok=True)
        variant = compile.Variant(os.environ.get("CXX", "c++"))
        try:
            compile.build(target, variant, HERE.parent.parent / "build" / "native" / "objects" if is_here else None)
        except compile.BuildError as error:
            said.parent.mkdir(parents=True, exist_ok=True)
            said.write_text(f"{error}\n", encoding="utf-8")
            print(f"sglcore-cpu: {error}; torch's kernels will serve", file=sys.stderr)

    def copy_extensions_to_source(self):
        """An editable installation builds where the sources are, so nothing is left to copy."""


setup(ext_modules=[Extension("sglcore_cpu.libsglcore_cpu", sources=[])], cmdclass={"build_ext": BuildNative})
