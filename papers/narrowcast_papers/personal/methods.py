"""The methods of the comparison, what is tuned of each, and the search that tunes it.

Every number that a method has is searched on validation samples of the clients, with seeds that are not test seeds:
from a start to the neighbours on the ladder of each number, until no neighbour is better. So no best value is at the
edge of what was tried, unless it is one that has nothing beyond it, such as a share of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from string import Template

from narrowcast.studies.execution import Plan, Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tuning import TUNING_SEED, Point, one_step_away, searched

FASHION, WATCH, MOVIELENS = "personal-fashion", "personal-watch", "personal-movielens"
METRIC = "accuracy.mean"
TEST_SEEDS, TUNING_SEEDS = 5, 3
Values = Mapping[str, float]

SHARED_BASIS = {rank: f"SCoLR of rank {rank}, fine-tuned at its own rate" for rank in (2, 8)}
QUANTISED = "Quantised FedAvg, fine-tuned"
"""Methods that send all of the model in fewer bits."""


def doubling(first: float, steps: int) -> tuple[float, ...]:
    """Return so many values, each twice the one before."""
    return tuple(first * 2**step for step in range(steps))


RATES, EPOCHS, PULLS = doubling(0.0125, 13), doubling(1, 10), (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Split:
    """Clients of a study, by their data, with the rounds, the clients and the batches of a round.

    `key` names the split in labels of runs, `name` in words. `samples` are those that a client trains on, or their mean
    number over clients. `budgets`: megabytes of both directions at which methods that share a part are compared.
    `left_out` are methods that were not run on it. The search of every method starts from `rate`.
    """

    study: str
    key: str
    name: str
    data: str
    samples: float
    batch_size: int
    epochs: int
    clients: int = 40
    cohort: int = 10
    rounds: int = 100
    budgets: tuple[float, ...] = ()
    left_out: frozenset[str] = frozenset()
    rate: float = 0.1


def mixed(alpha: float, images: int, batch_size: int, epochs: int) -> Split:
    """Return the split of Fashion-MNIST by the concentration of a client's classes and its images."""
    data = f"{{kind: narrowcast_papers.personal.clients:MixedClients, alpha: {alpha:g}, images: {images}}}"
    name, key = f"Dirichlet {alpha:g}, {images} images", f"{alpha:g}-{images}"
    return Split(FASHION, key, name, data, images, batch_size, epochs, budgets=(20.0, 40.0, 100.0, 200.0))


SPLITS = (
    mixed(0.3, 20, 10, 2),
    mixed(0.3, 100, 20, 1),
    mixed(1.0, 20, 10, 2),
)
"""A client takes four steps of ten images in a round, or five of twenty."""
SUBJECTS = Split(
    WATCH,
    "subjects",
    "ten subjects",
    "{kind: watch-exercises, validation_share: 0.2}",
    samples=291.1,
    batch_size=20,
    epochs=1,
    clients=10,
    cohort=10,
    rounds=40,
    left_out=frozenset({"FedPer", "LG-FedAvg", *SHARED_BASIS.values(), QUANTISED}),
)
"""The subjects of recordings with a watch, each of whom takes part in every round: 10 to 18 steps of twenty windows."""
USERS = Split(
    MOVIELENS,
    "users",
    "200 users",
    "{kind: rated_items, liked_from: 4, clients: 200, validation_share: 0.2, "
    "ratings: {set: ml-100k, top_items: 300, min_ratings: 40}}",
    samples=61.9,
    batch_size=50,
    epochs=4,
    clients=200,
    cohort=40,
    rounds=60,
    left_out=frozenset({"LG-FedAvg", *SHARED_BASIS.values(), QUANTISED}),
    rate=6.4,
)
"""Users of MovieLens 100K with 40 ratings or more of the 300 films with the most; they are others with each seed."""


@dataclass(frozen=True)
class Method:
    """An algorithm's fields, with the ladder of each number that is tuned and where its search starts.

    `gradients` of every sample in a local epoch, `adapts` the samples whose gradients a client computes before it is
    measured, by the tuned values. `derived` adds values that follow from the tuned ones.
    """

    algorithm: str
    ladders: Mapping[str, tuple[float, ...]]
    start: tuple[float, ...]
    gradients: int = 1
    adapts: Callable[[Values, Split], float] = lambda _values, _split: 0.0
    derived: Callable[[Values], Values] = field(default=lambda _values: {})

    def neighbours(self, point: Point) -> tuple[Point, ...]:
        """Return the points with one value one step down or up its ladder."""
        around = one_step_away(point, tuple(self.ladders.values()))
        return tuple(moved for moved in around if _stable(dict(zip(self.ladders, moved, strict=True))))


def _stable(values: Values) -> bool:
    """Return whether pFedMe's personal model may take these steps, which others have not."""
    return values.get("personal_rate", 0.0) * values.get("pull", 0.0) < 2


ALONE, FEDAVG, TUNED = "training alone", "FedAvg", "FedAvg, fine-tuned"
OWN_RATE = "FedAvg, fine-tuned at its own rate"
_RATE: Mapping[str, tuple[float, ...]] = {"rate": RATES}
_FINE_TUNED: Mapping[str, tuple[float, ...]] = {
    **_RATE,
    "fine_tune_rate": doubling(0.003125, 15),
    "fine_tune": EPOCHS,
}


def _tuned_last(algorithm: str) -> Method:
    """Return a method whose clients fine-tune the global model at a rate of its own before they are measured."""
    return Method(
        f"{{{algorithm}, fine_tune_epochs: $fine_tune, fine_tune_rate: $fine_tune_rate}}",
        _FINE_TUNED,
        (0.1, 0.1, 8),
        adapts=lambda values, split: split.samples * values["fine_tune"],
    )


_CONTROLS = {
    TUNED: Method(
        "{kind: fine_tune, fine_tune_epochs: $fine_tune}",
        {**_RATE, "fine_tune": EPOCHS},
        (0.1, 8),
        adapts=lambda values, split: split.samples * values["fine_tune"],
    ),
    ALONE: Method("local", _RATE, (0.1,)),
    FEDAVG: Method("fedavg", _RATE, (0.1,)),
    OWN_RATE: _tuned_last("kind: fine_tune"),
}
_DITTO = {"Ditto": Method("{kind: ditto, pull: $pull}", {**_RATE, "pull": PULLS}, (0.1, 0.1), gradients=2)}
_WHOLE = {
    **_CONTROLS,
    **_DITTO,
    "APFL": Method("{kind: apfl, alpha: $share}", {**_RATE, "share": SHARES}, (0.1, 0.5), gradients=2),
    "pFedMe": Method(
        "{kind: pfedme, pull: $pull, personal_rate: $personal_rate, inner_steps: 5}",
        {"move": doubling(0.05, 6), "personal_rate": RATES, "pull": PULLS[1:]},
        (0.4, 0.1, 0.3),
        gradients=5,
        derived=lambda values: {"rate": values["move"] / values["pull"]},
    ),
    "Per-FedAvg": Method(
        "{kind: per_fedavg, alpha: $alpha}",
        {**_RATE, "alpha": doubling(0.0025, 9)},
        (0.1, 0.02),
        adapts=lambda _, split: split.batch_size,
    ),
    "Per-FedAvg, more steps": Method(
        "{kind: per_fedavg, alpha: $alpha, steps: $steps}",
        {**_RATE, "alpha": doubling(0.0025, 9), "steps": EPOCHS},
        (0.1, 0.02, 8),
        adapts=lambda values, split: split.batch_size * values["steps"],
    ),
}
_PARTS = {
    **_CONTROLS,
    **_DITTO,
    **{
        name: _tuned_last(f"kind: narrowcast_papers.personal.low_rank:FineTunedSCoLR, rank: {rank}")
        for rank, name in SHARED_BASIS.items()
    },
    QUANTISED: _tuned_last("kind: fine_tune, codec: [{kind: quantise, levels: 7}], download: {step: 0.01}"),
    "FedPer": Method("{kind: partial, kept: head}", _RATE, (0.1,)),
    "FedRep": Method(
        "{kind: partial, kept: head, phases: [{trained: head, epochs: $head_epochs}, {trained: body}]}",
        {**_RATE, "head_epochs": EPOCHS},
        (0.1, 2),
        derived=lambda values: {"epochs": values["head_epochs"] + 1},
    ),
    "LG-FedAvg": Method("{kind: partial, kept: body, weights: equal}", _RATE, (0.1,)),
}
MODELS: Mapping[str, tuple[str, Mapping[str, Method]]] = {
    "softmax": ("softmax", _WHOLE),
    "perceptron": ("{kind: mlp, hidden: [32]}", _PARTS),
    "item embedding": ("item_embedding", _PARTS),
}
"""The model and the methods; a single layer has no body and head, so that methods that split a network have another."""
GROUPS = (
    *((split, "softmax") for split in SPLITS),
    (SPLITS[0], "perceptron"),
)
"""The split and the model of the cells of Fashion-MNIST that are compared with one another."""
WATCH_GROUPS = ((SUBJECTS, "perceptron"),)
"""The same of the recordings with a watch."""
USERS_GROUPS = ((USERS, "item embedding"),)
"""The same of the users of MovieLens."""


@dataclass(frozen=True)
class Cell:
    """A method with a model on a split."""

    split: Split
    model: str
    name: str

    @property
    def method(self) -> Method:
        """The method."""
        return MODELS[self.model][1][self.name]

    def values(self, point: Point) -> dict[str, float]:
        """Return the values of a point by name, with those that follow."""
        tuned = dict(zip(self.method.ladders, point, strict=True))
        return {"epochs": self.split.epochs, **tuned, **self.method.derived(tuned)}

    def gradients(self, point: Point) -> float:
        """Return the gradients of single samples that a run computes."""
        values, split = self.values(point), self.split
        training = split.rounds * split.cohort * split.samples * values["epochs"] * self.method.gradients
        return training + split.clients * self.method.adapts(values, split)

    def tuning(self, point: Point) -> RunSpec:
        """Return the run on validation samples at a point."""
        return self._spec(point, "-tuning", first_seed=TUNING_SEED)

    def test(self, point: Point) -> RunSpec:
        """Return the run on test samples at a point."""
        return self._spec(point, "", curve=self.model != "softmax" and bool(self.split.budgets))

    def searched(self, rows: Rows) -> tuple[Point | None, list[Point]]:
        """Return the best point, None while the search is not finished; and all that was tried or is next."""
        method = self.method
        start = method.start if next(iter(method.ladders)) != "rate" else (self.split.rate, *method.start[1:])
        return searched(rows, start, method.neighbours, self.tuning, f"validation.{METRIC}", TUNING_SEEDS)

    def _spec(self, point: Point, part: str, *, first_seed: int = 0, curve: bool = False) -> RunSpec:
        split, numbers = self.split, {name: f"{value:g}" for name, value in self.values(point).items()}
        own = "-".join(f"{value:g}" for value in point)
        return RunSpec(
            f"{split.study}-{split.key}-{slug(self.model)}-{slug(self.name)}{part}-{own}",
            "fedavg-digits",
            (
                f"rounds={split.rounds}",
                f"evaluate_every={split.rounds // 10 if curve else split.rounds}",
                f"clients_per_round={split.cohort}",
                f"chunk_size={split.clients}",
                "checkpoint_seconds=100000",
                "evaluate_clients=[validation, test]",
                f"data={split.data}",
                f"model={MODELS[self.model][0]}",
                f"algorithm={Template(self.method.algorithm).substitute(numbers)}",
                f"training={{learning_rate: {numbers['rate']}, batch_size: {split.batch_size}, "
                f"epochs: {numbers['epochs']}}}",
            ),
            first_seed=first_seed,
            data_seed=True,
            curve=curve,
        )


def cells(split: Split, model: str) -> list[Cell]:
    """Return the cells of a split and a model, the reference first."""
    return [Cell(split, model, name) for name in MODELS[model][1] if name not in split.left_out]


def plan_of(split: Split, model: str) -> Plan:
    """Return the plan of a split and a model: the search of each cell, then its tests."""

    def plan(rows: Rows) -> Iterator[Planned]:
        for cell in cells(split, model):
            best, tried = cell.searched(rows)
            for spec in map(cell.tuning, tried):
                for seed in spec.seeds(TUNING_SEEDS):
                    yield Planned(split.study, spec, seed, test=False)
            if best is not None:
                for seed in range(TEST_SEEDS):
                    yield Planned(split.study, cell.test(best), seed)

    return plan
