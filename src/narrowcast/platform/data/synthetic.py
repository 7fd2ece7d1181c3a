"""Synthetic data: FedProx's softmax regression, federated least squares, and graphs of a stochastic block model."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.data.classification import Classification
from narrowcast.platform.data.graph import GraphSource, NodeGraph
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

N_FEATURES, N_CLASSES = 60, 10
TRAIN_SHARE = 0.9
SPREADS = np.arange(1, N_FEATURES + 1) ** -0.6
"""Standard deviations of the features, whose variances are j ** -1.2."""
MOST_SAMPLES = 20_000_000

FloatArray = NDArray[np.float64]


class Synthetic(Classification):
    """Softmax-regression data of `clients` users: y = argmax(W x + b), 60 features, 10 classes.

    This is Synthetic(alpha, beta) of FedProx (Li et al., MLSys 2020). User k has lognormal(4, 2) + 50 samples. W and b
    are normal around u ~ N(0, alpha); x has the variances j ** -1.2 around a mean that is normal around B ~ N(0, beta).
    `alpha` and `beta` are standard deviations, as in the code that FedProx released; its paper writes variances
    (`as_variances`), which is the same for 0 and 1. `iid` gives all users one W and b and the mean 0, the variant
    without heterogeneity. The last tenth of every user's samples is the test set.
    """

    kind: Literal["synthetic"] = "synthetic"
    alpha: float = Field(default=0.0, ge=0, le=1e6, description="spread of the users' models")
    beta: float = Field(default=0.0, ge=0, le=1e6, description="spread of the users' feature means")
    as_variances: bool = Field(False, description="alpha and beta are variances, and not standard deviations")
    iid: bool = Field(False, description="one model and mean for all users")
    clients: int = Field(default=30, ge=1, le=MOST_SAMPLES // 50, description="number of users, one client each")
    partition: Partition = Field(default=Natural(), description="distribution of the training samples across clients")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.iid and (self.alpha or self.beta):
            raise ValueError(f"iid: true takes no alpha and beta, got {self.alpha:g} and {self.beta:g}; omit them")
        return self

    def load(self) -> Samples:
        """Draw the samples; those of user k do not depend on the number of users.

        Raise `UserError` if they would not fit in memory, or the partition does not fit them.
        """
        randoms = [generator(self.seed or 0, "synthetic", client=1 + user) for user in range(self.clients)]
        sizes = np.array([50 + int(random.lognormal(4, 2)) for random in randoms])
        if sizes.sum() > MOST_SAMPLES:
            raise UserError(
                f"synthetic: {self.clients} clients have {sizes.sum()} samples, but at most {MOST_SAMPLES} are "
                "allowed; lower clients"
            )
        shared = generator(self.seed or 0, "synthetic")
        model = (shared.normal(0, 1, (N_FEATURES, N_CLASSES)), shared.normal(0, 1, N_CLASSES)) if self.iid else None
        users = np.repeat(np.arange(self.clients), sizes)
        features = np.empty((len(users), N_FEATURES), dtype=np.float32)
        labels = np.empty(len(users), dtype=np.int64)
        ends = np.cumsum(sizes)
        for random, size, end in zip(randoms, sizes.tolist(), ends.tolist(), strict=True):
            features[end - size : end], labels[end - size : end] = self._draw(random, size, model)
        rank = np.arange(len(users)) - np.repeat(ends - sizes, sizes)
        is_train = rank < np.repeat((TRAIN_SHARE * sizes).astype(np.int64), sizes)
        everything = Labelled(features, labels)
        train, test = everything.take(np.flatnonzero(is_train)), everything.take(np.flatnonzero(~is_train))
        name = "synthetic-iid" if self.iid else f"synthetic({self.alpha:g},{self.beta:g})"
        return self._dealt(
            name,
            "drawn",
            N_CLASSES,
            train,
            test,
            clients=self.clients,
            users=users[is_train],
            test_users=users[~is_train],
        )

    def _draw(
        self, random: np.random.Generator, size: int, model: tuple[FloatArray, FloatArray] | None
    ) -> tuple[FloatArray, NDArray[np.int64]]:
        """Return one user's features [size, 60] and labels [size]."""
        mean: FloatArray = np.zeros(N_FEATURES)
        if model is None:
            power = 0.5 if self.as_variances else 1.0
            centre, shift = random.normal(0, self.alpha**power), random.normal(0, self.beta**power)
            mean = random.normal(shift, 1, N_FEATURES)
            model = random.normal(centre, 1, (N_FEATURES, N_CLASSES)), random.normal(centre, 1, N_CLASSES)
        features = mean + SPREADS * random.standard_normal((size, N_FEATURES))
        return features, np.argmax(features @ model[0] + model[1], axis=1)


TEST_SHARE = 0.2
MOST_VALUES = 2**30
"""Of features."""


class LeastSquares(Classification):
    """Linear regression by `clients` users with their own solutions: b = A x_k + noise, of `samples` rows each.

    x_k is normal around a common x ~ N(0, I) with the standard deviation `heterogeneity`. Feature j of client k is
    normal with mean 0 and a standard deviation of exp(z), z ~ N(0, `scale_spread`), so that the clients' A'A differ
    too. With fewer samples than features a client's loss is convex and has many minima. `model: softmax` adds an
    intercept, whose true value is 0.

    Features [n, features] and targets [n, 1] are float32. Each client has a fifth more samples, which are the test set.
    """

    kind: Literal["least_squares"] = "least_squares"
    clients: int = Field(default=10, ge=1, le=10**6, description="number of users, one client each")
    samples: int = Field(default=50, ge=1, le=10**6, description="training samples of each user, before validation")
    features: int = Field(default=5, ge=1, le=10**5, description="number of features")
    heterogeneity: float = Field(default=1.0, ge=0, le=1e6, description="standard deviation of the users' solutions")
    scale_spread: float = Field(
        default=0.5, ge=0, le=10, description="standard deviation of the logarithm of a feature's scale across users"
    )
    noise: float = Field(default=0.5, ge=0, le=1e6, description="standard deviation of the targets around A x_k")
    partition: Partition = Field(default=Natural(), description="distribution of the training samples across clients")
    validation_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the training samples held out for validation on the server"
    )

    def load(self) -> Samples:
        """Draw the samples; those of user k do not depend on the number of users.

        Raise `UserError` if they would not fit in memory, or the partition does not fit them.
        """
        if (values := self.clients * self.samples * self.features) > MOST_VALUES:
            raise UserError(
                f"least_squares: {self.clients} clients with {self.samples} samples of {self.features} features have "
                f"{values} values, but at most {MOST_VALUES} are allowed; lower one of them"
            )
        centre = generator(self.seed or 0, "least squares").standard_normal(self.features)
        tested = max(1, round(TEST_SHARE * self.samples))
        drawn = [
            self._draw(generator(self.seed or 0, "least squares", client=1 + user), tested, centre)
            for user in range(self.clients)
        ]
        train, test = (
            Labelled(
                np.concatenate([features[part] for features, _ in drawn]).astype(np.float32),
                np.concatenate([targets[part] for _, targets in drawn]).astype(np.float32)[:, None],
            )
            for part in (slice(tested, None), slice(tested))
        )
        users, test_users = (np.repeat(np.arange(self.clients), count) for count in (self.samples, tested))
        return self._dealt(self.kind, "drawn", 0, train, test, clients=self.clients, users=users, test_users=test_users)

    def _draw(self, random: np.random.Generator, tested: int, centre: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return one user's features [n, features] and targets [n], those of the test set first."""
        solution = centre + self.heterogeneity * random.standard_normal(self.features)
        scales = np.exp(self.scale_spread * random.standard_normal(self.features))
        features = scales * random.standard_normal((tested + self.samples, self.features))
        return features, features @ solution + self.noise * random.standard_normal(len(features))


MOST_EDGES, MOST_FEATURE_VALUES = 5 * 10**7, 5 * 10**8


class BlockModel(GraphSource):
    """Nodes in blocks of equal size, which are joined more often within a block; the block is the class.

    Every node has `degree` edges on average, of which the share `within` stays in its block. Features are normal around
    a mean of the block, which is itself normal with the standard deviation `separation`.

    Reference: Holland, Laskey and Leinhardt, Stochastic Blockmodels: First Steps, Social Networks 1983. Differs from
    it: 1. the numbers of edges within and between blocks are not drawn, but those expected, before edges that are drawn
    twice count once.
    """

    kind: Literal["block_model"] = "block_model"
    row_normalised: bool = Field(False, description="divide the features of a node by their sum, if that is not 0")
    nodes: int = Field(1000, ge=10, le=10**7, description="number of nodes")
    blocks: int = Field(5, ge=2, le=1000, description="number of blocks, which are the classes")
    degree: float = Field(10.0, ge=0, le=1000, allow_inf_nan=False, description="mean number of edges of a node")
    within: float = Field(0.8, ge=0, le=1, description="share of the edges whose ends are in one block")
    features: int = Field(32, ge=1, le=10**5, description="number of features")
    separation: float = Field(0.3, ge=0, le=1e3, description="standard deviation of the blocks' means, of a feature")
    train_share: float = Field(0.1, gt=0, le=0.8, description="share of the nodes for training")
    held_out_share: float = Field(0.1, gt=0, le=0.4, description="share for validation, and the same for testing")

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.train_share + 2 * self.held_out_share > 1:
            raise ValueError("train_share and twice held_out_share are more than all nodes; lower one")
        if self.blocks > self.nodes // 2:
            raise ValueError(f"{self.blocks} blocks of {self.nodes} nodes have less than two each; lower blocks")
        return self

    def load(self) -> NodeGraph:
        """Draw the graph; raise `UserError` if it would not fit in memory."""
        n_edges = round(self.nodes * self.degree / 2)
        if n_edges > MOST_EDGES or self.nodes * self.features > MOST_FEATURE_VALUES:
            raise UserError(
                f"block_model: {n_edges} edges and {self.nodes * self.features} features, but at most {MOST_EDGES} and "
                f"{MOST_FEATURE_VALUES} are allowed; lower nodes, degree or features"
            )
        random = generator(self.seed or 0, "block model")
        blocks = np.arange(self.nodes) * self.blocks // self.nodes
        means = self.separation * random.standard_normal((self.blocks, self.features))
        features = (means[blocks] + random.standard_normal((self.nodes, self.features))).astype(np.float32)
        edges = self._edges(n_edges, blocks, random)
        ends = np.cumsum([round(share * self.nodes) for share in (self.train_share, *[self.held_out_share] * 2)])
        parts = np.split(random.permutation(self.nodes), ends)[:3]
        splits = dict(zip(("train", "validation", "test"), map(np.sort, parts), strict=True))
        return self._graph(self.kind, "drawn", features, edges, blocks, self.blocks, splits)

    def _edges(self, n_edges: int, blocks: IntArray, random: np.random.Generator) -> IntArray:
        """Return the drawn edges [k, 2]; the second end is anywhere in a block that is the first one's or another."""
        first = random.integers(0, self.nodes, n_edges)
        shift = random.integers(1, self.blocks, n_edges)
        stays = np.arange(n_edges) < round(self.within * n_edges)
        block = (blocks[first] + np.where(stays, 0, shift)) % self.blocks
        starts = np.searchsorted(blocks, np.arange(self.blocks + 1))
        second = starts[block] + (random.random(n_edges) * np.diff(starts)[block]).astype(np.int64)
        return np.stack([first, second], axis=1)
