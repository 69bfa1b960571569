"""Builds the native kernels when the package is installed, and says which machines a wheel with
them is for.

What is compiled is the environment's to say: SGLCORE_CPU_BUILD is here (what this processor needs;
the default), all, some instruction sets, or none, which leaves it to the first start.
SGLCORE_CPU_OBJECTS is a folder that keeps compiled files. A compiler that is missing or fails does
not fail the installation: what it said is kept beside the package, the ledger shows it, and torch's
own kernels serve.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
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


COMPILE = compiler_module()
ASKED = os.environ.get(COMPILE.SETTING) or COMPILE.HERE


class BuildNative(build_ext):
    """One shared library in place of Python's own kind of extension."""

    def get_ext_filename(self, fullname):
        """Its path, without what Python adds to names of its own extensions."""
        *folders, name = fullname.split(".")
        return str(Path(*folders, f"{name}.so"))

    def build_extension(self, ext):
        """Compile; on failure leave the words of the compiler in its place."""
        is_here = self.editable_mode or self.inplace
        target = PACKAGE / COMPILE.LIBRARY if is_here else Path(self.get_ext_fullpath(ext.name)).resolve()
        said = target.with_suffix(".error")
        said.unlink(missing_ok=True)
        kept = HERE.parent.parent / "build" / "native" / "objects" if is_here else os.environ.get("SGLCORE_CPU_OBJECTS")
        try:
            variant = COMPILE.as_asked(COMPILE.Variant(os.environ.get("CXX", "c++")), ASKED)
            COMPILE.build(target, variant, Path(kept) if kept else None)
        except COMPILE.BuildError as error:
            said.parent.mkdir(parents=True, exist_ok=True)
            said.write_text(f"{error}\n", encoding="utf-8")
            print(f"sglcore-cpu: {error}; torch's kernels will serve", file=sys.stderr)

    def copy_extensions_to_source(self):
        """An editable installation builds where the sources are, so nothing is left to copy."""


class Wheel(bdist_wheel):
    """The library is loaded by address, not imported: it is for one kind of machine and any
    Python."""

    def get_tag(self):
        """Without Python's version and interface."""
        return ("py3", "none", super().get_tag()[2])


LIBRARY = Extension("sglcore_cpu.libsglcore_cpu", sources=[])
setup(
    ext_modules=[] if ASKED == COMPILE.NONE else [LIBRARY],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
