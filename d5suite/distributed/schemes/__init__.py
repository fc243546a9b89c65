"""How replicas agree, by name: d5suite's own schemes, and those of frameworks.

Imports NumPy, `d5suite.levels` and `d5suite.optimizers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d5suite.distributed.schemes.all_reduce import AllReduce
from d5suite.distributed.schemes.asynchronous import Asynchronous
from d5suite.distributed.schemes.gossip import Gossip
from d5suite.distributed.schemes.model_averaging import ModelAveraging
from d5suite.distributed.schemes.native import Framework
from d5suite.distributed.schemes.parameter_server import ParameterServer
from d5suite.distributed.schemes.quantised import Quantised
from d5suite.distributed.schemes.stale_synchronous import StaleSynchronous
from d5suite.distributed.schemes.top_k import TopK
from d5suite.errors import ConfigurationError
from d5suite.levels.backend import Backend
from d5suite.levels.distributed import Communicator, Replica, Scheme, SchemeSettings
from d5suite.levels.native import settings_type
from d5suite.optimizers.named import from_dict

SCHEMES: Mapping[str, type[Scheme]] = {
    each.name: each
    for each in (
        *(AllReduce, ParameterServer, Asynchronous, StaleSynchronous),
        *(ModelAveraging, Gossip, TopK, Quantised),
    )
}
"""Schemes by name; the first is the default."""


def settings_from_dict(settings: Mapping[str, Any], backend: Backend | None = None) -> SchemeSettings:
    """Rebuild a scheme's settings, the name among them, from `SchemeSettings.to_dict`.

    Parameters
    ----------
    settings : mapping
    backend : Backend, optional
        A backend whose own schemes are known, too.

    Raises
    ------
    ConfigurationError
        For an unknown scheme or setting, or a value out of bounds.
    """
    known = {name: each.settings_type for name, each in SCHEMES.items()}
    if backend is not None:
        known |= {name: settings_type(name, each) for name, each in backend.schemes.items()}
    for each in settings if settings.get("name") in known else ():
        if reason := refusal(settings["name"], each):
            raise ConfigurationError(f"{settings['name']} cannot honour {each}: {reason}", where="scheme")
    return from_dict(known, settings)


def refusal(scheme: str, setting: str) -> str | None:
    """Return why a scheme cannot honour a setting of the order of transfers; None if it can.

    Parameters
    ----------
    scheme : str
        A key of `SCHEMES`; any other name is a framework's own.
    setting : str
    """
    return SCHEMES.get(scheme, Framework).refuses.get(setting)


def make_scheme(
    name: str, replica: Replica, communicator: Communicator, backend: Backend | None = None, **settings: Any
) -> Scheme:
    """Make one rank's part of a scheme; all ranks give the same settings.

    Parameters
    ----------
    name : str
        A key of `SCHEMES`, or of the ``schemes`` of the backend.
    replica : Replica
    communicator : Communicator
    backend : Backend, optional
        The replica's backend. For its own scheme, the ranks have met (`FrameworkScheme.meet`).
    **settings

    Raises
    ------
    ConfigurationError
        As `settings_from_dict`.
    """
    chosen = settings_from_dict({"name": name, **settings}, backend)
    if name in SCHEMES:
        return SCHEMES[name](replica, communicator, chosen)
    assert backend is not None
    return Framework(replica, communicator, chosen, backend.framework_scheme(name, replica.trainer.executor.mode))
