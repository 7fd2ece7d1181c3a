"""The layout of the sum of an algorithm's updates."""

from __future__ import annotations

from typing import Any

from narrowcast.algorithms.federated.sum_layout import SumLayout, Summable
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError


def layout_of(algorithm: Any, task: Task, cohort: int) -> SumLayout:
    """Return the layout of the sum of this algorithm's updates; raise `UserError` if its aggregate is not a sum."""
    if codec := getattr(algorithm, "codec", ()):
        raise UserError(
            f"secure: what algorithm.codec ({codec[0].kind}) sends cannot be added up under encryption; leave out "
            "algorithm.codec and set secure.bits"
        )
    cohort = min(cohort, task.data.n_clients)
    if isinstance(algorithm, Summable) and (layout := algorithm.sum_layout(task, cohort)):
        return layout
    raise UserError(
        f"secure: {algorithm.kind} on {task.model.kind} needs more than the weighted sum of the clients' updates; use "
        "fedavg, fedprox, fedpara, colr or scolr, or secure=none"
    )
