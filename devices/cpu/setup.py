"""Compile the native kernels when the package is installed, and tag a wheel that contains them with
its platform.

Environment variables: SGLCORE_CPU_BUILD is `here` (the instruction sets that this processor needs;
the default), `all`, a list of instruction sets, or `none`, which leaves the compilation to the
first start. SGLCORE_CPU_OBJECTS is a folder that keeps compiled files. If the compiler is missing
or fails, the installation still succeeds: its message is written to a file next to the library's
place, the ledger shows it, and torch's kernels are used.
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
    """Load the file `sglcore_cpu/compile.py` as a module without importing the package, because the
    package's dependencies are not installed yet. Return the module; it is also in `sys.modules` as
    `sglcore_cpu_compile`."""
    spec = importlib.util.spec_from_file_location("sglcore_cpu_compile", PACKAGE / "compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


COMPILE = compiler_module()
ASKED = os.environ.get(COMPILE.SETTING) or COMPILE.HERE


class BuildNative(build_ext):
    """The setuptools command `build_ext`: builds the native kernels as a plain shared library, not
    as a Python extension module."""

    def get_ext_filename(self, fullname):
        """Return the path of the library `fullname` (a dotted name), relative to the build folder:
        folders, then `NAME.so`, without the suffix that Python adds to extension modules."""
        *folders, name = fullname.split(".")
        return str(Path(*folders, f"{name}.so"))

    def build_extension(self, ext):
        """Compile the library: in an editable installation into the source folder, else into the
        build folder. If the compiler is missing or fails, raise nothing: print its message and
        write it to a file next to the library's place, with the suffix `.error`."""
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
        """Do nothing: an editable installation builds in the source folder."""


class Wheel(bdist_wheel):
    """The setuptools command `bdist_wheel` for a wheel of one platform and any Python 3: the
    library is loaded with ctypes, not imported."""

    def get_tag(self):
        """Return ("py3", "none", the platform's tag): no Python version and no ABI."""
        return ("py3", "none", super().get_tag()[2])


LIBRARY = Extension("sglcore_cpu.libsglcore_cpu", sources=[])
setup(
    ext_modules=[] if ASKED == COMPILE.NONE else [LIBRARY],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
