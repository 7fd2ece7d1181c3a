"""Flower's client half, in a module of its own so that its actors import it instead of unpickling it."""

from __future__ import annotations

import os
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from replay import Workload
from torch import nn

app = ClientApp()


@cache
def hosted() -> tuple[Workload, nn.Module]:
    """The samples and a module, once in each actor."""
    torch.set_num_threads(1)
    workload = Workload(os.environ["BENCH_WORKLOAD"])
    return workload, workload.network()


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001
    """Train one client of the cohort."""
    workload, module = hosted()
    visit = message.content["config"]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=workload.settings.learning_rate)
    examples = 0
    for features, labels in workload.batches(visit["server-round"] - 1, visit["place"]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(features), labels).backward()
        optimiser.step()
        examples += len(labels)
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": examples})}
    return Message(content=RecordDict(content), reply_to=message)
