"""FedMAvg and SFMF: clients keep the factors of their columns, and send changes of the factors of the rows.

Letters: X = [X_1 .. X_P] the columns of the clients, W the server's factors, H_p those of client p, omega_p its weight,
m the number of draws of senders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import SumLayout, TensorSum, tensor_sum_layout
from narrowcast.algorithms.client.uploads import Message, init_codec_state
from narrowcast.algorithms.codecs.messages import LIKELY, RowLayout
from narrowcast.algorithms.federated.downloads import Download, SizesDownloads
from narrowcast.algorithms.federated.fedavg import model_of
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import ROW_FACTORS, MaskedFactorisation
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, LocalUpdates


class FactorAveraging(SizesDownloads, ClientPass, ABC):
    """The server holds W [N, K]; a subclass says who sends with which weights, and how W moves by the sum."""

    rows: RowLayout = "all"
    download: Download = None

    @property
    def traits(self) -> Traits:
        """Clients train factors."""
        return replace(super().traits, trains_factors=True)

    @abstractmethod
    def sending_weights(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return the weights of the chunk's clients in the sum, [C]; 0 for one that does not send."""

    @abstractmethod
    def moved(self, row_factors: Arrays, total: TensorSum) -> Arrays:
        """Return W after the step by the sum of the changes, before it is projected."""

    def check(self, task: Task) -> None:
        """Raise `UserError` for another model or training, and for rows that cannot be sent in its type."""
        if not isinstance(task.model, MaskedFactorisation) or not task.training.traits.trains_factors:
            raise UserError(
                f"algorithm.kind = {self.kind} trains masked_factorisation by alternating_gradient or rating_sgd, not "
                f"{task.model.kind} by {task.training.kind}; use data.kind = explicit_ratings or sample_columns"
            )
        if self.rows == "touched" and task.model.dtype == "float64":
            raise UserError("algorithm.rows = touched sends float32; use model.dtype = float32, or rows = all")
        if self.download is not None and self.download.rows == "touched":
            raise UserError(
                f"algorithm.download.rows = touched asks for rows of items, which {self.kind} does not; "
                "use download.rows = all"
            )

    def init(self, task: Task) -> Arrays:
        """Return W, and what downloads on a grid need."""
        model = task.initial_parameters()
        return {**model, **self.begun_download(model)}

    def init_clients(self, task: Task) -> Arrays:
        """Return H [U, n, K], and the codec's state."""
        clients = task.model.init_clients(task.data, task.private_seed.value)
        if not self.codec:
            return clients
        name = ROW_FACTORS if self.rows == "all" else LIKELY
        sent = {name: task.initial_parameters()[ROW_FACTORS]}
        return {**clients, **init_codec_state(self.codec, task.data.n_clients, sent)}

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send W to every client of the round, or W on a grid."""
        return self.broadcast_model(model_of(server), server, task, round_index)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the projection of the moved W onto its set; W as it is if no client sent."""
        del round_index
        model, sums = model_of(server), TensorSum.of(total)
        held = self.kept_download(model, server, broadcast)
        if not sums.weight:
            return {**model, **held}
        moved = np.asarray(self.moved(model, sums)[ROW_FACTORS], dtype=model[ROW_FACTORS].dtype)
        return {ROW_FACTORS: task.model.w_set.project_w(moved), **held}  # type: ignore[attr-defined]

    def final(self, server: Arrays) -> Arrays:
        """Return W."""
        return model_of(server)

    def layout_of(self, task: Task, cohort: int, most_weight: int) -> SumLayout:
        """Return the layout of the sum of W's changes, of a total weight up to `most_weight`.

        Raise `UserError` for some rows, whose list would tell what encryption is to hide.
        """
        if self.rows == "touched":
            raise UserError("secure: algorithm.rows = touched names the items of each client; use algorithm.rows = all")
        return tensor_sum_layout(task.initial_parameters(), most_weight, cohort)

    # Client half

    def local_updates(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalUpdates]:
        """Train H of all clients on their columns, and W of those that send."""
        moves = self.sending_weights(chunk, task) > 0
        return [task.training.train_factors(np.asarray(model_of(broadcast)[ROW_FACTORS]), chunk, task, moves)]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send the changes of W of clients with a weight, as a whole matrix or in the rows of their entries."""
        del broadcast
        sends = (self.sending_weights(chunk, task) > 0) & (task.data.examples[chunk.clients] > 0)
        layout: Literal["tensor", "touched"] = "tensor" if self.rows == "all" else "touched"
        return Message(sends=sends, rows=updates.rows, layout=layout)

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the changes of W, with the clients' weights."""
        del broadcast
        weights = self.sending_weights(chunk, task)
        # The weights of what a codec decodes are in float64, of what is sent as it is in the type of W.
        rounded = weights if self.codec else weights.astype(arrived.rows[ROW_FACTORS].values.dtype)
        return Contribution(arrived.rows, rounded, divisor=weights)


class FedMAvg(FactorAveraging):
    """Model averaging for matrix factorisation: every client trains its own columns, and only those drawn send W.

    Reference: Wang, Suwandi and Chang, Demystifying Model Averaging for Communication-Efficient Federated Matrix
    Factorization, ICASSP 2021, Algorithm 1.

    A round is Q1 projected gradient steps on H_p and then steps on W_p, on every client of the cohort; see
    `training.kind: alternating_gradient`. With `senders` m, m clients are drawn with replacement with probabilities
    omega_p from the public seed, and W becomes the projection of the mean of the W_p drawn. Without it every client
    sends, and W becomes that of sum omega_p W_p / sum omega_p.

    A client that is not drawn advances its H_p; its steps on W_p would be thrown away, and are not taken. Draws are
    among all clients: let `clients_per_round` be their number, or part of those drawn are not there.
    """

    kind: Literal["fedmavg"] = "fedmavg"
    senders: int | None = Field(
        None, ge=1, description="m, draws with replacement of the clients that send; null: all clients of the round"
    )
    weights: Literal["columns", "examples", "equal"] = Field(
        "columns", description="omega_p, in proportion to a client's columns or training entries, or the same for all"
    )

    def check(self, task: Task) -> None:
        """Raise `UserError` for another model or training, and for a rank above the size of the matrix."""
        super().check(task)
        data, rank = task.data, task.model.rank  # type: ignore[attr-defined]
        if rank > min(data.n_users, data.n_items):
            raise UserError(
                f"model.rank = {rank}: {data.name} has {data.n_items} rows and {data.n_users} columns; use at most "
                f"{min(data.n_users, data.n_items)}"
            )

    @property
    def traits(self) -> Traits:
        """One that is drawn k times has k times its weight, if every client of the round sends."""
        return replace(super().traits, counts_draws=self.senders is None)

    def sending_weights(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return the weights of the chunk's clients in the mean, [C]; 0 for one that does not send."""
        omega = self._omega(task)
        if self.senders is None:
            draws = 1 if chunk.draws is None else chunk.draws
            return np.asarray(omega[chunk.clients] * draws)
        random = generator(task.seed, "senders", chunk.round_index)
        drawn = random.choice(len(omega), self.senders, p=omega / omega.sum())
        return np.bincount(drawn, minlength=len(omega))[chunk.clients].astype(np.float64)

    def moved(self, row_factors: Arrays, total: TensorSum) -> Arrays:
        """Return W plus the mean change."""
        return {ROW_FACTORS: row_factors[ROW_FACTORS] + total.mean(ROW_FACTORS)}

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return the layout of the sum of W's changes; raise `UserError` for draws of senders."""
        if self.senders is not None:
            raise UserError(
                "secure: algorithm.senders draws few of the clients that agreed on a sum; leave out algorithm.senders "
                "and use a smaller clients_per_round"
            )
        return self.layout_of(task, cohort, int(np.sort(self._omega(task))[-cohort:].sum()))

    def _omega(self, task: Task) -> FloatArray:
        trains = task.data.examples > 0
        match self.weights:
            case "columns":
                omega = task.data.of_clients.n_columns
            case "examples":
                omega = task.data.examples
            case _:
                omega = np.ones(task.data.n_clients)
        return np.asarray(omega * trains, dtype=np.float64)


class SFMF(FactorAveraging):
    """Gradients of the items' factors from the users, added up under encryption: W -= sum of the users' gradients.

    Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020 (arXiv:1906.05108), and
    the released code (Di-Chai/FedMF). The kind `fedmf` is the averaging of item matrices that is named after this
    paper.

    Users take an SGD step on their own factors at each of their ratings, and send the gradients of the items that they
    rated; see `training.kind: rating_sgd`. With `rows: all`, the paper's FullText, a user sends the gradients of all
    items, zeros included. With `rows: touched`, PartText, it sends those of its items alone, which tells the server
    which items it rated, under encryption too. `secure` encrypts the sum with `rows: all`.
    """

    kind: Literal["sfmf"] = "sfmf"

    def check(self, task: Task) -> None:
        """Raise `UserError` for another model, and for trainings other than steps by rating."""
        super().check(task)
        if task.training.kind != "rating_sgd":
            raise UserError(
                f"algorithm.kind = sfmf adds up steps of ratings; use training.kind = rating_sgd, not "
                f"{task.training.kind}"
            )

    def sending_weights(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return 1 for every client, [C]."""
        del task
        return np.ones(len(chunk.clients))

    def moved(self, row_factors: Arrays, total: TensorSum) -> Arrays:
        """Return W plus the sum of the changes."""
        return {ROW_FACTORS: row_factors[ROW_FACTORS] + total.tensors[ROW_FACTORS]}

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return the layout of the sum of W's changes; raise `UserError` with `rows: touched`."""
        return self.layout_of(task, cohort, cohort)
