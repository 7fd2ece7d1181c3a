"""FedPara: federated averaging of the factors of a low-rank Hadamard product, in place of the weights.

Reference: Hyeon-Woo et al., FedPara: Low-rank Hadamard Product for Communication-Efficient Federated Learning,
ICLR 2022 (arXiv:2108.06098).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.algorithms.federated.hadamard import factorise, products, products_of_arrays
from narrowcast.algorithms.federated.whole_model import model_of
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.types import Arrays, Chunk, LocalTerms


class FedPara(Averaging):
    """Averaging of the factors of a low-rank Hadamard product in place of the weights.

    W = (X1 Y1') * (X2 Y2') for each linear weight, Proposition 1, and Proposition 3's form for each convolution.

    Clients train, send and receive the factors, and vectors whole; `gamma` chooses the inner rank.

    Differs from the paper: 1. all weights with two or more dimensions have factors if these are fewer values; the
    paper names its layers by hand. 2. factors are drawn so that the product has the variance of the model's own
    initial weight; the released code draws each by He's rule. 3. weight decay is that of W and not of the factors.
    4. no tanh on the halves and no Jacobian correction: the paper calls them optional, Table 4, and its experiments on
    images use them.
    """

    kind: Literal["fedpara"] = "fedpara"
    gamma: float = Field(
        0.1,
        ge=0,
        le=1,
        description="interpolates the rank: 0 is the least that allows full rank, 1 gives as many values as W",
    )

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks: they have weights to factorise."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(
                f'algorithm.kind = "{self.kind}" trains networks, not {task.model.kind}; use colr, or fedmf with fewer '
                "values for each item, model.embedding_dim"
            )
        if task.start is not None:
            raise UserError("start_from: fedpara draws factors, of which no product is a given model; use fedavg")

    def parameters(self, task: Task) -> Arrays:
        """Return the factors, and the parameters that have none."""
        return factorise(task.initial_parameters(), self.gamma, task.seed)

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return local SGD on the factors."""
        del chunk, task
        return LocalTerms(rebuild=_rebuild)

    def final(self, server: Arrays) -> Arrays:
        """Return the model's parameters: the products of the factors."""
        return products_of_arrays(model_of(server))


def _rebuild(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Mapping[str, Any]:
    del frozen
    return products(trained)
