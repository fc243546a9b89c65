"""Classes by name: from d5suite, from plug-ins, and from a user's Python file.

Imports `d5suite.errors` and `d5suite.files`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
from typing import ClassVar, Generic, Protocol, TypeVar

from d5suite.errors import ConfigurationError
from d5suite.files import import_file


class Registered(Protocol):
    """A class with a name; a base class without a name is not registered."""

    name: ClassVar[str]


T = TypeVar("T", bound=Registered)


class Registry(Generic[T]):
    """The subclasses of one base class, by name.

    Parameters
    ----------
    package : str
        The package that holds d5suite's own classes, in any of its modules; the module ``base``
        holds the base class. Plug-ins publish classes in the entry-point group of the same name,
        under the name of the class.
    base : str
        Name of the base class; in lower case, messages call the classes by this name.
    """

    def __init__(self, package: str, base: str) -> None:
        self._package, self._base = package, base
        self._of_files: dict[str, dict[str, type[T]]] = {}

    def discover(self) -> dict[str, type[T]]:
        """Return the classes of d5suite and of plug-ins, by name.

        Raises
        ------
        ConfigurationError
            If a plug-in's entry point is no such class, or has another name than the class, or if
            the name is taken.
        """
        return self._installed

    def find(self, name: str, file: str | None = None) -> type[T]:
        """Return the class with this name.

        Parameters
        ----------
        name : str
        file : str, optional
            The Python file that defines the class; the file is imported.

        Raises
        ------
        ConfigurationError
            If there is no such class.
        """
        known = self.discover() if file is None else self.defined_in(file)
        if name not in known:
            raise ConfigurationError(
                f"there is no {self._base.lower()} {name!r}",
                where=file or "",
                hint=f"Known: {', '.join(sorted(known)) or 'none'}.",
            )
        return known[name]

    def defined_in(self, file: str) -> dict[str, type[T]]:
        """Import a Python file once, and return the classes that it defines, by name."""
        if file not in self._of_files:
            self._of_files[file] = self._defined_in(import_file(file))
        return self._of_files[file]

    def is_installed(self, one: type[T]) -> bool:
        """Return whether `discover` finds this class."""
        return self.discover().get(one.name) is one

    @functools.cached_property
    def _installed(self) -> dict[str, type[T]]:
        found: dict[str, type[T]] = {}
        package = importlib.import_module(self._package)
        for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
            found |= self._defined_in(importlib.import_module(module.name))
        for entry in importlib.metadata.entry_points(group=self._package):
            loaded = entry.load()
            if not self._is_one(loaded) or loaded.name != entry.name or found.get(entry.name, loaded) is not loaded:
                raise ConfigurationError(
                    f"{entry.value} is not a {self._base.lower()} called {entry.name!r}, or that name is taken",
                    where=f"entry point of {self._package}",
                    hint="Uninstall the plug-in or correct it.",
                )
            found[entry.name] = loaded
        return found

    def _defined_in(self, module: object) -> dict[str, type[T]]:
        """Return the classes that a module itself defines; skip base classes without a name."""
        own = [each for each in vars(module).values() if self._is_one(each)]
        return {each.name: each for each in own if each.__module__ == getattr(module, "__name__", "")}

    def _is_one(self, value: object) -> bool:
        base = getattr(importlib.import_module(f"{self._package}.base"), self._base)
        return inspect.isclass(value) and issubclass(value, base) and hasattr(value, "name")
