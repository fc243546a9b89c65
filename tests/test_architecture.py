"""The rules of the code's structure, held by looking at it and by importing it in fresh
processes."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from d5suite.levels.backend import MODULES
from d5suite.levels.operator import function_name
from d5suite.network.nodes.elementwise import NUMPY_BINARY, NUMPY_UNARY
from d5suite.network.operators import FAMILIES, ZOO_OPERATORS

PACKAGE = Path(__file__).parents[1] / "d5suite"
PAGE = PACKAGE.parent / "docs" / "architecture.md"
BACKENDS = sorted(p.name for p in (PACKAGE / "backends").iterdir() if (p / "__init__.py").exists())
DATA = {name: importlib.import_module(f"d5suite.backends.{name}").BACKEND for name in BACKENDS}
FRAMEWORKS = {"torch", "tensorflow", "keras", "mxnet", "jax", "deep500", "horovod", "torchvision"}
ENGINES = {"keras": {"tensorflow", "torch", "jax"}}
"""Frameworks that one adapter's framework runs on; it may import them."""

TRANSPORTS = {"gloo.py": {"torch"}, "nccl.py": {"torch"}}
"""Communicators that a framework ships."""

MAY_NAME = {
    "distributed/communicators/__init__.py": "the library that ships a transport",
    "distributed/communicators/gloo.py": "it is torch's",
    "distributed/communicators/nccl.py": "it is torch's",
    "distributed/horovod.py": "Horovod is one library for several frameworks",
    "distributed/network.py": "variables by which transports are told an interface, Horovod's among them",
    "pytest_plugin/options.py": "the help text of --backend has an example",
    "worker/ranks.py": "variables by which launchers tell a rank's number, horovodrun's among them",
}
"""Files outside ``backends/`` whose strings may name a framework, with the reason."""

OPERATOR_FILES = {"__init__.py", "context.py", "operator.py", "table.py", *(f"{family}.py" for family in FAMILIES)}
"""An adapter's ``operators/``: what families share, level 0, the table of all, and the families."""

SHARED_NAMES = {"NUMPY_BINARY": NUMPY_BINARY, "NUMPY_UNARY": NUMPY_UNARY}
"""Tables of operators that an adapter's ``OPERATORS`` may take whole."""

ADAPTER_FILES = {"__init__.py", "knobs.py", *(f"{module}.py" for module in MODULES)}
FURTHER_FILES = {"torch": {"graphs.py"}, "deep500": {"bridge.py", "repairs.py"}, "keras": {"engine.py"}}
"""What one adapter has beyond the others: PyTorch's CUDA graphs, the way back into deep500 and
repairs of it, and Keras's own backends."""

MAY_SHARE = {
    "Reader": "every coupling has one",
    "Writer": "every coupling and every format of datasets has one",
    **dict.fromkeys(
        ("GroupNormalization", "Pad", "Resize", "SoftmaxCrossEntropyLoss"),
        "ONNX's operator: as a node's attributes, and as the reference's implementation",
    ),
}
"""Public classes that several modules outside ``backends/`` define by one name, with the reason."""

LONGEST = 500
"""Lines of a file that need no reason; a longer one says "One file, because ..." in its
docstring."""

MARKDOWN = [*sorted(PAGE.parent.rglob("*.md")), *sorted(PAGE.parents[1].glob("*.md"))]
WIDEST = 100
"""Characters of a line of prose."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "registry": {"registry", "errors", "files"},
    "network": {"network", "errors"},
    "custom": {"custom", "network", "errors", "files"},
    "optimizers": {"optimizers", "errors"},
    "levels": {"levels", "network", "optimizers", "errors"},
    "distributed": {"distributed", "levels", "network", "optimizers", "errors"},
    "data": {"data", "errors", "files"},
    "statistics": {"statistics", "errors"},
    "instruments": {"instruments", "statistics", "errors"},
    "validate": {"validate", "levels", "network", "optimizers", "errors", "files"},
    "training": {"training", "levels", "optimizers", "instruments", "validate", "errors", "files"},
    "job": {"job", "errors", "files"},
    "traces": {"traces", "instruments", "errors", "files"},
    "models": {"models", "errors", "files"},
    "simulation": {"simulation", "distributed", "levels", "network", "models", "traces", "errors", "files"},
    "ceilings": {
        "ceilings", "backends", "custom", "distributed", "instruments", "job", "launch", "models", "network",
        "statistics", "errors", "files",
    },
    "launch": {"launch", "job", "instruments", "errors", "files"},
    "backends": {"backends", "distributed", "levels", "network", "custom", "optimizers", "data", "errors"},
    "workflows": {
        "workflows", "distributed", "levels", "network", "optimizers", "validate", "registry", "errors", "files",
    },
    "workloads": {
        "workloads", "workflows", "backends", "distributed", "levels", "network", "custom", "optimizers", "data",
        "instruments", "validate", "job", "errors", "files",
    },
    "measurements": {
        "measurements", "workloads", "workflows", "distributed", "levels", "network", "optimizers", "data",
        "statistics", "instruments", "training", "validate", "registry", "errors", "files",
    },
    "passes": {
        "passes", "measurements", "workloads", "distributed", "levels", "instruments", "statistics", "validate",
        "traces", "job", "registry", "errors",
    },
    "worker": {
        "worker", "passes", "measurements", "workloads", "distributed", "instruments", "validate", "launch", "job",
        "errors",
    },
    "tuning": {
        "tuning", "session", "cases", "backends", "data", "distributed", "levels", "launch", "instruments", "models",
        "statistics", "job", "errors", "files",
    },
    "cases": {
        "cases", "passes", "measurements", "workflows", "backends", "distributed", "levels", "network", "custom",
        "optimizers", "data", "instruments", "job", "errors",
    },
    "session": {
        "session", "cases", "passes", "measurements", "backends", "launch", "job", "instruments", "statistics",
        "errors", "files",
    },
    "study": {"study", "backends", "errors", "files"},
    "report": {
        "report", "passes", "measurements", "backends", "network", "instruments", "statistics", "traces", "models",
        "study", "errors", "files",
    },
    "pytest_plugin": {
        "pytest_plugin", "tuning", "session", "cases", "passes", "measurements", "report", "backends", "distributed",
        "optimizers", "data", "statistics", "instruments", "launch", "job", "errors", "files",
    },
    "commands": {
        "commands", "pytest_plugin", "tuning", "session", "launch", "report", "testing", "backends", "levels",
        "network", "data", "instruments", "traces", "models", "simulation", "ceilings", "study", "errors", "files",
    },
    "cli": {"commands", "report", "errors"},
    "testing": {
        "testing", "backends", "distributed", "levels", "network", "optimizers", "data", "instruments", "validate",
        "training", "errors", "files",
    },
}  # fmt: skip
"""d5suite's parts and the parts each may import; ``docs/architecture.md`` says it in words."""


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield f"{node.module}"


def _files(part: str) -> list[Path]:
    single = PACKAGE / f"{part}.py"
    return [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))


def test_every_part_has_its_rule() -> None:
    parts = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} == set(MAY_IMPORT)


def test_imports_point_down_in_the_drawing() -> None:
    drawing = PAGE.read_text(encoding="utf-8").partition("A part imports parts of lower lines only.")[2].split("```")[1]
    lines = [line.split() for line in drawing.strip().splitlines()]
    assert sorted(part for line in lines for part in line) == sorted(MAY_IMPORT)
    for number, line in enumerate(lines):
        below = {part for lower in lines[number + 1 :] for part in lower}
        for part in line:
            assert MAY_IMPORT[part] - {part} <= below, f"{PAGE}: what {part} imports is not all below it"


def test_the_page_says_what_may_be_imported() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {part for row in rows for part in re.findall(r"`(\w+)(?:/|\.py)", row)}
    assert named == set(MAY_IMPORT)


def test_levels_have_the_same_names_in_every_room() -> None:
    levels = {"operator", "network", "training", "distributed"}
    for room in ("measurements", "validate"):
        assert {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")} == levels
    assert levels < {path.stem for path in (PACKAGE / "levels").glob("*.py")}


def test_folders_of_tests_mirror_the_package() -> None:
    folder = Path(__file__).parent
    rooms = {each.name for each in folder.iterdir() if any(each.glob("test_*.py")) or any(each.glob("*/test_*.py"))}
    assert rooms - {"findings", "third_party"} <= set(MAY_IMPORT)
    for room in MAY_IMPORT:
        inner = {each.parent.name for each in (folder / room).glob("*/test_*.py")}
        assert inner <= {each.name for each in (PACKAGE / room).glob("*") if each.is_dir()}, room


def test_long_files_give_a_reason() -> None:
    unexplained = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > LONGEST and "One file, because" not in (ast.get_docstring(ast.parse(text)) or ""):
            unexplained.append(str(path.relative_to(PACKAGE)))
    assert not unexplained, f"more than {LONGEST} lines"


def _imported(tree: ast.Module, *, late: bool) -> Iterator[str]:
    """Yield the modules that a module imports when it is imported; with ``late`` in functions,
    too."""
    blocks = (ast.If, ast.Try, ast.With, *((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef) if late else ()))
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, blocks):
            waiting += [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                path = PACKAGE.parent / Path(*inner.split("."))
                yield inner if path.is_dir() or path.with_suffix(".py").exists() else f"{node.module}"


def circle(files: Iterable[Path], top: Path, *, late: bool = False) -> list[str]:
    """Return a circle of imports, if there is one; with ``late``, also of imports in functions."""
    graph = {}
    for path in files:
        module = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = set(_imported(ast.parse(path.read_text(encoding="utf-8")), late=late)) - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_imports_make_no_circle() -> None:
    assert not circle(PACKAGE.rglob("*.py"), PACKAGE.parent)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_late_imports_make_no_circle_inside_a_part(part: str) -> None:
    assert not circle(_files(part), PACKAGE.parent, late=True)


def test_a_circle_of_imports_is_seen(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import two\n")
    (tmp_path / "two.py").write_text("from one import name\n")
    assert set(circle(tmp_path.glob("*.py"), tmp_path)) == {"one", "two"}


def test_a_circle_of_late_imports_is_seen(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import two\n")
    (tmp_path / "two.py").write_text("class Two:\n    def late(self):\n        from one import name\n")
    assert not circle(tmp_path.glob("*.py"), tmp_path)
    assert set(circle(tmp_path.glob("*.py"), tmp_path, late=True)) == {"one", "two"}


def classes(files: Iterable[Path]) -> list[str]:
    """Return the names of the public classes that files define, one for every definition."""
    return [
        node.name
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def test_a_class_name_means_one_thing() -> None:
    counts = Counter(classes(p for p in PACKAGE.rglob("*.py") if "backends" not in p.relative_to(PACKAGE).parts))
    assert {name for name, count in counts.items() if count > 1} == set(MAY_SHARE)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.name)
def test_prose_is_wrapped(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines, wide = text.splitlines(), []
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "paragraph_open" and token.map:
            for number in range(*token.map):
                line = lines[number]
                can_break = " " in line.strip().removeprefix("- ") and not line.startswith("<img ")
                if len(line) > WIDEST and can_break:
                    wide.append(number + 1)
    assert not wide, f"{path}: lines of more than {WIDEST} characters"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    assert _files(part)
    for path in _files(part):
        for name in _imports(path):
            if name.startswith("d5suite."):
                assert name.split(".")[1] in MAY_IMPORT[part], f"{path} imports {name}"


def test_only_adapters_import_frameworks_and_only_their_own() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        own = parts[1] if parts[0] == "backends" and len(parts) > 2 else None
        shipped = TRANSPORTS.get(parts[-1], set()) if parts[:2] == ("distributed", "communicators") else set()
        shipped = shipped | ({"horovod"} if parts[-1] == "horovod.py" else set())
        for name in _imports(path):
            foreign = FRAMEWORKS - {own} - ENGINES.get(own or "", set()) - shipped
            assert name.split(".")[0] not in foreign, f"{path} imports {name}"
            if name.startswith("d5suite.backends.") and name.split(".")[2] in BACKENDS:
                assert name.split(".")[2] == own, f"{path} imports {name}"


def named_frameworks(text: str) -> set[str]:
    """Return the frameworks that strings of a module name; docstrings do not count."""
    tree = ast.parse(text)
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in said)
    words = {word.lower() for node in strings for word in re.findall(r"[A-Za-z0-9]+", str(node.value))}
    return words & FRAMEWORKS


def test_only_adapters_name_frameworks() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if named := not name.startswith("backends/") and named_frameworks(path.read_text(encoding="utf-8")):
            found[name] = named
    assert set(found) == set(MAY_NAME), found


def test_a_branch_on_a_framework_is_seen() -> None:
    assert named_frameworks('"""Torch."""\nif backend.name == "torch":\n    pass\n') == {"torch"}
    assert not named_frameworks('"""Torch."""\nLIMIT = 3\n"""MXNet needs it."""\n')


@pytest.mark.parametrize("name", BACKENDS)
def test_adapters_mirror_each_other(name: str) -> None:
    folder = PACKAGE / "backends" / name
    files = {p.name for p in folder.glob("*.py")} | {f"{p.parent.name}.py" for p in folder.glob("*/__init__.py")}
    absent = {f"{module}.py" for module in DATA[name].absent}
    schemes = {f"{each.module}.py" for each in DATA[name].schemes.values()}
    assert files - FURTHER_FILES.get(name, set()) == (ADAPTER_FILES - absent) | schemes


@pytest.mark.parametrize("name", [name for name in BACKENDS if "operators" not in DATA[name].absent])
def test_operators_are_in_the_same_family_in_every_adapter(name: str) -> None:
    folder, lacking = PACKAGE / "backends" / name / "operators", DATA[name].absent
    assert {p.name for p in folder.glob("*.py")} == OPERATOR_FILES
    for family, operators in FAMILIES.items():
        path = folder / f"{family}.py"
        keys, defined = _family(path)
        named = [operator for operator in operators if function_name(operator) in defined and operator not in keys]
        assert keys == sorted(keys), f"{path}: OPERATORS is not sorted"
        assert sorted([*keys, *named]) == sorted(set(operators) - set(lacking)), path


def _family(path: Path) -> tuple[list[str], set[str]]:
    """Return the ONNX names in a family's ``OPERATORS``, and all names of the module."""
    keys: list[str] = []
    defined: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "OPERATORS":
            assert isinstance(node.value, ast.Dict)
            keys = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            for tables in (value for key, value in zip(node.value.keys, node.value.values, strict=True) if key is None):
                named = {each.id for each in ast.walk(tables) if isinstance(each, ast.Name)}
                defined.update(*(map(function_name, SHARED_NAMES[name]) for name in named & SHARED_NAMES.keys()))
        elif isinstance(node, ast.Assign):
            defined.update(ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            defined.update(alias.asname or alias.name for alias in node.names)
    return keys, defined


def test_every_operator_has_one_family() -> None:
    operators = [operator for family in FAMILIES.values() for operator in family]
    assert len(operators) == len(set(operators))
    assert set(operators) >= ZOO_OPERATORS
    assert all(list(family) == sorted(family) for family in FAMILIES.values())


def test_every_adapter_is_published() -> None:
    table = (PACKAGE.parent / "pyproject.toml").read_text().partition('[project.entry-points."d5suite.backends"]')[2]
    published = re.findall(r'^(\w+) = "d5suite\.backends\.(\w+):BACKEND"$', table.partition("\n[")[0], re.MULTILINE)
    assert sorted(published) == [(name, name) for name in BACKENDS]


def _fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_d5suite_imports_no_framework() -> None:
    loaded = _fresh(
        "import sys, d5suite, d5suite.backends, d5suite.session, d5suite.pytest_plugin, d5suite.cli\n"
        "import d5suite.network, d5suite.cases.recipe, d5suite.report.compare, d5suite.report.doctor\n"
        "import d5suite.cases.problem, d5suite.custom, d5suite.report.operators\n"
        "d5suite.backends.discover()\n"
        "print(' '.join(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    assert not set(loaded.split()) & FRAMEWORKS


def test_importing_d5suite_alone_is_light() -> None:
    # A stand-in for the speed target (0.3 s) that no noisy machine can fail: none of the slow
    # libraries is loaded.
    loaded = _fresh("import sys, d5suite\nprint(' '.join(sys.modules))").split()
    assert not {"numpy", "onnx", "onnxruntime", "scipy", "h5py", "rich", "pytest", "psutil"} & set(loaded)


def test_collecting_recipes_imports_only_what_declares_them() -> None:
    # Likewise for what each start of pytest on recipes costs: SciPy took half of it.
    loaded = _fresh(
        "import sys\nimport d5suite.pytest_plugin, d5suite.session, d5suite.cases.recipe\n"
        "from d5suite.measurements import discover\ndiscover()\nprint(' '.join(sys.modules))"
    ).split()
    assert not {"scipy", "rich", "matplotlib", "jsonschema", "sklearn", "onnxruntime"} & set(loaded)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_data_until_it_is_loaded(name: str) -> None:
    loaded = _fresh(f"import sys\nfrom d5suite.backends.{name} import BACKEND\nprint(' '.join(sys.modules))")
    assert not {m.split(".")[0] for m in loaded.split()} & FRAMEWORKS
