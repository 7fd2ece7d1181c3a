"""Libraries that only extras of the package bring, and the advice where one is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from narrowcast.platform.errors import UserError

EXTRA_OF = {
    **{"ray": "ray", "optuna": "tune", "cmaes": "tune", "plotly": "tune", "mlflow": "ui", "aiohttp": "cluster"},
    "pymetis": "graphs",
}
"""The extra of each library; without `ui`, MLflow is its small distribution, mlflow-skinny, which has no server."""


def check_installed(library: str, wanted_by: str) -> None:
    """Raise a `UserError` that names the extra if the library is not installed."""
    try:
        distribution(library)
    except PackageNotFoundError as error:
        raise UserError(advice(library, wanted_by)) from error


def advice(library: str, wanted_by: str) -> str:
    """Return the line for a library that is missing."""
    return f"{wanted_by} needs {library}, which is not installed; pip install 'narrowcast[{EXTRA_OF[library]}]'"
