"""Compiling custom operators: each content once, cached by it, with the compiler's own words if it fails.

A library is made of the user's source and a backend's glue, compiled apart so that a change of one does not compile the
other again. Imports the standard library and `d5suite.errors`.
"""

from __future__ import annotations

import hashlib
import os
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
from d5suite.files import cache_folder

HEADER = Path(__file__).with_name("d5suite_operator.h")
"""The C interface."""

FLAGS = ("-O3", "-fPIC", "-fopenmp", "-march=native")
"""For sources and glue; the same for every framework."""


class CompileError(ConfigurationError):
    """A source does not compile; the message is the compiler's, with file and line."""


@dataclass(frozen=True)
class Glue:
    """What a framework needs around a source.

    Attributes
    ----------
    source : Path
        C++ code that registers the operator with the framework and calls the ``d5_`` functions.
    compile_flags, link_flags : tuple of str
        The framework's own.
    definitions : mapping of str to str
        Macros, such as the operator's name.
    """

    source: Path
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    definitions: tuple[tuple[str, str], ...] = ()


def compiler_problem(source: Path) -> str | None:
    """Why a source cannot be compiled here at all, or None."""
    try:
        _nvcc() if source.suffix == ".cu" else _compiler()
    except BackendError as error:
        return f"{error.what}; {error.hint}"
    return None


def compile_library(
    name: str,
    source: Path,
    *,
    glue: Glue | None = None,
    identifier: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Compile and link a custom operator, or find it in the cache.

    Parameters
    ----------
    name : str
        The operator's name.
    source : Path
        ``.cc``, ``.cpp`` or ``.cu``.
    glue : Glue, optional
        Without it the library has the C interface and nothing else.
    identifier : str, optional
        The name to register it under, compiled in as ``d5_operator_name``, so that one glue serves every operator.
    attributes : mapping
        Compiled in as ``d5_attributes`` and ``d5_attribute_count``.
    flags : sequence of str
        Further compiler flags for the source.

    Returns
    -------
    Path
        The shared library.

    Raises
    ------
    CompileError
        If it does not compile or link.
    BackendError
        If there is no compiler.
    """
    table = _attribute_table(identifier or name, attributes or {})
    objects = [_object(source, (*FLAGS, *flags), f"{name}: {source}")]
    with tempfile.TemporaryDirectory(prefix="d5suite-custom-") as folder:
        tables = Path(folder) / "attributes.cc"
        tables.write_text(table, encoding="utf-8")
        objects.append(_object(tables, FLAGS, name))
    link: tuple[str, ...] = ("-shared", "-fopenmp", "-Wl,-Bsymbolic")  # every library has a d5_forward of its own
    if glue is not None:
        macros = tuple(f"-D{key}={value}" for key, value in glue.definitions)
        objects.append(_object(glue.source, (*FLAGS, *glue.compile_flags, *macros), name))
        link += glue.link_flags
    if source.suffix == ".cu":
        link += ("-lcudart", f"-L{_cuda_folder()}/lib64", f"-Wl,-rpath,{_cuda_folder()}/lib64")
    key = _digest("link", *(o.name for o in objects), *link)
    library = _objects_folder() / f"{name}-{key}.so"
    if not library.exists():
        _run([_compiler(), *map(str, objects), *link], library, name)
    return library


def _objects_folder() -> Path:
    folder = cache_folder() / "custom"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _object(source: Path, flags: Sequence[str], where: str) -> Path:
    """An object file of a source, compiled if its content, flags, compiler or processor are new."""
    compiler = _nvcc() if source.suffix == ".cu" else _compiler()
    if source.suffix == ".cu":
        host = " ".join(flag for flag in flags if flag != "-march=native")
        command = [compiler, "-c", str(source), "-I", str(HEADER.parent), "-O3", "-Xcompiler", host.replace(" ", ",")]
    else:
        command = [compiler, "-std=c++17", "-c", str(source), "-I", str(HEADER.parent), *flags]
    key = _digest(
        _version(compiler),
        _processor(),
        HEADER.read_bytes(),
        source.read_bytes(),
        *(a for a in command if a != str(source)),
    )
    target = _objects_folder() / f"{source.stem}-{key}.o"
    if not target.exists():
        _run(command, target, where)
    return target


def _run(command: list[str], target: Path, where: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", name], capture_output=True, text=True)
        if done.returncode:
            raise CompileError(
                f"it does not compile:\n{done.stderr.strip()[:4000]}",
                where=where,
                hint=f"The command: {' '.join(command)}",
            )
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


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


def _cuda_folder() -> Path:
    return Path(_nvcc()).resolve().parent.parent


@lru_cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


@lru_cache
def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return sys.platform
    return next((line for line in lines if line.startswith("flags")), sys.platform)
