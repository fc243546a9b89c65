"""One thing changed: a network twice as fast, another algorithm, an operator that takes half.

Imports `d5suite.distributed`, `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from d5suite.distributed.schemes import settings_from_dict
from d5suite.errors import ConfigurationError
from d5suite.simulation.programs import Noted, Op, OpKind

if TYPE_CHECKING:
    from d5suite.levels.distributed import SchemeSettings
    from d5suite.simulation.simulate import Setup

CHANGES = ("network=2x", "latency=0.5x", "compute=0.5x", "ranks=2x", "algorithm=NAME", "scheme=NAME",
           "order=NAME", "topology=NAME", "operator:TYPE=0.5")  # fmt: skip
"""What may be changed, by example."""


def factor(text: str, where: str) -> float:
    """Read ``2x`` or ``0.5``.

    Raises
    ------
    ConfigurationError
        If it is not a positive number.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)x?", text.strip(), re.IGNORECASE)
    value = float(match[1]) if match else 0.0
    if not 0 < value < math.inf:
        raise ConfigurationError(f"{text!r} is not a factor such as 2x or 0.5", where=where)
    return value


def scheme_settings(text: str) -> SchemeSettings:
    """Read ``NAME[:setting=value,…]``, such as ``parameter_server:servers=4``.

    Raises
    ------
    ConfigurationError
        For an unknown scheme or setting.
    """
    name, _, rest = text.partition(":")
    given: dict[str, object] = {"name": name}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigurationError(f"{part!r} is not SETTING=VALUE", where=text)
        given[key] = _value(value)
    try:
        return settings_from_dict(given)
    except TypeError as error:
        raise ConfigurationError(f"these settings do not fit: {error}", where=text) from None


def _value(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def apply(setup: Setup, name: str, value: str) -> Setup:
    """Return the setup with one thing changed; `CHANGES` has examples.

    Raises
    ------
    ConfigurationError
        If there is no such thing, or no such value.
    """
    from d5suite.simulation.platform import TOPOLOGIES

    where = f"--what-if {name}={value}"
    network = setup.network
    if name == "network":
        times = factor(value, where)
        faster = replace(
            network, bytes_per_s=network.bytes_per_s * times, busy_s_per_byte=network.busy_s_per_byte / times
        )
        return replace(setup, network=faster)
    if name == "latency":
        times = factor(value, where)
        later = replace(network, latency_s=network.latency_s * times, busy_s=network.busy_s * times)
        return replace(setup, network=later)
    if name == "compute":
        return _computing(setup, factor(value, where), None)
    if name == "ranks":
        ranks = setup.ranks * factor(value, where) if value.lower().endswith("x") else factor(value, where)
        if ranks != int(ranks):
            raise ConfigurationError(f"{ranks:g} is not a number of ranks", where=where)
        return replace(setup, ranks=int(ranks))
    if name == "algorithm":
        if setup.given is not None and not any(
            op.kind == OpKind.COLLECTIVE for each in setup.given for ops in each.streams for op in ops
        ):
            raise ConfigurationError("this trace has no collectives, so no algorithm can take their place", where=where)
        return replace(setup, algorithm=value)
    if name == "order":
        return replace(setup, settings=in_order(setup, value, where))
    if name == "scheme":
        return replace(setup, settings=scheme_settings(value))
    if name == "topology":
        if value not in TOPOLOGIES:
            raise ConfigurationError(f"no topology {value!r}", where=where, hint=f"There are {', '.join(TOPOLOGIES)}.")
        return replace(setup, network=replace(network, topology=value))
    kind, _, operator = name.partition(":")
    if kind == "operator" and operator:
        return _computing(setup, factor(value, where), operator)
    raise ConfigurationError(f"nothing is called {name!r}", where=where, hint=f"Such as {', '.join(CHANGES)}.")


def in_order(setup: Setup, order: str, where: str) -> SchemeSettings:
    """Return the scheme's settings with an order of transfers; each tensor is sent by itself.

    Raises
    ------
    ConfigurationError
        If there is no such order, or the scheme has none.
    """
    if setup.given is not None:
        raise ConfigurationError("the order of a trace cannot be changed", where=where)
    known = {name: value for name, value in setup.settings.to_dict().items() if not name.endswith("bucket_bytes")}
    return settings_from_dict({**known, "order": order})


def _computing(setup: Setup, times: float, kind: str | None) -> Setup:
    """Scale all computing, or that of one operator; in a trace, the computing in one region."""
    programs = setup.given
    known = setup.step.kinds if programs is None else sorted(
        {op.label for each in programs for ops in each.streams for op in ops if op.kind == OpKind.COMPUTE} - {""}
    )  # fmt: skip
    if kind is not None and kind not in known:
        raise ConfigurationError(
            f"the step has no operator {kind!r}", where=f"--what-if operator:{kind}", hint=f"It has {', '.join(known)}."
        )
    if programs is None:
        return replace(setup, step=setup.step.scaled(times, kind))

    def scaled(op: Op) -> Op:
        return op._replace(seconds=op.seconds * times) if kind in (None, op.label) else op

    given = tuple(Noted([[scaled(op) for op in ops] for ops in each.streams], each.marks) for each in programs)
    return replace(setup, given=given)


def parse(text: str) -> tuple[str, str]:
    """Divide ``NAME=VALUE`` at its last sign of equality that ends a name.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ConfigurationError(
            f"{text!r} is not NAME=VALUE", where="--what-if", hint=f"Such as {', '.join(CHANGES)}."
        )
    return name, value
