"""Runs Metal kernels on the CPU: builds the source that MLX generates for a launch with g++ and
`metal_host.h`.

MLX also generates a kernel's signature and source without Metal, when a function is exported. That
source is built here, so a body that does not match its declared names does not compile. It was
never compiled by a Metal compiler.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sglcore_mlx.attention.metal import Launch

HEADER = Path(__file__).with_name("metal_host.h")
FLAGS = ("-std=c++17", "-O1", "-w", "-ffp-contract=off")
GUARD = 256
"""Guard bytes before and after each output."""
POISON = 0x7F
"""Fill byte of unwritten outputs and of guards: NaN in every floating-point type."""
ENVIRONMENT = MappingProxyType({"ASAN_OPTIONS": "detect_leaks=0"})
"""The program does not free its arrays."""

ATTRIBUTES = (
    ("thread_index_in_simdgroup", "thread % 32"),
    ("simdgroup_index_in_threadgroup", "thread / 32"),
    ("thread_position_in_grid", "uint3{place.x * threads + thread, place.y, place.z}"),
    ("threadgroup_position_in_grid", "place"),
    ("threadgroups_per_grid", "groups"),
)
"""Thread attributes that a kernel may use, as expressions of the main program's variables."""


class HostFailure(AssertionError):
    """A kernel does not compile, accesses memory out of bounds, has a data race, or deadlocks in a
    barrier."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a generated kernel: `kind` is "input", "shape", "output" or "attribute";
    `type` is the C++ type."""

    kind: str
    type: str
    name: str


@dataclass(frozen=True, slots=True)
class Generated:
    """The source that MLX generates: header and function, the parameters, and `name<constants>`,
    which names the template instance."""

    text: str
    parameters: tuple[Parameter, ...]
    instance: str


def generated_text(launch: Launch, inputs: Sequence[Any]) -> str:
    """Return the source that MLX would give to Metal's compiler, read from its standard output. No
    GPU is needed."""

    def made(*arrays: mx.array) -> list[mx.array]:
        given = (
            [next(rest) if isinstance(value, mx.array) else value for value in inputs] if (rest := iter(arrays)) else []
        )
        return launch.program.kernel(
            inputs=given,
            template=list(launch.template),
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=list(launch.output_shapes),
            output_dtypes=list(launch.output_dtypes),
            verbose=True,
        )

    arrays = [value for value in inputs if isinstance(value, mx.array)]
    with tempfile.TemporaryDirectory() as folder:
        said = _standard_output(lambda: mx.export_function(str(Path(folder, "kernel.mlxfn")), made, *arrays))
    return said.split("```\n", 1)[1].rsplit("```", 1)[0]


def _standard_output(action: Callable[[], object]) -> str:
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            action()
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        return file.read().decode()


def parse(text: str, inputs: Sequence[str], outputs: Sequence[str]) -> Generated:
    """Parse the generated source: its signature, and the template instance at its end."""
    function, instance = re.split(r"\ntemplate \[\[host_name\([^)]*\)\]\] \[\[kernel\]\] ", text)
    signature = re.search(r"\[\[kernel\]\] void \w+\(\n(.*?)\) \{\n", function, re.DOTALL)
    called = re.match(r"decltype\((\w+<.*>)\) ", instance)
    if signature is None or called is None:
        raise HostFailure(f"a generated text of an unknown form: {text[:400]}")
    parameters = [_parameter(line.strip(), inputs, outputs) for line in signature[1].split(",\n")]
    return Generated(function, tuple(parameters), called[1])


def _parameter(line: str, inputs: Sequence[str], outputs: Sequence[str]) -> Parameter:
    declared = re.fullmatch(r"(?P<type>.*?[*&]?)\s*(?P<name>\w+) \[\[(?P<attribute>\w+)(?:\(\d+\))?\]\]", line)
    if declared is None:
        raise HostFailure(f"a parameter of an unknown form: {line}")
    name = declared["name"]
    kinds = {**dict.fromkeys(inputs, "input"), **dict.fromkeys(outputs, "output")}
    kind = "attribute" if declared["attribute"] != "buffer" else kinds.get(name, "shape")
    return Parameter(kind, declared["type"], name)


def main_program(made: Generated, guard: int) -> str:
    """Return a C++ program that reads the case file, runs the grid, and writes the output file.

    Arguments: case, outputs, threadgroups in x, y and z, threads, seed.
    """
    buffers = [one for one in made.parameters if one.kind != "attribute"]
    given = {one.name: _argument(one, index, guard) for index, one in enumerate(buffers)}
    values = dict(ATTRIBUTES)
    asked = [one.name for one in made.parameters if one.kind == "attribute"]
    if unknown := sorted(set(asked) - values.keys()):
        raise HostFailure(f"attributes that the host can not give: {', '.join(unknown)}")
    call = ", ".join(given.get(one.name) or values[one.name] for one in made.parameters)
    written = "".join(
        f"    fwrite(data[{i}], 1, size[{i}], file);\n" for i, one in enumerate(buffers) if one.kind == "output"
    )
    return f"""#include "metal_host.h"
{made.text}
static uint3 groups;
static uint threads;
static char *data[{len(buffers)}];
static void body(uint thread, uint3 place) {{ {made.instance}({call}); }}
int main(int, char **given) {{
    groups = {{uint(atoi(given[3])), uint(atoi(given[4])), uint(atoi(given[5]))}};
    threads = atoi(given[6]);
    int64_t size[{len(buffers)}];
    FILE *file = fopen(given[1], "rb");
    for (int i = 0; i < {len(buffers)}; ++i) data[i] = host::next_array(file, size + i);
    fclose(file);
    host::run_grid(groups, threads, atoi(given[7]), body);
    file = fopen(given[2], "wb");
{written}    return fclose(file);
}}
"""


def _argument(one: Parameter, index: int, guard: int) -> str:
    if one.kind == "output":
        return f"({one.type})(data[{index}] + {guard})"
    return f"*({one.type[:-1]}*)data[{index}]" if one.type.endswith("&") else f"({one.type})data[{index}]"


@dataclass(frozen=True, slots=True)
class Host:
    """Runs launches on the CPU. `folder` caches the binaries; `sanitizer` is "", "address" or
    "thread".

    `edit` changes the generated source before the build (to plant a defect); `seed` sets the order
    of threads.
    """

    folder: Path
    sanitizer: str = ""
    seed: int = 0
    edit: Callable[[str], str] = str

    def launch(self, launch: Launch, inputs: Sequence[Any]) -> list[mx.array]:
        """Run a launch and return its outputs. HostFailure also if guard bytes were overwritten."""
        mx.eval([value for value in inputs if isinstance(value, mx.array)])
        program = launch.program
        made = parse(self.edit(generated_text(launch, inputs)), program.inputs, program.outputs)
        groups = [threads // size for threads, size in zip(launch.grid, launch.threadgroup, strict=True)]
        if [count * size for count, size in zip(groups, launch.threadgroup, strict=True)] != list(launch.grid):
            raise HostFailure(f"a grid {launch.grid} that is not made of whole threadgroups {launch.threadgroup}")
        if launch.threadgroup[1:] != (1, 1):
            raise HostFailure(f"a threadgroup {launch.threadgroup} of more than one dimension")
        given = {name: _bytes(value) for name, value in zip(program.inputs, inputs, strict=True)}
        given |= {f"{name}_shape": _shape(value) for name, value in zip(program.inputs, inputs, strict=True)}
        sizes = [int(np.prod(s)) * t.size for s, t in zip(launch.output_shapes, launch.output_dtypes, strict=True)]
        empty = {
            name: bytes([POISON]) * (size + 2 * self.guard) for name, size in zip(program.outputs, sizes, strict=True)
        }
        buffers = [(given | empty)[one.name] for one in made.parameters if one.kind != "attribute"]
        written = self._run(self._built(made), buffers, [*groups, launch.threadgroup[0], self.seed])
        return self._outputs(launch, sizes, written)

    @property
    def guard(self) -> int:
        """Guard bytes around outputs; 0 with the address sanitizer, which checks exact sizes."""
        return GUARD if self.sanitizer != "address" else 0

    def _built(self, made: Generated) -> Path:
        text = main_program(made, self.guard)
        name = hashlib.sha256((self.sanitizer + text + HEADER.read_text()).encode()).hexdigest()[:24]
        binary = self.folder / name
        if not binary.exists():
            source = binary.with_suffix(".cpp")
            source.write_text(text)
            extra = [f"-fsanitize={self.sanitizer}", "-g"] if self.sanitizer else []
            include = f"-I{HEADER.parent}"
            _checked("the text does not compile", [compiler(), *FLAGS, *extra, include, str(source), "-o", str(binary)])
        return binary

    def _run(self, binary: Path, buffers: list[bytes], numbers: list[int]) -> bytes:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            case, outputs = Path(folder, "case"), Path(folder, "outputs")
            case.write_bytes(b"".join(len(data).to_bytes(8, "little") + data for data in buffers))
            _checked("the run failed", [str(binary), str(case), str(outputs), *map(str, numbers)])
            return outputs.read_bytes()

    def _outputs(self, launch: Launch, sizes: list[int], written: bytes) -> list[mx.array]:
        outputs, at = [], 0
        for size, shape, dtype in zip(sizes, launch.output_shapes, launch.output_dtypes, strict=True):
            whole = written[at : (at := at + size + 2 * self.guard)]
            around = whole[: self.guard] + whole[self.guard + size :]
            if around.strip(bytes([POISON])):
                raise HostFailure(f"{launch.program.name} wrote outside an output of shape {shape}")
            words = np.frombuffer(whole[self.guard : self.guard + size], np.uint32 if dtype.size == 4 else np.uint16)
            outputs.append(mx.array(words).view(dtype).reshape(shape))
        return outputs


RUNS_HERE = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="threads as fibres need Linux and g++"
)
"""Marker of tests that run kernels with `Host`."""


def compiler() -> str:
    """Return the path of g++; HostFailure if there is none."""
    found = shutil.which("g++")
    if found is None:
        raise HostFailure("no g++ on the path; install one, the kernels' text is tested by it")
    return found


def _checked(what: str, command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **ENVIRONMENT}
    )
    if done.returncode:
        raise HostFailure(f"{what} (status {done.returncode}): {done.stderr[:2000]}")


def _bytes(value: mx.array | float) -> bytes:
    array = value if isinstance(value, mx.array) else mx.array(value)
    words = array.view(mx.uint32 if array.dtype.size == 4 else mx.uint16)
    return np.array(words).tobytes()


def _shape(value: mx.array | float) -> bytes:
    return np.array(value.shape if isinstance(value, mx.array) else (), np.int32).tobytes()
