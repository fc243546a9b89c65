"""Build Horovod against this environment's frameworks, and install it: ``make horovod``.

    python third_party/horovod/build.py torch tensorflow mxnet

A wheel per framework is kept in d5suite's cache folder under a digest of all that it depends on, so
a machine builds it once: the source distribution and its patches, the framework's version, Python,
the compiler, the processor and Horovod's own variables (``HOROVOD_...``). One wheel with the chosen
frameworks' extensions is put together from them. Nothing is installed before each extension was
seen adding.

Imports the standard library and `d5suite.files`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from d5suite.files import cache_folder

HERE = Path(__file__).resolve().parent

CONSTRAINTS = HERE.parents[1] / "constraints.txt"

FRAMEWORKS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "torch": ("PYTORCH", ("torch",), "import horovod.torch as hvd, torch; one = torch.ones(3)"),
    "tensorflow": (
        "TENSORFLOW",
        ("tensorflow-cpu", "tensorflow"),
        "import horovod.tensorflow as hvd, tensorflow; one = tensorflow.ones(3)",
    ),
    "mxnet": (
        "MXNET",
        ("mxnet",),
        "from d5suite.backends.mxnet.runtime import mx; import horovod.mxnet as hvd; one = mx.nd.ones(3)",
    ),
}
"""By name: Horovod's name for it, its distributions, and how to make an array with it."""

TOOLS = ("cffi", "cmake", "setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
"""What builds Horovod, or what Horovod imports."""

SETTINGS = {"CMAKE_POLICY_VERSION_MINIMUM": "3.5", "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1"}
"""Its CMake files are of an age that CMake 4 refuses unless told; ranks of MPI use Gloo, too, so
that the wheel depends on no MPI. What the environment sets goes before."""

METADATA = Path("horovod", "metadata.json")
"""In a wheel: the frameworks' versions that it was built against."""

INSTRUCTIONS = {"avx", "f16c", "fma"}
"""What of the processor Horovod's build asks for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and install; return the exit status."""
    parser = argparse.ArgumentParser(description="Build Horovod against this environment's frameworks.")
    parser.add_argument("frameworks", nargs="+", choices=[*FRAMEWORKS], help="whose extensions to build")
    chosen = sorted(set(parser.parse_args(arguments).frameworks))
    problem = lacks(chosen)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        install({name: wheel(name) for name in chosen})
    except subprocess.CalledProcessError as error:
        print(f"error: Horovod: {shlex.join(map(str, error.cmd[:6]))} … failed", file=sys.stderr)
        return 1
    return 0


def compiler() -> str:
    """Return the C++ compiler's command."""
    return os.environ.get("CXX", "c++")


def lacks(frameworks: Sequence[str]) -> str | None:
    """Say in one sentence what the build needs and this machine lacks."""
    absent = [name for name in frameworks if version(name) is None]
    if absent:
        return (
            f"Horovod cannot be built for {' and '.join(absent)}, which this environment lacks: install it first, or "
            "choose others, as in `make horovod FRAMEWORKS=torch`"
        )
    for tool, what in ((shlex.split(compiler())[0], "a C++ compiler"), ("make", "make"), ("git", "git")):
        if shutil.which(tool) is None:
            how = "install it (Debian: apt install g++ make git), or name the compiler in CXX"
            return f"building Horovod needs {what}, and {tool!r} was not found: {how}"
    return None


def version(framework: str) -> str | None:
    """Return a framework's installed version, or None."""
    for distribution in FRAMEWORKS[framework][1]:
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def settings(framework: str) -> dict[str, str]:
    """Return the build's variables."""
    chosen = {
        f"HOROVOD_WITH{'' if name == framework else 'OUT'}_{native}": "1" for name, (native, _, _) in FRAMEWORKS.items()
    }
    own = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    found = {**SETTINGS, **chosen, **own}
    if "HOROVOD_WITH_MPI" in own:
        del found["HOROVOD_WITHOUT_MPI"]
    return found


def digest(framework: str) -> str:
    """Name all that a framework's wheel depends on."""
    patches = {path.name: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.patch"))}
    said = subprocess.run([*shlex.split(compiler()), "--version"], check=True, capture_output=True, text=True).stdout
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text(encoding="utf-8").split()) if cpu.exists() else set()
    facts = [
        (HERE / "requirements.txt").read_text(encoding="utf-8"),
        *(f"{name}\n{text}" for name, text in patches.items()),
        str(version(framework)),
        str(sorted(settings(framework).items())),
        sys.version,
        str(sysconfig.get_config_var("EXT_SUFFIX")),
        said,
        platform.machine(),
        str(sorted(flags & INSTRUCTIONS)),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]


def wheel(framework: str) -> Path:
    """Return a framework's wheel: that of the cache, or one that is built now."""
    folder = cache_folder() / "horovod" / f"{framework}-{digest(framework)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.with_suffix(".lock")):
        for found in folder.glob("*.whl"):
            say(f"Horovod for {framework} was built before: {found}")
            return found
        say(f"building Horovod for {framework}: about 4 minutes on two cores")
        pip("install", "--constraint", str(CONSTRAINTS), *TOOLS)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as place:
            built = build(Path(place), framework, folder.with_suffix(".log"))
            say("trying it")
            probe(Path(place), built, [framework])
            ready = Path(place) / "ready"
            ready.mkdir()
            shutil.move(built, ready / built.name)
            os.replace(ready, folder)
        return folder / built.name


def build(place: Path, framework: str, log: Path) -> Path:
    """Unpack, patch and compile the source distribution in a folder; return its wheel."""
    pip(
        "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes",
        "--requirement", str(HERE / "requirements.txt"), "--dest", str(place),
    )  # fmt: skip
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(place, filter="data")
    source = place / archive.name.removesuffix(".tar.gz")
    for patch in sorted(HERE.glob("*.patch")):
        # Its folder may lie within a repository, whose paths git would take.
        subprocess.run(["git", "apply", str(patch)], cwd=source, check=True, env={**os.environ, "GIT_DIR": "/dev/null"})
    environment = {**os.environ, **settings(framework)}
    environment.setdefault("MAKEFLAGS", f"-j{len(os.sched_getaffinity(0))}")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["wheel", "--no-build-isolation", "--no-deps"]
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [*command, "--verbose", "--wheel-dir", str(place), str(source)],
            env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong = [line for line in lines if "error" in line.lower()][:10]
        print("\n".join(wrong or lines[-20:]), file=sys.stderr)
        say(f"the whole output: {log}")
        done.check_returncode()
    (built,) = place.glob("*.whl")
    return built


def probe(place: Path, built: Path, frameworks: Iterable[str]) -> None:
    """Add with each extension of a wheel that is not installed."""
    trial = place / "trial"
    pip("install", "--no-deps", "--target", str(trial), str(built))
    path = os.pathsep.join(filter(None, [str(trial), os.environ.get("PYTHONPATH")]))
    for name in frameworks:
        code = f"{FRAMEWORKS[name][2]}; hvd.init(); total = hvd.allreduce(one, op=hvd.Sum, name='one')"
        code += "; found = total.asnumpy() if hasattr(total, 'asnumpy') else total.numpy(); assert (found == 1).all()"
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path}, cwd=place)


def join(place: Path, wheels: Iterable[Path]) -> Path:
    """Put the extensions of several wheels, which are alike in all else, into one."""
    whole: Path | None = None
    for index, each in enumerate(wheels):
        folder = place / str(index)
        subprocess.run([sys.executable, "-m", "wheel", "unpack", "--dest", str(folder), str(each)], check=True)
        (part,) = folder.iterdir()
        if whole is None:
            whole = part
            continue
        versions = {**_versions(whole), **_versions(part)}
        shutil.copytree(part / "horovod", whole / "horovod", dirs_exist_ok=True)
        (whole / METADATA).write_text(json.dumps(versions), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(place), str(whole)], check=True)
    (joined,) = place.glob("*.whl")
    return joined


def _versions(unpacked: Path) -> dict[str, str]:
    """Return what a wheel was built against."""
    found: dict[str, str] = json.loads((unpacked / METADATA).read_text(encoding="utf-8"))
    return found


def install(wheels: Mapping[str, Path]) -> None:
    """Install wheels as one into this environment, and what Horovod imports."""
    pip("install", "--constraint", str(CONSTRAINTS), *TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        joined = join(Path(folder), wheels.values())
        if len(wheels) > 1:
            probe(Path(folder), joined, wheels)
        pip("install", "--no-deps", "--force-reinstall", str(joined))
    say(f"Horovod is installed for {', '.join(wheels)}: --scheme horovod")


def pip(*arguments: str) -> None:
    """Run pip quietly."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process builds the same."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(what: str) -> None:
    """Tell the user."""
    print(f"d5suite: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
