"""The reference: client after client with a torch module and torch's optimiser, without a platform.

In float64 it says how far float32 alone leads from the exact result.
"""

from __future__ import annotations

import torch
from replay import Stopwatch, Workload, arguments, report
from torch import nn


def main() -> None:
    options = arguments(precision={"choices": ("float32", "float64"), "default": "float32"})
    precision = getattr(torch, options.precision)
    workload = Workload(options.workload)
    module = workload.network().to(precision)
    parameters = list(module.parameters())
    optimiser = torch.optim.SGD(parameters, lr=workload.settings.learning_rate)
    watch, every_round = Stopwatch(), []
    watch.start()
    for round_index in range(options.rounds):
        start = [values.detach().clone() for values in parameters]
        total, weight = [torch.zeros_like(values) for values in start], 0
        for place in range(workload.cohorts.shape[1]):
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            examples = 0
            for features, labels in workload.batches(round_index, place):
                optimiser.zero_grad()
                nn.functional.cross_entropy(module(features.to(precision)), labels).backward()
                optimiser.step()
                examples += len(labels)
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=examples)
            weight += examples
        with torch.no_grad():
            torch._foreach_copy_(parameters, torch._foreach_div(total, weight))
        watch.lap()
        every_round.append({name: values.detach().clone() for name, values in module.named_parameters()})
    report(workload, watch, every_round[-1], options.parameters, every_round)


if __name__ == "__main__":
    main()
