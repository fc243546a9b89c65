"""The pages: links lead somewhere, Python compiles and imports what exists, commands have the
options that are shown."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import itertools
import re
import subprocess
import sys
import textwrap
from argparse import ArgumentParser, _SubParsersAction
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import d5suite
from d5suite.cli import command_line
from d5suite.commands.bench import find_pytest_options

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())

ENDS = re.compile(r"\s(#|\||;|&&|>|→)|;|`|'\]")
"""Where a command ends on its line."""

NO_COMMANDS = ("d5suite images",)
"""What looks like a command in code and is none: the words that a file begins with."""

COMMAND = re.compile(r"""(?:^|[;&|('"] ?|^ *sh ')(?:[A-Z_0-9]+=\S+ )*(?:\S*/)?(d5suite|pytest) (?=[a-z./A-Z-])""")


@functools.cache
def tokens(path: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8"))


def flat(found: list[Token]) -> Iterator[Token]:
    for each in found:
        yield each
        yield from flat(each.children or [])


def anchors(path: Path) -> set[str]:
    """The names that a forge, and this site, give to a page's headings."""
    count: Counter[str] = Counter()
    names = set()
    found = tokens(path)
    for each, inner in itertools.pairwise(found):
        if each.type == "heading_open":
            text = "".join(part.content for part in inner.children or [])
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            names.add(f"{name}-{count[name]}" if count[name] else name)
            count[name] += 1
    return names


def broken_links(path: Path) -> list[str]:
    links = [str(each.attrs.get("href") or each.attrs.get("src") or "") for each in flat(tokens(path))]
    links += re.findall(r'<(?:img|a) [^>]*?(?:src|href)="([^"]+)"', path.read_text(encoding="utf-8"))
    broken = []
    for link in filter(None, links):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@each_page
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`: three\n[a](#one-two-three) [b](page.md#one) [c](gone.md) ![d](d.png)\n")
    assert broken_links(page) == ["page.md#one", "gone.md", "d.png"]


def test_every_page_is_in_the_menu() -> None:
    folder = ROOT / "docs"
    lists = re.findall(r"```\{toctree\}\n(.*?)```", (folder / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    listed = {
        re.sub(r".*<(.*)>", r"\1", line) for each in lists for line in each.splitlines() if line[:1] not in ("", ":")
    }
    pages = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.md")}
    assert listed == pages - {"index"}


def python_of(path: Path) -> list[str]:
    fences = (each for each in tokens(path) if each.type == "fence" and each.info.strip() == "python")
    excerpts = [textwrap.dedent(each.content) for each in fences]
    return [f"if False:\n    pass\n{each}" if each.startswith("elif ") else each for each in excerpts]


def imported(code: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


@each_page
def test_python_compiles_and_imports_what_exists(path: Path) -> None:
    for code in python_of(path):
        for module, name in imported(code):
            if module.split(".")[0] != "d5suite":
                continue
            assert importlib.util.find_spec(module), f"there is no {module}"
            if module.count(".") < 3 or not module.startswith("d5suite.backends."):  # those import frameworks
                found = importlib.import_module(module)
                assert not name or hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), name


def test_what_pages_import_is_in_the_reference() -> None:
    listed = set(re.findall(r"^ +(d5suite[\w.]*)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE))
    used = {module for path in PAGES for code in python_of(path) for module, _ in imported(code)}
    own = {module for module in used if re.match(r"d5suite\.(?!backends\.|levels$|training$|network\.nodes\.)", module)}
    assert own <= listed
    text = (ROOT / "docs/reference/api.md").read_text()
    assert not [name for name in d5suite.__all__ if f"`d5suite.{name}`" not in text and name != "__version__"]


def lines_of(path: Path) -> Iterator[str]:
    """Yield what stands in code, line by line; a backslash continues a line."""
    for each in flat(tokens(path)):
        if each.type == "code_inline" or (each.type in ("code_block", "fence") and each.info != "python"):
            yield from re.sub(r"\\\n\s*", " ", each.content).splitlines()


@functools.cache
def options_of_pytest() -> frozenset[str]:
    done = subprocess.run([sys.executable, "-m", "pytest", "--help"], cwd=ROOT, capture_output=True, text=True)
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", done.stdout))


def descended(words: list[str]) -> tuple[ArgumentParser, list[str]]:
    """Return the parser of the innermost command that words name, and the words behind its name."""
    parser = command_line()
    while True:
        inner = [each for each in parser._actions if isinstance(each, _SubParsersAction)]
        if not inner or not words or words[0].startswith("-"):
            return parser, words
        if words[0] not in inner[0].choices:
            return parser, words[1:] if parser.prog != "d5suite" else [f"--no-command-{words[0]}"]
        parser, words = inner[0].choices[words[0]], words[1:]


def wrong_options(line: str) -> list[str]:
    """Return the options on a line that its commands do not have."""
    wrong = []
    for found in COMMAND.finditer(line.strip()):
        rest = line.strip()[found.end() :]
        end = ENDS.search(rest)
        words = (rest[: end.start()] if end else rest).split()
        if line.strip().startswith(NO_COMMANDS):
            continue
        further = words if found[1] == "pytest" else []
        known: set[str] = set()
        if found[1] == "d5suite" and not words[0].isupper():
            cut = 1 + find_pytest_options(words[1:]) if words[0] == "bench" else len(words)
            cut = words.index("--") if "--" in words[:cut] else cut
            further = words[cut:]
            parser, words = descended(words[:cut])
            known = set(parser._option_string_actions)
            wrong += [each for each in options(words) if each not in known]
        wrong += [each for each in options(further) if each not in options_of_pytest()]
    return wrong


def options(words: list[str]) -> list[str]:
    return [found[0] for word in words if (found := re.match(r"--?[a-zA-Z][\w-]*", word.strip("[()],.…")))]


@each_page
def test_commands_have_the_options_that_are_shown(path: Path) -> None:
    assert not {line: wrong for line in lines_of(path) if (wrong := wrong_options(line))}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("d5suite compare a.json b.json --tables", []),
        ("d5suite compare a.json --table", ["--table"]),
        ("d5suite measure", ["--no-command-measure"]),
        ("d5suite bench digits_lenet --backend torch --nodes 2  # --none", ["--nodes"]),
        ("d5suite slurm run a.py --nodes 2 -- --devices cuda", ["--devices"]),
        ("d5suite data convert a b --too hdf5", ["--too"]),
        ("X=1 pytest recipes/ --backends torch -k a | tee", ["--backends"]),
    ],
)
def test_an_option_that_does_not_exist_is_seen(line: str, wrong: list[str]) -> None:
    assert wrong_options(line) == wrong


def test_make_has_the_targets_that_are_shown() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {"test-all", "test-long"}
    for path in PAGES:
        shown = {
            name for line in lines_of(path) for name in re.findall(r"(?:^|[;(] ?)make ([a-z][\w-]*)", line.strip())
        }
        assert shown <= targets, path


def test_the_first_page_fits_one_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 60
