"""The check that a run can evaluate its clients one by one."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.platform.client_contracts import ClientSplit, HasClientSplits, MeasuresClients
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError


def check_client_evaluation(splits: Sequence[ClientSplit], task: Task) -> None:
    """Raise `UserError` unless model and data can evaluate each client, and some client has samples of each split."""
    model, data = task.model, task.data
    if not splits:
        return
    asked = f"evaluate_clients = {', '.join(splits)}"
    if not isinstance(model, MeasuresClients):
        raise UserError(
            f"{asked}: model.kind = {model.kind} has no measure_clients; use another model, or omit evaluate_clients"
        )
    if not isinstance(data, HasClientSplits):
        raise UserError(f"{asked}: {data.name} does not say which samples are whose; leave evaluate_clients out")
    for split in splits:
        try:
            examples = data.examples_of(split)
        except UserError as error:
            raise UserError(f"{asked}: {error}") from error
        if not examples.any():
            share = f"raise data.{split}_share, or " if split != "train" else ""
            raise UserError(
                f"{asked}: no client of {data.name} has {split} samples; {share}evaluate clients on another split"
            )
