"""Settings that have a name and pass through job files. Imports `d5suite.errors` only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from d5suite.errors import ConfigurationError

T = TypeVar("T", bound="NamedSettings")


@dataclass(frozen=True)
class NamedSettings:
    """Base of settings with a name, such as ``sgd`` of the kind ``optimizer``."""

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:  # also where a comparison with NaN is false
            raise ConfigurationError(otherwise, where=f"{self.kind} {self.name}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-able values, with the name under the key ``name``."""
        return {"name": self.name, **{each.name: getattr(self, each.name) for each in fields(self)}}


def from_dict(known: Mapping[str, type[T]], settings: Mapping[str, Any]) -> T:
    """Rebuild settings from `NamedSettings.to_dict`.

    Parameters
    ----------
    known : mapping of str to type
        The classes of one kind, by name.
    settings : mapping

    Raises
    ------
    ConfigurationError
        For an unknown name, an unknown setting, or a value out of bounds.
    """
    given = dict(settings)
    name = given.pop("name", None)
    kind = next(iter(known.values())).kind
    if name not in known:
        raise ConfigurationError(f"unknown {kind} {name!r}", hint=f"Known {kind}s: {', '.join(known)}.")
    names = [each.name for each in fields(known[name])]
    unknown = [key for key in given if key not in names]
    if unknown:
        raise ConfigurationError(
            f"{kind} {name!r} has no setting {unknown[0]!r}", hint=f"Its settings: {', '.join(names)}."
        )
    return known[name](**given)
