"""Averaging of low-rank adapters: which factors are shared, and what the server makes of them.

References: Zhang et al., Towards Building the Federated GPT, 2023 (arXiv:2305.05644), FedIT; Sun et al., Improving LoRA
in Privacy-preserving Federated Learning, ICLR 2024 (arXiv:2403.12313), FFA-LoRA; Chen et al., Robust Federated
Finetuning of LLMs via Alternating Optimization of LoRA, NeurIPS 2025 (arXiv:2502.01755), RoLoRA; Bai et al., Federated
Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources, NeurIPS 2024 (arXiv:2402.11505),
FlexLoRA; Wang et al., FLoRA, NeurIPS 2024 (arXiv:2409.05976); Singhal, Ponkshe and Vepakomma, FedEx-LoRA, 2024
(arXiv:2410.09432); Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models, EMNLP 2024
(arXiv:2401.06432), HetLoRA; Bian et al., LoRA-FAIR, ICCV 2025 (arXiv:2411.14961). Letters: A [r, i], B [o, r] the
server's factors of a layer; A_u, B_u those of client u after its local steps; p_u its weight, of sum 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import CLIENT, EACH, SumLayout
from narrowcast.algorithms.client.uploads import Columns, Message
from narrowcast.algorithms.codecs.chain import refuse_stateful
from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.algorithms.federated.adapter_ranks import (
    RANK,
    AdapterRanks,
    Pruning,
    column_mean,
    in_columns,
    trained_by_clients,
    truncated_to,
)
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
from narrowcast.algorithms.federated.rank_policy import RankPolicy
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.platform.config.catalog import RANK_POLICIES
from narrowcast.platform.contracts import Broadcast, LocalCall, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapted_layers import A, B, factor_pairs, initial_bound, is_factor
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates, PrefixedArrays

_ROUND, _RANKS = DOWNLOAD.name("adapters round"), DOWNLOAD.name("most adapter rank")
_FROZEN = PrefixedArrays(SERVER_ONLY.name("frozen/"))
"""The factors that stay as drawn: they complete the global model, and are never sent."""
_MOST_RANK = SERVER_ONLY.name("most adapter rank")
"""The rank [U] above which each client does not go, as its last pruned upload said; clients read it as `_RANKS`."""
_PRUNED = "pruned"
"""The array of `EACH` that says which clients have lowered their rank."""


def truncated(
    left: FloatArray, right: FloatArray, near: FloatArray, *, turns: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Return B [o, r] and A [r, i] with the B A nearest to a product, where A has orthonormal rows nearest to `near`.

    Unless it `turns`, the rows are the singular vectors, largest first, with signs like those of `near`: the first k
    columns and rows are then the nearest product of rank k.

    The product left [o, k] @ right [k, i] is not formed: its singular vectors are those of a [k, k] matrix, by QR. Any
    orthonormal A of the same rows has the same product; the one nearest to the A of before does not hang on the signs
    and the order of singular vectors, which rounding decides. B alone may be small, as a new adapter's is zero.
    """
    q_left, r_left = np.linalg.qr(left)
    q_right, r_right = np.linalg.qr(right.T)
    u, singular, v = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
    rank = len(near)
    b, a = q_left @ (u * singular)[:, :rank], v[:rank] @ q_right.T
    if not turns:
        signs = np.where((a * near).sum(axis=1) < 0, -1.0, 1.0)
        return b * signs, a * signs[:, np.newaxis]
    first, _, second = np.linalg.svd(near @ a.T)
    turn = first @ second
    return b @ turn.T, turn @ a


def product_norm(left: FloatArray, right: FloatArray) -> float:
    """Return the Frobenius norm of left [o, k] @ right [k, i], by QR: it is exact to float64 where products cancel."""
    (_, r_left), (_, r_right) = np.linalg.qr(left), np.linalg.qr(right.T)
    return float(np.linalg.norm(r_left @ r_right.T))


def refinement(left: FloatArray, right: FloatArray, a: FloatArray, weight: float) -> FloatArray:
    """Return D [o, r] with the least |left right - D A|^2 + weight |D|^2, for A [r, i]: a ridge regression.

    Without a weight, D A is the projection of left [o, k] @ right [k, i] on the rows of A.
    """
    gram = a @ a.T + weight * np.eye(len(a))
    return left @ np.linalg.lstsq(gram, a @ right.T)[0].T


class LoRA(Averaging):
    """Averaging of the factors of `model: adapters`: eight methods as settings of one.

    FedIT is the default: both factors are averaged, and the product of the means is not the mean of the products. FFA-
    LoRA is `share: b`: A stays as drawn from the seed. RoLoRA is `share: alternate`: clients train and send B in odd
    rounds and A in even ones. The mean of both is exact. FlexLoRA is `combine: product`: the server factorises the mean
    of the products, truncated to the rank. FLoRA is `combine: stack`: the mean of the products, as the factors of all
    clients one beside the other, is added to the frozen weights, and factors are drawn anew. FedEx-LoRA is `combine:
    residual`: factors are averaged, and what the product of the means misses of the mean of the products is added to
    the frozen weights. Both are exact. LoRA-FAIR is `combine: refined`: the mean of B moves so that its product with
    that of A misses least, by least squares with `refinement_weight` times its square. Tensors of `model.also_trained`
    are averaged in every round.

    With a `rank_policy` a client of rank k trains and sends the first k rows of A and columns of B. HetLoRA is
    `combine: padded`: the missing ones count as zeros, and a client's weight is |B_u A_u|; with `pruning` its clients
    lower their ranks as they train. The means of `factors` are
    over the clients that have a row or column, `stack` has as many as were sent, and `product` orders them by their
    singular values.

    A client that holds the model of an earlier round is sent what has changed since; what the seed gives is not sent.
    What is added to a weight is sent as factors, or as a matrix if that has fewer values; so is the sum of all that was
    added, to newcomers.
    The column `aggregation_error` is |B A - sum p_u B_u A_u| / |sum p_u B_u A_u| over all layers, of the server's
    factors after the round: with `combine: product`, or if it is asked for.

    Differs from the papers: 1. HetLoRA's weights are those of each layer, and clients that prune are sent as many
    columns as their policy says. 2.
    FlexLoRA's A is turned to be near that of the round before, unless clients have ranks. 3. FLoRA's A is drawn from
    the seed of the round, the same for all clients. 4. FedEx-LoRA's residual has (K - 1) r columns. 5. LoRA-FAIR's
    change of B is the regression's closed form, per layer; the paper descends on the cosine distance.
    """

    kind: Literal["lora"] = "lora"
    share: Literal["both", "b", "alternate"] = Field(
        "both",
        description="factors that are trained and sent: both, B alone, or B in odd rounds and A in even ones",
    )
    combine: Literal["factors", "padded", "product", "stack", "residual", "refined"] = Field(
        "factors",
        description="mean of each factor; or, from those of each client: their mean by the norms of the products, "
        "padded with zeros; factors of the mean product; that product added to the frozen weights, with new factors; "
        "the mean of factors, and what it misses added to these weights, or to B as far as it can",
    )
    refinement_weight: float = Field(
        0.01, ge=0, allow_inf_nan=False, description="weight of the square of what combine = refined adds to B"
    )
    rank_policy: Annotated[RankPolicy, RANK_POLICIES] | None = Field(
        None, description="choice of each client's rank in a round, at most model.rank; null: that, for all"
    )
    pruning: Pruning | None = Field(
        None, description="clients lower their ranks for good where training shrinks their last columns; null: never"
    )
    aggregation_error: bool = Field(
        False, description="report the column of that name where factors are averaged: the server keeps each client's"
    )

    @model_validator(mode="after")
    def _of_one_method(self) -> Self:
        own_step = self.combine != "factors" or self.rank_policy is not None
        if self.share != "both" and self._reads_each:
            raise ValueError(
                f"share = {self.share} has an exact mean of products, without {self._setting}; leave one out"
            )
        if self.rank_policy is not None and self.combine in ("residual", "refined"):
            raise ValueError(f"combine = {self.combine} is of factors of one rank; leave out rank_policy")
        if self.pruning is not None and self.rank_policy is None:
            raise ValueError("pruning lowers the ranks of a rank_policy; set one, such as bandwidth, or leave it out")
        setting = "share = alternate" if self.share == "alternate" else self._setting * own_step
        if setting and (self.server_optimizer is not None or self.download is not None):
            raise ValueError(f"{setting} goes without server_optimizer and download; leave them out")
        if own_step and (self.aggregator is not None or self.server_learning_rate != 1):
            raise ValueError(f"{setting} has a server step of its own; leave out aggregator and server_learning_rate")
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
                "algorithm.share = both and algorithm.combine = factors, without rank_policy"
            )
        if self.rank_policy is not None:
            refuse_stateful(self.codec, "clients of another rank in the next round send other columns; leave it out")
        if self.share == "alternate":
            refuse_stateful(self.codec, "share = alternate sends other tensors in the next round; leave it out")
        if self.combine == "stack":
            refuse_stateful(self.codec, "combine = stack draws other factors for the next round; leave it out")
        if self._merges:
            _adapters(task).adapted_weights(task.data)

    @property
    def _reads_each(self) -> bool:
        return self.combine != "factors" or self.aggregation_error or self.rank_policy is not None

    @property
    def _setting(self) -> str:
        """The setting by which the server reads each client's factors, or has a step of its own; empty without one."""
        if self.combine != "factors":
            return f"combine = {self.combine}"
        if self.rank_policy is not None:
            return f"rank_policy = {self.rank_policy.kind}"
        return "aggregation_error = true" if self.aggregation_error else ""

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
        """Products need the factors of each client, and their norms are weights whatever the draws."""
        traits = super().traits
        if not self._reads_each:
            return traits
        counts = traits.counts_draws and self.combine != "padded"
        return replace(traits, needs_each=self._setting, counts_draws=counts)

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
        return {**super().init(task), **_FROZEN.add(frozen), **weights, **self._most_ranks(task)}

    def _most_ranks(self, task: Task) -> Arrays:
        if self.pruning is None:
            return {}
        largest = AdapterRanks.of(super().parameters(task)).largest
        return {_MOST_RANK: np.full(task.data.n_clients, largest, dtype=np.int64)}

    def parameters(self, task: Task) -> Arrays:
        """Return what clients train, in some rounds at least."""
        return {name: values for name, values in super().parameters(task).items() if not self._keeps(name)}

    # Client half

    def _columns(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Columns:
        """Return the columns that each client of a chunk trains."""
        assert self.rank_policy is not None, "the caller has seen to it"
        sizes = AdapterRanks.of(model_of(broadcast))
        columns = sizes.columns(self.rank_policy, chunk, task)
        if self.pruning is None:
            return columns
        return sizes.first(np.minimum(columns.ranks, broadcast[_RANKS][chunk.clients]))

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
        terms = replace(call.terms, frozen=BASE.of(broadcast))
        if self.rank_policy is not None:
            columns = self._columns(broadcast, chunk, task)
            terms = replace(terms, start=truncated_to(columns.masks, server))
            if self.pruning is not None:
                tails = self.pruning.left(columns.ranks)
                terms = replace(terms, tails=tails, tail_weight=self.pruning.weight)
        return [replace(call, server=server, terms=terms)]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send the changes of what trains, of factors those of the client's rank."""
        if self.rank_policy is None:
            return super().message(broadcast, chunk, task, updates)
        columns = self._columns(broadcast, chunk, task)
        if self.pruning is not None:
            start = truncated_to(columns.masks, model_of(broadcast))
            trained = {name: values + updates.changes[name] for name, values in start.items()}
            left = self.pruning.pruned(columns.ranks, start, trained)
            columns = AdapterRanks.of(model_of(broadcast)).first(left)
        return Message(in_columns(updates.changes), columns=columns)

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the changes with the clients' weights, and their ranks."""
        contribution = super().contribution(broadcast, chunk, task, arrived)
        if arrived.columns is None:
            return contribution
        ranks = arrived.columns.ranks
        sent = replace(contribution, tensors=in_columns(arrived.tensors), each={RANK: ranks})
        if self.pruning is None:
            return sent
        pruned = ranks < self._columns(broadcast, chunk, task).ranks
        return replace(sent, each={**sent.each, CLIENT: chunk.clients, _PRUNED: pruned})

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send x, or what the last round has changed of it."""
        sent, model = super().broadcast(server, task, round_index), model_of(server)
        if self.share == "alternate" or self.rank_policy is not None:
            sent = replace(sent, arrays={**sent.arrays, _ROUND: np.array(round_index)})
        if self.pruning is not None:
            sent = replace(sent, arrays={**sent.arrays, _RANKS: server[_MOST_RANK]})
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
        return replace(sent, update=DensePayload.of(last) if round_index > 1 else None)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return x after the server's step, and the frozen weights with what is added to them."""
        after = super().step(server, broadcast, total, task, round_index)
        if self.pruning is not None:
            uploads, most = EACH.of(total), server[_MOST_RANK].copy()
            pruned = uploads[_PRUNED]
            most[uploads[CLIENT][pruned]] = uploads[RANK][pruned]
            after = {**after, _MOST_RANK: most}
        if not self._merges:
            return after
        shares, each, masks = trained_by_clients(model_of(server), total)
        product = stack if self.combine == "stack" else residual
        products, scales, drawn = {}, {}, {}
        for layer, (a, b) in factor_pairs(each).items() if len(shares) else ():
            rank, inputs = each[a].shape[1:]
            left, right = product(shares, each[a], each[b])
            sent = masks[b].reshape(-1)[: len(right)] if masks else slice(None)
            products[layer] = left[:, sent], right[sent]
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
        shares, each, masks = trained_by_clients(model_of(server), total)
        if not len(shares):
            return None
        model = model_of(server)
        means = {name: np.tensordot(shares, values, 1) for name, values in each.items()}
        for a, b in factor_pairs(model).values():
            if self.combine == "product":
                left, right = stack(shares, each[a], each[b])
                near = model[a].astype(np.float64)
                means[b], means[a] = truncated(left, right, near, turns=self.rank_policy is None)
            elif self.combine == "padded":
                norms = np.array([product_norm(*pair) for pair in zip(each[b], each[a], strict=True)])
                weights = norms / norms.sum() if norms.any() else shares
                means |= {name: np.tensordot(weights, each[name], 1) for name in (a, b)}
            elif self.combine == "refined":
                means[b] += refinement(*residual(shares, each[a], each[b]), means[a], self.refinement_weight)
            elif masks:
                means[a] = column_mean(shares, np.swapaxes(each[a], 1, 2), masks[a], model[a].T).T
                means[b] = column_mean(shares, each[b], masks[b], model[b])
        return {name: (means[name] - values).astype(values.dtype) for name, values in model.items()}

    def moved(self, server: Arrays, broadcast: Arrays, changes: Arrays) -> Arrays:
        """Return the state after a step along the changes of x."""
        return {**super().moved(server, broadcast, changes), **_FROZEN.add(_FROZEN.of(server))}

    def step_metrics(self, before: Arrays, after: Arrays, total: Arrays, task: Task) -> Mapping[str, float]:
        """Return the distance of the product of the server's factors from the mean product, relative to that."""
        if not self._reads_each:
            return {}
        shares, each, _ = trained_by_clients(model_of(before), total)
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
        """Return the size of each client's upload, [C], that of what it trains; None with a codec or if it prunes."""
        if self.pruning is not None:
            return None
        if self.rank_policy is not None and not self.codec:
            sizes = AdapterRanks.of(model_of(broadcast))
            ranks = sizes.chosen(self.rank_policy, task, clients, int(broadcast[_ROUND]))
            return np.where((ranks > 0) & (task.data.examples[clients] > 0), sizes.bits[ranks], 0)
        if self.codec or self.share != "alternate":
            return super().upload_bits(broadcast, task, clients)
        round_index = int(broadcast[_ROUND])
        sent = {name: values for name, values in model_of(broadcast).items() if self._trains(name, round_index)}
        return dense_bits(sent, task, clients)

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return the size of the columns that each recipient trains, [C]; None if it is sent all."""
        policy = self.rank_policy
        if policy is None or self._merges or policy.kind == "channel":
            return super().download_bits(server, broadcast, task, recipients)
        sizes = AdapterRanks.of(model_of(server))
        ranks = sizes.chosen(policy, task, recipients.clients, recipients.round_index)
        if self.pruning is not None:
            ranks = np.minimum(ranks, server[_MOST_RANK][recipients.clients])
        return sizes.bits[ranks]

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
