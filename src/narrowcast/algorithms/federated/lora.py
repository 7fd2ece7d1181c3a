"""Averaging of low-rank adapters: which factors are shared, and what the server makes of them.

References: Zhang et al., Towards Building the Federated GPT, 2023 (arXiv:2305.05644), FedIT; Sun et al., Improving LoRA
in Privacy-preserving Federated Learning, ICLR 2024 (arXiv:2403.12313), FFA-LoRA; Chen et al., Robust Federated
Finetuning of LLMs via Alternating Optimization of LoRA, NeurIPS 2025 (arXiv:2502.01755), RoLoRA; Bai et al., Federated
Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources, NeurIPS 2024 (arXiv:2402.11505),
FlexLoRA; Wang et al., FLoRA, NeurIPS 2024 (arXiv:2409.05976); Singhal, Ponkshe and Vepakomma, FedEx-LoRA, 2024
(arXiv:2410.09432). Letters: A [r, i], B [o, r] the server's factors of a layer; A_u, B_u those of client u after its
local steps; p_u its weight, of sum 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.algorithms.client.sums import EACH, TENSORS, WEIGHT, SumLayout
from narrowcast.algorithms.codecs.chain import refuse_stateful
from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.algorithms.federated.downloads import DOWNLOAD
from narrowcast.algorithms.federated.fedavg import Averaging, dense_bits, model_of
from narrowcast.algorithms.federated.merged_adapters import (
    BASE,
    added,
    merged,
    of_all_rounds,
    of_last_round,
    residual,
    stack,
    unmerged,
)
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapted_layers import A, B, factor_pairs, initial_bound, is_factor
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, PrefixedArrays

_ROUND = DOWNLOAD.name("adapters round")
_FROZEN = PrefixedArrays(SERVER_ONLY.name("frozen/"))
"""The factors that stay as drawn: they complete the global model, and are never sent."""


def truncated(left: FloatArray, right: FloatArray, near: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return B [o, r] and A [r, i] with the B A nearest to a product, where A has orthonormal rows nearest to `near`.

    The product left [o, k] @ right [k, i] is not formed: its singular vectors are those of a [k, k] matrix, by QR. Any
    orthonormal A of the same rows has the same product; the one nearest to the A of before does not hang on the signs
    and the order of singular vectors, which rounding decides. B alone may be small, as a new adapter's is zero.
    """
    q_left, r_left = np.linalg.qr(left)
    q_right, r_right = np.linalg.qr(right.T)
    u, singular, v = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
    rank = len(near)
    b, a = q_left @ (u * singular)[:, :rank], v[:rank] @ q_right.T
    first, _, second = np.linalg.svd(near @ a.T)
    turn = first @ second
    return b @ turn.T, turn @ a


def product_norm(left: FloatArray, right: FloatArray) -> float:
    """Return the Frobenius norm of left [o, k] @ right [k, i], by QR: it is exact to float64 where products cancel."""
    (_, r_left), (_, r_right) = np.linalg.qr(left), np.linalg.qr(right.T)
    return float(np.linalg.norm(r_left @ r_right.T))


class LoRA(Averaging):
    """Averaging of the factors of `model: adapters`: six methods as settings of one.

    FedIT is the default: both factors are averaged, and the product of the means is not the mean of the products. FFA-
    LoRA is `share: b`: A stays as drawn from the seed. RoLoRA is `share: alternate`: clients train and send B in odd
    rounds and A in even ones. The mean of both is exact. FlexLoRA is `combine: product`: the server factorises the mean
    of the products, truncated to the rank. FLoRA is `combine: stack`: the mean of the products, as the factors of all
    clients one beside the other, is added to the frozen weights, and factors are drawn anew. FedEx-LoRA is `combine:
    residual`: factors are averaged, and what the product of the means misses of the mean of the products is added to
    the frozen weights. Both are exact. Tensors of `model.also_trained` are averaged in every round.

    A client that holds the model of an earlier round is sent what has changed since; what the seed gives is not sent.
    What is added to a weight is sent as factors, or as a matrix if that has fewer values; so is the sum of all that was
    added, to newcomers.
    The column `aggregation_error` is |B A - sum p_u B_u A_u| / |sum p_u B_u A_u| over all layers, of the server's
    factors after the round: with `combine: product`, or if it is asked for.

    Differs from the papers: 1. all clients have one rank. 2. FlexLoRA's A is turned to be near that of the round
    before. 3. FLoRA's A is drawn from the seed of the round, the same for all clients. 4. FedEx-LoRA's residual has
    (K - 1) r columns.
    """

    kind: Literal["lora"] = "lora"
    share: Literal["both", "b", "alternate"] = Field(
        "both",
        description="factors that are trained and sent: both, B alone, or B in odd rounds and A in even ones",
    )
    combine: Literal["factors", "product", "stack", "residual"] = Field(
        "factors",
        description="mean of each factor; or, from those of each client: factors of the mean product; that product "
        "added to the frozen weights, with new factors; the mean of factors, and what it misses added to these weights",
    )
    aggregation_error: bool = Field(
        False, description="report the column of that name where factors are averaged: the server keeps each client's"
    )

    @model_validator(mode="after")
    def _of_one_method(self) -> Self:
        combine = "" if self.combine == "factors" else f"combine = {self.combine}"
        setting = "share = alternate" if self.share == "alternate" else combine
        if self.share != "both" and self._reads_each:
            made = combine or "aggregation_error = true"
            raise ValueError(f"share = {self.share} has an exact mean of products, without {made}; leave one out")
        moved = self.server_optimizer is not None or self.download is not None
        if setting and moved:
            raise ValueError(f"{setting} goes without server_optimizer and download; leave them out")
        if combine and (self.aggregator is not None or self.server_learning_rate != 1):
            raise ValueError(f"{combine} is of the mean product; leave out aggregator and server_learning_rate")
        if self.share == "alternate" and self.aggregator is not None and self.aggregator.traits.remembers:
            raise ValueError("share = alternate has other tensors in each round; use an aggregator without memory")
        return self

    def check(self, task: Task) -> None:
        """Raise `UserError` for models without adapters, or with one factor where both are needed."""
        super().check(task)
        if not isinstance(task.model, Adapters):
            raise UserError(
                f"algorithm.kind = {self.kind} averages adapters, which model.kind = {task.model.kind} does not have; "
                f"set model.kind = adapters, with model.base.kind = {task.model.kind} if that is a network"
            )
        if task.model.factor != "both" and (self.share != "both" or self._reads_each):
            raise UserError(
                f"model.factor = {task.model.factor} trains one factor, whose mean is exact; leave it out, or set "
                "algorithm.share = both and algorithm.combine = factors"
            )
        if self.share == "alternate":
            refuse_stateful(self.codec, "share = alternate sends other tensors in the next round; leave it out")
        if self.combine == "stack":
            refuse_stateful(self.codec, "combine = stack draws other factors for the next round; leave it out")
        if self._merges:
            _adapters(task).adapted_weights(task.data)

    @property
    def _reads_each(self) -> bool:
        return self.combine != "factors" or self.aggregation_error

    @property
    def _merges(self) -> bool:
        """Return whether the frozen weights move."""
        return self.combine in ("stack", "residual")

    @property
    def sums_up(self) -> bool:
        """Return whether the changes are added up: products need the factors of each client."""
        return super().sums_up and not self._reads_each

    @property
    def traits(self) -> Traits:
        """Products need the factors of each client."""
        traits = super().traits
        if not self._reads_each:
            return traits
        setting = "aggregation_error = true" if self.combine == "factors" else f"combine = {self.combine}"
        return replace(traits, needs_each=setting)

    def _trains(self, name: str, round_index: int) -> bool:
        """Return whether clients train and send the tensor of this name in a round."""
        if self.share == "both":
            return True
        frozen = B if self.share == "alternate" and round_index % 2 == 0 else A
        return name.rpartition(".")[2] != frozen

    def _keeps(self, name: str) -> bool:
        """Return whether the tensor of this name is never trained."""
        return self.share == "b" and not self._trains(name, 1)

    def init(self, task: Task) -> Arrays:
        """Return x, the factors that stay as drawn, and the frozen weights if they move."""
        frozen = {name: values for name, values in task.initial_parameters().items() if self._keeps(name)}
        weights = unmerged(_adapters(task).adapted_weights(task.data)) if self._merges else {}
        return {**super().init(task), **_FROZEN.add(frozen), **weights}

    def parameters(self, task: Task) -> Arrays:
        """Return what clients train, in some rounds at least."""
        return {name: values for name, values in super().parameters(task).items() if not self._keeps(name)}

    # Client half

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the names of what trains in this round."""
        if self.share == "both":
            return LocalTerms()
        names = task.initial_parameters()
        return LocalTerms(trained=tuple(name for name in names if self._trains(name, chunk.round_index)))

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Train from x, with the factors that stay as drawn and the frozen weights as they are now."""
        (call,) = super().local_calls(broadcast, chunk, task)
        server = {name: call.server.get(name, values) for name, values in task.initial_parameters().items()}
        return [replace(call, server=server, terms=replace(call.terms, frozen=BASE.of(broadcast)))]

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send x, or what the last round has changed of it."""
        sent = super().broadcast(server, task, round_index)
        model = model_of(server)
        if self._merges:
            drawn = {name for name in model if self.combine == "stack" and is_factor(name)}
            means = {name: values for name, values in model.items() if name not in drawn}
            last = {**means, **of_last_round(server)}
            return Broadcast(
                {**sent.arrays, **BASE.add(BASE.of(server))},
                DensePayload.of({**means, **of_all_rounds(server)}),
                DensePayload.of(last) if round_index > 1 else None,
            )
        if self.share != "alternate":
            return sent
        last = {name: values for name, values in model.items() if self._trains(name, round_index - 1)}
        return Broadcast(
            {**sent.arrays, _ROUND: np.array(round_index)},
            sent.full,
            DensePayload.of(last) if round_index > 1 else None,
        )

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return x after the server's step, and the frozen weights with what is added to them."""
        after = super().step(server, broadcast, total, task, round_index)
        if not self._merges:
            return after
        shares, each = _of_clients(server, total)
        product = stack if self.combine == "stack" else residual
        products, scales, drawn = {}, {}, {}
        for layer, (a, b) in factor_pairs(each).items() if len(shares) else ():
            rank, inputs = each[a].shape[1:]
            products[layer] = product(shares, each[a], each[b])
            scales[layer] = _adapters(task).alpha / rank
            if self.combine == "stack":
                random = generator(task.seed, "factors " + a, round_index)
                bound = initial_bound(inputs)
                drawn[a] = random.uniform(-bound, bound, (rank, inputs)).astype(server[a].dtype)
                drawn[b] = np.zeros_like(server[b])
        return {**model_of(after), **drawn, **merged(server, products, scales)}

    def mean_change(self, server: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays | None:
        """Return the mean change of each factor, or the change to the factors of the mean product."""
        if self.aggregator is not None or not self._reads_each:
            changes = super().mean_change(server, total, task, round_index)
            if changes is None:
                return None
            return {name: changes.get(name, np.zeros_like(values)) for name, values in model_of(server).items()}
        shares, each = _of_clients(server, total)
        if not len(shares):
            return None
        model = model_of(server)
        means = {name: np.tensordot(shares, values, 1) for name, values in each.items()}
        for a, b in factor_pairs(model).values() if self.combine == "product" else ():
            means[b], means[a] = truncated(*stack(shares, each[a], each[b]), near=model[a].astype(np.float64))
        return {name: (means[name] - values).astype(values.dtype) for name, values in model.items()}

    def moved(self, server: Arrays, broadcast: Arrays, changes: Arrays) -> Arrays:
        """Return the state after a step along the changes of x."""
        return {**super().moved(server, broadcast, changes), **_FROZEN.add(_FROZEN.of(server))}

    def step_metrics(self, before: Arrays, after: Arrays, total: Arrays, task: Task) -> Mapping[str, float]:
        """Return the distance of the product of the server's factors from the mean product, relative to that."""
        if not self._reads_each:
            return {}
        shares, each = _of_clients(before, total)
        model, squares = model_of(after), np.zeros(2)
        for layer, (a, b) in factor_pairs(model).items() if len(shares) else ():
            left, right = stack(shares, each[a], each[b])
            both = np.hstack([left, -model[b].astype(np.float64)]), np.vstack([right, model[a].astype(np.float64)])
            scale = _adapters(task).alpha / len(model[a])
            if self._merges:
                missed = float(np.linalg.norm(scale * (both[0] @ both[1]) - added(before, after, layer)))
            else:
                missed = scale * product_norm(*both)
            squares += np.square([missed, scale * product_norm(left, right)])
        return {"aggregation_error": float(np.sqrt(squares[0] / squares[1]))} if squares[1] else {}

    def final(self, server: Arrays) -> Arrays:
        """Return x, with the factors that stay as drawn and the frozen weights that have moved."""
        return {**super().final(server), **_FROZEN.of(server), **BASE.of(server)}

    # What the run asks of the settings

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C], which is that of what trains; None with a codec."""
        if self.codec or self.share != "alternate":
            return super().upload_bits(broadcast, task, clients)
        round_index = int(broadcast[_ROUND])
        sent = {name: values for name, values in model_of(broadcast).items() if self._trains(name, round_index)}
        return dense_bits(sent, task, clients)

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays | None:
        """Return a partial sum with its changes times `factor`; None where rounds have changes of other tensors."""
        return None if self.share == "alternate" else super().weighted_by_staleness(partial, factor)

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return the layout of the sum of what clients train; None where rounds have other tensors."""
        return None if self.share == "alternate" else super().sum_layout(task, cohort)


def _adapters(task: Task) -> Adapters:
    """Return the task's model, which `LoRA.check` has found to be one with adapters."""
    assert isinstance(task.model, Adapters), "check() has seen to it"
    return task.model


def _of_clients(server: Arrays, total: Arrays) -> tuple[FloatArray, dict[str, NDArray[Any]]]:
    """Return p_u [K] of the clients that delivered, and what they trained, [K, ...] in float64."""
    each, model = EACH.of(total), model_of(server)
    weights = np.asarray(each[WEIGHT], dtype=np.float64)
    trained = {name: model[name] + np.asarray(change, np.float64) for name, change in TENSORS.of(each).items()}
    return weights / max(weights.sum(), 1e-300), trained
