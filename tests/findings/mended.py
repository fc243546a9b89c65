"""What every finding says when its framework has mended it. Imports the standard library only."""

from __future__ import annotations

from importlib.metadata import version


def require(broken: bool, distribution: str, workaround: str) -> None:
    """Fail if a framework no longer does what ``docs/findings.md`` says.

    Parameters
    ----------
    broken : bool
        Whether it still does.
    distribution : str
        The framework's distribution, such as ``"mxnet"``.
    workaround : str
        Where d5suite avoids it.
    """
    assert broken, (
        f"mended in {distribution} {version(distribution)}: remove the workaround in {workaround}, this test and its "
        "entry in docs/findings.md"
    )
