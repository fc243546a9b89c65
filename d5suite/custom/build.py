"""Compile custom operators, cached by content; errors carry the compiler's message.

A library consists of the user's source and a backend's glue, which are compiled separately, so that
a change in one does not recompile the other. The cache key of a source is the preprocessor's
output, which includes headers. The cache key of glue is the glue's text and the framework's
version, because the framework's headers take seconds to preprocess. May import, from d5suite,
`network.custom`, `files` and `errors`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from d5suite.errors import BackendError, ConfigurationError
from d5suite.files import atomic_path, made_once
from d5suite.network.custom import INTERFACE, CustomOperator

HEADER = Path(__file__).with_name(INTERFACE)
"""The C interface."""

GLUE_HEADER = HEADER.with_name("d5suite_glue.h")
"""What all frameworks' glue shares."""

FLAGS = ("-O3", "-fPIC", "-fopenmp", "-march=native")
"""Compiler flags of sources and glue, the same for every framework."""

DEFINITIONS: Mapping[str, tuple[tuple[str, str], ...]] = {"cpu": (), "cuda": (("D5_CUDA", "1"),)}
"""By device: macros for glue code. None tells of an operator, so that all share one compilation."""

FUNCTIONS = {
    "d5_forward": "Its signature is int d5_forward(const d5_call *call).",
    "d5_output_shape": "D5_OUTPUTS_LIKE_FIRST_INPUT defines it for outputs of the first input's shape.",
    "d5_backward": "Define it, or give the CustomOperator has_backward=False.",
}
"""The functions of the C interface, with a hint for the case that the function is missing."""


class CompileError(ConfigurationError):
    """A source does not compile (the message comes from the compiler), or lacks a function."""


@dataclass(frozen=True)
class Glue:
    """A framework's code around a source.

    Attributes
    ----------
    source : Path
        C++ code that registers the operator with the framework and calls the ``d5_`` functions.
    version : str
        The framework's version, which stands for its headers and libraries.
    compile_flags, link_flags : tuple of str
        The framework's flags.
    definitions : tuple of (str, str)
        Names and values of macros, such as `DEFINITIONS` of the device.
    """

    source: Path
    version: str
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    definitions: tuple[tuple[str, str], ...] = ()


def compiler_problem(source: Path) -> str | None:
    """Return why there is no compiler for a source; None if there is one."""
    try:
        _nvcc() if source.suffix == ".cu" else _compiler()
    except BackendError as error:
        return f"{error.what}; {error.hint}"
    return None


def compile_operator(
    custom: CustomOperator, *, device: str = "cpu", glue: Glue | None = None, identifier: str | None = None
) -> Path:
    """Compile a custom operator's source for a device; see `compile_library`.

    Raises
    ------
    ConfigurationError
        If the operator has no source for the device.
    CompileError
        If the source does not compile or link, or lacks a function.
    """
    functions = ["d5_forward", "d5_output_shape", *(["d5_backward"] if custom.differentiable else [])]
    return compile_library(
        custom.name, custom.code(device), glue=glue, identifier=identifier, attributes=custom.attributes,
        flags=custom.flags, functions=functions,
    )  # fmt: skip


def compile_library(
    name: str,
    source: Path,
    *,
    glue: Glue | None = None,
    identifier: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    functions: Sequence[str] = (),
) -> Path:
    """Compile and link a custom operator's source, or take the library from the cache.

    Parameters
    ----------
    name : str
        The operator's name.
    source : Path
        ``.cc``, ``.cpp`` or ``.cu``.
    glue : Glue, optional
        Without glue the library has only the C interface.
    identifier : str, optional
        The name to register the operator under, compiled in as ``d5_operator_name``, so that the
        same glue serves all operators.
    attributes : mapping
        Attributes, compiled in as ``d5_attributes`` and ``d5_attribute_count``.
    flags : sequence of str
        Additional compiler flags for the source.
    functions : sequence of str
        Keys of `FUNCTIONS` that the source must define.

    Returns
    -------
    Path
        The shared library.

    Raises
    ------
    CompileError
        If the source does not compile or link, or lacks one of these functions.
    BackendError
        If there is no compiler.
    """
    table = _attribute_table(identifier or name, attributes or {})
    where = f"{name}: {source}"
    objects = [_object(source, (*FLAGS, *flags), where)]
    _require_functions(objects[0], functions, where)
    with tempfile.TemporaryDirectory(prefix="d5suite-custom-") as folder:
        tables = Path(folder) / "attributes.cc"
        tables.write_text(table, encoding="utf-8")
        objects.append(_object(tables, FLAGS, name))
    link: tuple[str, ...] = ("-shared", "-fopenmp", "-Wl,-Bsymbolic")  # every library has its own d5_forward
    if glue is not None:
        macros = tuple(f"-D{key}={value}" for key, value in glue.definitions)
        objects.append(_object(glue.source, (*FLAGS, *glue.compile_flags, *macros), name, version=glue.version))
        link += glue.link_flags
    if source.suffix != ".cu":
        link += ("-Wl,-z,defs",)  # report undefined symbols now, not at the call
    else:
        link += ("-lcudart", f"-L{_cuda_folder()}/lib64", f"-Wl,-rpath,{_cuda_folder()}/lib64")
    key = _digest("link", *(o.name for o in objects), *link)
    return _made(f"{name}-{key}.so", [_compiler(), *map(str, objects), *link], where)


def _made(name: str, command: list[str], where: str) -> Path:
    """Return the file that a command writes, from the cache if possible."""

    def make(target: Path) -> None:
        with atomic_path(target) as temporary:
            _output([*command, "-o", str(temporary)], where)

    return made_once(f"custom/{name}", make)


def _object(source: Path, flags: Sequence[str], where: str, version: str | None = None) -> Path:
    """Return an object file; compile it if content, flags, compiler or processor are new.

    ``version``, if given, identifies the headers that the source includes.
    """
    compiler = _nvcc() if source.suffix == ".cu" else _compiler()
    if source.suffix == ".cu":
        host = " ".join(flag for flag in flags if flag != "-march=native")
        options = ["-I", str(HEADER.parent), "-O3", "-Xcompiler", host.replace(" ", ",")]
    else:
        options = ["-std=c++17", "-I", str(HEADER.parent), *flags]
    if version is not None:
        content = [version.encode(), HEADER.read_bytes(), GLUE_HEADER.read_bytes(), source.read_bytes()]
    else:
        content = _preprocessed(compiler, source, options, where)
    key = _digest(_version(compiler), _processor(), *content, *options)
    return _made(f"{source.stem}-{key}.o", [compiler, "-c", str(source), *options], where)


def _preprocessed(compiler: str, source: Path, options: list[str], where: str) -> list[bytes]:
    """Return the code that a compiler reads for a source.

    This is the preprocessor's output. The output of nvcc omits host code, so for nvcc this is the
    content of all files that it reads.
    """
    if source.suffix != ".cu":
        return [_output([compiler, "-E", "-P", str(source), *options], where).encode()]
    text = _output([compiler, "-E", str(source), *options], where)
    files = sorted({*re.findall(r'^# \d+ "([^"<]+)"', text, re.MULTILINE)})
    return [Path(file).read_bytes() for file in files if Path(file).is_file()]


def _require_functions(compiled: Path, functions: Sequence[str], where: str) -> None:
    """Raise `CompileError` unless an object file defines these functions; runs no code."""
    symbols = _output([_symbol_lister(), "--defined-only", "-g", "-P", str(compiled)], where).splitlines()
    defined = {line.split()[0] for line in symbols if line}
    for function in functions:
        if function in defined:
            continue
        alike = any(function in symbol for symbol in defined)
        raise CompileError(
            f"it does not define {function}" + (", only a C++ function of that name" if alike else ""),
            where=where,
            hint=f"Declare it as {INTERFACE} does, outside of namespaces." if alike else FUNCTIONS[function],
        )


def _output(command: list[str], where: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise CompileError(
            f"it does not compile:\n{done.stderr.strip()[:4000]}", where=where, hint=f"The command: {' '.join(command)}"
        )
    return done.stdout


def _attribute_table(identifier: str, attributes: Mapping[str, Any]) -> str:
    lines = ['#include "d5suite_operator.h"', f'extern "C" const char d5_operator_name[] = "{identifier}";']
    entries = []
    for index, (key, value) in enumerate(sorted(attributes.items())):
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not key.isidentifier() or not all(isinstance(v, int | float) for v in values):
            raise ConfigurationError(f"attribute {key!r} is neither a number nor a list of numbers")
        lines.append(f"static const double values_{index}[] = {{{', '.join(float(v).hex() for v in values)}}};")
        entries.append(f'{{"{key}", values_{index}, {len(values)}}}')
    count = len(entries)
    body = ", ".join(entries) or "{0, 0, 0}"
    lines.append(f'extern "C" const d5_attribute d5_attributes[] = {{{body}}};')
    lines.append(f'extern "C" const int32_t d5_attribute_count = {count};')
    return "\n".join(lines) + "\n"


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:20]


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    found = shutil.which(compiler)
    if found is None:
        raise BackendError(
            f"custom operators need a C++ compiler, and {compiler!r} is not found",
            hint="Install one (Debian: apt install g++), or name it in the environment variable CXX.",
        )
    return found


def _nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        raise BackendError("a CUDA source needs nvcc, which is not found", hint="Install the CUDA toolkit.")
    return found


@lru_cache
def _cuda_folder() -> Path:
    """Return the CUDA toolkit's folder, as nvcc reports it: the nvcc on PATH may be a script."""
    said = subprocess.run([_nvcc(), "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return Path(top[1]).resolve() if top else Path(_nvcc()).resolve().parent.parent


@lru_cache
def _symbol_lister() -> str:
    """Return the ``nm`` that belongs to the compiler."""
    return subprocess.run([_compiler(), "-print-prog-name=nm"], capture_output=True, text=True).stdout.strip() or "nm"


@lru_cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


@lru_cache
def _processor() -> str:
    """Return the processor features that ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return sys.platform
    return next((line for line in lines if line.startswith("flags")), sys.platform)
