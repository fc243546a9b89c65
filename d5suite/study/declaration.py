"""A study's declaration: a TOML file, read strictly; each part becomes runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.errors import ConfigurationError, D5Error
from d5suite.files import read_toml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
"""Names of parts and machines, which become names of files and folders."""

DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

COMMANDS = ("machine", "tune", "simulate", "crossover")
"""Commands of d5suite that a part may run; each writes one JSON file."""

OUT, TOML, RAW, JOBS = "{out}", "{toml}", "{raw}", "{jobs}"
"""In a run's command: its result, a file of settings with the result beside it, the folder of all
results of this machine, and the folder of its job files."""


class _Key(NamedTuple):
    """A key of a part: whether a value is right, what it must be, and the option of pytest."""

    holds: Callable[[Any], bool]
    rule: str
    option: str = ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _wholes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_whole(each) and each > 0 for each in value)


def _one_of(option: str, *words: str) -> _Key:
    return _Key(lambda value: value in words, f"one of {', '.join(words)}", option)


_TEXT, _TEXTS = (_is_text, "a text of one line"), (_texts, "a list of texts")
_WHOLE, _WHOLES = (_whole, "a whole number from 0 on"), (_wholes, "a list of whole numbers from 1 on")

OPTIONS: Mapping[str, _Key] = {
    "select": _Key(*_TEXT, "-k"),
    "backends": _Key(*_TEXTS, "--backend"),
    "preset": _one_of("--preset", "smoke", "standard", "full"),
    "device": _one_of("--device", "cpu", "cuda"),
    "precision": _one_of("--precision", "fp32", "bf16", "fp16", "fp64"),
    "threads": _Key(*_WHOLE, "--threads"),
    "batch_size": _Key(*_WHOLE, "--batch-size"),
    "seed": _Key(*_WHOLE, "--seed"),
    "launches": _Key(*_WHOLE, "--launches"),
    "passes": _Key(*_TEXTS, "--passes"),
    "sweep": _Key(*_TEXTS, "--sweep"),
    "ranks": _Key(*_WHOLES, "--ranks"),
    "schemes": _Key(*_TEXTS, "--scheme"),
    "communicators": _Key(*_TEXTS, "--communicator"),
    "algorithms": _Key(*_TEXTS, "--algorithm"),
    "scaling": _one_of("--scaling", "weak", "strong"),
    "network": _Key(*_TEXT, "--network"),
    "imagenet": _Key(*_TEXT, "--imagenet"),
    "openimages": _Key(*_TEXT, "--openimages"),
    "wait_quiet": _Key(*_WHOLE, "--wait-quiet"),
}
"""Keys of a part that are options of pytest."""

_OF_SLURM = ("backends", "schemes", "communicators", "algorithms", "scaling", "preset", "device", "precision",
             "batch_size", "imagenet", "openimages", "seed")  # fmt: skip
"""Options that ``d5suite slurm run`` takes itself; it hands on the others."""

KEYS: Mapping[str, _Key] = {
    "title": _Key(*_TEXT),
    "share": _Key(lambda each: isinstance(each, int | float) and 0 < each <= 1, "a number above 0, at most 1"),
    "cost": _Key(lambda each: _is_text(each) or isinstance(each, dict), 'a duration such as "4m", or one by recipe'),
    "recipes": _Key(*_TEXTS),
    "command": _Key(*_TEXTS),
    "nodes": _Key(*_WHOLES),
    "profile": _Key(*_TEXT),
    **OPTIONS,
}
"""All keys of a part."""


TOPICS = (
    "operators", "networks", "training", "accuracy", "loading", "neutrality", "ranks", "collectives", "workflows",
)  # fmt: skip
"""Kinds of results, as the report has them."""


@dataclass(frozen=True)
class Question:
    """A question, the parts whose results answer it, and which kinds of them; by default all."""

    ask: str
    parts: tuple[str, ...]
    topics: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeclaredRun:
    """One command of a part, which writes one result file.

    Attributes
    ----------
    name : str
        Also of its files.
    part : str
    words : tuple of str
        ``pytest`` or ``d5suite``, then its arguments, with `OUT`, `RAW` and `JOBS`.
    cost_s : float
        Stated seconds.
    """

    name: str
    part: str
    words: tuple[str, ...]
    cost_s: float

    @property
    def inputs(self) -> list[str]:
        """The runs whose results it reads, as ``{raw}/NAME.json``."""
        start, end = f"{RAW}/", ".json"
        return [word[len(start) : -len(end)] for word in self.words if word.startswith(start) and word.endswith(end)]

    @property
    def is_slurm(self) -> bool:
        """Whether it runs on a cluster."""
        return self.words[:2] == ("d5suite", "slurm")


@dataclass(frozen=True)
class Part:
    """A part of a study.

    Attributes
    ----------
    name, title : str
    share : float
        Part of the budget that it may take before the others have had theirs.
    runs : tuple of DeclaredRun
    """

    name: str
    title: str
    share: float
    runs: tuple[DeclaredRun, ...]


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes
    ----------
    title : str
    budget_s : float
    questions : tuple of Question
    parts : dict of str to Part
    """

    title: str
    budget_s: float
    questions: tuple[Question, ...]
    parts: Mapping[str, Part]

    @property
    def runs(self) -> list[DeclaredRun]:
        """All runs: the first of each part, then the second ones, and so on.

        So an interrupt at any time leaves something of every part. Readers of results come last.
        """
        most = max(len(part.runs) for part in self.parts.values())
        found = [part.runs[turn] for turn in range(most) for part in self.parts.values() if turn < len(part.runs)]
        return sorted(found, key=lambda run: bool(run.inputs))


def duration(text: str, where: str) -> float:
    """Return the seconds of a duration such as ``2h30m``.

    Raises
    ------
    ConfigurationError
        If it is none.
    """
    match = DURATION.fullmatch(text)
    found = sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    if not 0 < found < 10**7:
        raise ConfigurationError(f"{text!r} is not a duration", where=where, hint="Write 3h, 2h30m, 45m or 90s.")
    return float(found)


def read_study(path: Path, recipes: Path | None = None) -> Study:
    """Read a study.

    Parameters
    ----------
    path : Path
    recipes : Path, optional
        The folder that recipes are named from; they must exist there. By default they are not
        looked for.

    Raises
    ------
    ConfigurationError
        If it cannot be read, or something in it is wrong; the message says where.
    """
    content, _ = read_toml(path)
    known = ("title", "budget", "question", "part")
    for key in content:
        if key not in known:
            raise ConfigurationError(f"there is no key {key!r}", where=str(path), hint=f"Known: {', '.join(known)}.")
    if not _is_text(content.get("title")):
        raise ConfigurationError("title must be a text of one line", where=str(path))
    if not isinstance(content.get("budget"), str):
        raise ConfigurationError("budget is not given", where=str(path), hint='Write budget = "3h".')
    tables = content.get("part")
    if not isinstance(tables, dict) or not tables:
        raise ConfigurationError("it has no part", where=str(path), hint="Write [part.NAME] with recipes.")
    parts = {name: _part(name, table, f"{path}, part {name}", recipes) for name, table in tables.items()}
    _check_inputs(parts, path)
    if (total := sum(part.share for part in parts.values())) > 1 + 1e-9:
        raise ConfigurationError(f"the shares of all parts are {total:g} together", where=str(path),
                                 hint="Give shares that add up to at most 1.")  # fmt: skip
    return Study(
        content["title"], duration(content["budget"], f"{path}, budget"),
        _questions(content.get("question", []), parts, path), parts,
    )  # fmt: skip


def _check_inputs(parts: Mapping[str, Part], path: Path) -> None:
    """Raise `ConfigurationError` if a command reads a result that no other run makes."""
    runs = [run for part in parts.values() for run in part.runs]
    names = [run.name for run in runs if not run.inputs]
    for run in runs:
        if unknown := next((each for each in run.inputs if each not in names), None):
            raise ConfigurationError(f"it reads the result of {unknown!r}, and there is no such run",
                                     where=f"{path}, part {run.part}", hint=f"Known: {', '.join(names)}.")  # fmt: skip


def _questions(given: Any, parts: Mapping[str, Part], path: Path) -> tuple[Question, ...]:
    if not isinstance(given, list) or not given:
        raise ConfigurationError("it asks nothing", where=str(path), hint="Write [[question]] with ask and parts.")
    found = []
    for number, each in enumerate(given, 1):
        where = f"{path}, question {number}"
        if not isinstance(each, dict) or {*each, "topics"} != {"ask", "parts", "topics"} or not _is_text(each["ask"]):
            raise ConfigurationError("a question has ask, a text, and parts; topics if you like", where=where)
        if not _texts(each["parts"]):
            raise ConfigurationError("parts must be a list of names of parts", where=where)
        for part in each["parts"]:
            if part not in parts:
                raise ConfigurationError(f"there is no part {part!r}", where=where, hint=f"Known: {', '.join(parts)}.")
        topics = each.get("topics", [])
        if topics != [] and not (_texts(topics) and set(topics) <= set(TOPICS)):
            raise ConfigurationError("topics must be a list of kinds of results", where=where,
                                     hint=f"Known: {', '.join(TOPICS)}.")  # fmt: skip
        found.append(Question(each["ask"], tuple(each["parts"]), tuple(topics)))
    return tuple(found)


def _part(name: str, table: Any, where: str, recipes: Path | None) -> Part:
    if not NAME.fullmatch(name):
        raise ConfigurationError("a part's name has letters, digits, - and _, at most 40", where=where)
    if not isinstance(table, dict):
        raise ConfigurationError("a part is a table", where=where, hint=f"Write [part.{name}].")
    for key, value in table.items():
        if key not in KEYS:
            raise ConfigurationError(f"there is no key {key!r}", where=where, hint=f"Known: {', '.join(KEYS)}.")
        if not KEYS[key].holds(value):
            raise ConfigurationError(f"{key} must be {KEYS[key].rule}", where=where)
    for key in ("title", "share", "cost"):
        if key not in table:
            raise ConfigurationError(f"{key} is not given", where=where, hint=f"It must be {KEYS[key].rule}.")
    if ("recipes" in table) == ("command" in table):
        raise ConfigurationError("a part has either recipes or a command", where=where)
    runs = _commands(name, table, where) if "command" in table else _recipes(name, table, where, recipes)
    return Part(name, table["title"], float(table["share"]), runs)


def _commands(name: str, table: Mapping[str, Any], where: str) -> tuple[DeclaredRun, ...]:
    if odd := next((key for key in table if key in OPTIONS or key in ("nodes", "profile")), None):
        raise ConfigurationError(f"{odd} is for recipes", where=where, hint="Write it into the command.")
    words = tuple(table["command"])
    if words[0] not in COMMANDS:
        hint = f"A study runs {', '.join(COMMANDS)}."
        raise ConfigurationError(f"{words[0]!r} is no command that a study runs", where=where, hint=hint)
    if sum(OUT in word or TOML in word for word in words) != 1:
        what = f"the command must name its result once, as {OUT} or {TOML}"
        raise ConfigurationError(what, where=where)
    if not isinstance(table["cost"], str):
        raise ConfigurationError("the cost of a command is one duration", where=where)
    return (DeclaredRun(name, name, ("d5suite", *words), duration(table["cost"], f"{where}, cost")),)


def _recipes(name: str, table: Mapping[str, Any], where: str, folder: Path | None) -> tuple[DeclaredRun, ...]:
    recipes, cost = list(dict.fromkeys(table["recipes"])), table["cost"]
    if len(recipes) < len(table["recipes"]):
        raise ConfigurationError("a recipe is named twice", where=where)
    for each in recipes:
        if each.startswith("-") or (folder is not None and not (folder / each.partition("::")[0]).exists()):
            hint = "Start d5suite study in the folder that the recipes are named from."
            raise ConfigurationError("there is no such recipe", where=f"{where}: {each}", hint=hint)
    costs = dict.fromkeys(recipes, cost) if isinstance(cost, str) else cost
    if set(costs) != set(recipes) or not all(map(_is_text, costs.values())):
        raise ConfigurationError("cost must give a duration to each recipe", where=where)
    for each in table.get("backends", ()):
        _check_backend(each, where)
    if "profile" in table and "nodes" not in table:
        raise ConfigurationError("profile is for runs through Slurm", where=where, hint="Give nodes, too.")
    if "nodes" in table and (odd := next((key for key in ("ranks", "threads") if key in table), None)):
        raise ConfigurationError(f"{odd} follows from nodes and the site profile", where=where, hint="Leave it out.")
    runs: list[DeclaredRun] = []
    for each in recipes:
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(each.partition("::")[0]).stem.removeprefix("test_"))[:60]
        own = name if len(recipes) == 1 else f"{name}.{stem}"
        if own in (run.name for run in runs):
            own = f"{own}-{len(runs) + 1}"
        words = _slurm(each, table) if "nodes" in table else _pytest(each, table)
        runs.append(DeclaredRun(own, name, words, duration(costs[each], f"{where}, cost")))
    return tuple(runs)


def _check_backend(name: str, where: str) -> None:
    from d5suite.backends import select

    try:
        select(name)
    except D5Error as error:
        raise ConfigurationError(error.what, where=f"{where}, backends", hint=error.hint) from None


def _options(table: Mapping[str, Any], keys: Mapping[str, _Key]) -> list[str]:
    words = []
    for key, each in keys.items():
        if key in table:
            value = table[key]
            if key == "sweep":
                words += [word for one in value for word in ("--sweep", one)]
            elif key == "wait_quiet":
                words.append(f"{each.option}={value}")
            else:
                words += [each.option, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


def _pytest(recipe: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    return ("pytest", recipe, *_options(table, OPTIONS), "--jobs", JOBS, "--benchmark-json", OUT)


def _slurm(recipe: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    own = {key: each for key, each in OPTIONS.items() if key in _OF_SLURM}
    further = _options(table, {key: each for key, each in OPTIONS.items() if key not in _OF_SLURM})
    nodes = ["--nodes", ",".join(map(str, table["nodes"])), "--folder", JOBS, "--out", OUT]
    nodes += ["--profile", table["profile"]] if "profile" in table else []
    return ("d5suite", "slurm", "run", recipe, *nodes, *_options(table, own), *(["--", *further] if further else []))
