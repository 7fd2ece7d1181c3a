"""The methods of the comparison, what is tuned of each, and the search that tunes it.

Every number that a method has is searched on validation images of the clients, with seeds that are not test seeds: from
a start to the neighbours on the ladder of each number, until no neighbour is better. So no best value is at the edge of
what was tried, unless it is one that has nothing beyond it, such as a share of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from string import Template

from narrowcast.studies.execution import Plan, Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tuning import TUNING_SEED, searched

STUDY = "personal-fashion"
METRIC = "accuracy.mean"
CLIENTS, COHORT, ROUNDS = 40, 10, 100
TEST_SEEDS, TUNING_SEEDS = 5, 3
Values = Mapping[str, float]
Point = tuple[float, ...]
"""The value of each number that is tuned of a method."""


def doubling(first: float, steps: int) -> tuple[float, ...]:
    """Return so many values, each twice the one before."""
    return tuple(first * 2**step for step in range(steps))


RATES, EPOCHS, PULLS = doubling(0.0125, 9), doubling(1, 8), (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Split:
    """Clients by the concentration of their classes and their training images, with the batches of a round."""

    alpha: float
    images: int
    batch_size: int
    epochs: int

    @property
    def name(self) -> str:
        """The split in words."""
        return f"Dirichlet {self.alpha:g}, {self.images} images"


SPLITS = (Split(0.3, 20, 10, 2), Split(0.3, 100, 20, 1))
"""A client takes four steps of ten images in a round, or five of twenty."""


@dataclass(frozen=True)
class Method:
    """An algorithm's fields, with the ladder of each number that is tuned and where its search starts.

    `gradients` of every image in a local epoch, `adapts` the images whose gradients a client computes before it is
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
        around = []
        for place, (value, ladder) in enumerate(zip(point, self.ladders.values(), strict=True)):
            index = ladder.index(value)
            for other in ladder[max(0, index - 1) : index] + ladder[index + 1 : index + 2]:
                moved = (*point[:place], other, *point[place + 1 :])
                if _stable(dict(zip(self.ladders, moved, strict=True))):
                    around.append(moved)
        return tuple(around)


def _stable(values: Values) -> bool:
    """Return whether pFedMe's personal model may take these steps, which others have not."""
    return values.get("personal_rate", 0.0) * values.get("pull", 0.0) < 2


ALONE, FEDAVG, TUNED = "training alone", "FedAvg", "FedAvg, fine-tuned"
OWN_RATE = "FedAvg, fine-tuned at its own rate"
_RATE: Mapping[str, tuple[float, ...]] = {"rate": RATES}
_CONTROLS = {
    TUNED: Method(
        "{kind: fine_tune, fine_tune_epochs: $fine_tune}",
        {**_RATE, "fine_tune": EPOCHS},
        (0.1, 8),
        adapts=lambda values, split: split.images * values["fine_tune"],
    ),
    ALONE: Method("local", _RATE, (0.1,)),
    FEDAVG: Method("fedavg", _RATE, (0.1,)),
}
_DITTO = {"Ditto": Method("{kind: ditto, pull: $pull}", {**_RATE, "pull": PULLS}, (0.1, 0.1), gradients=2)}
_WHOLE = {
    **_CONTROLS,
    OWN_RATE: Method(
        "{kind: fine_tune, fine_tune_epochs: $fine_tune, fine_tune_rate: $fine_tune_rate}",
        {**_RATE, "fine_tune_rate": doubling(0.003125, 11), "fine_tune": doubling(1, 10)},
        (0.1, 0.1, 8),
        adapts=lambda values, split: split.images * values["fine_tune"],
    ),
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
}
"""The model and the methods; a single layer has no body and head, so that methods that split a network have another."""
GROUPS = ((SPLITS[0], "softmax"), (SPLITS[0], "perceptron"), (SPLITS[1], "softmax"))
"""The split and the model of the cells that are compared with one another."""


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
        """Return the gradients of single images that a run computes."""
        values, split = self.values(point), self.split
        training = ROUNDS * COHORT * split.images * values["epochs"] * self.method.gradients
        return training + CLIENTS * self.method.adapts(values, split)

    def tuning(self, point: Point) -> RunSpec:
        """Return the run on validation images at a point."""
        return self._spec(point, "-tuning", ROUNDS, first_seed=TUNING_SEED)

    def test(self, point: Point) -> RunSpec:
        """Return the run on test images at a point."""
        curve = self.model != "softmax"
        return self._spec(point, "", ROUNDS // 10 if curve else ROUNDS, curve=curve)

    def searched(self, rows: Rows) -> tuple[Point | None, list[Point]]:
        """Return the best point, None while the search is not finished; and all that was tried or is next."""
        method = self.method
        return searched(rows, method.start, method.neighbours, self.tuning, f"validation.{METRIC}", TUNING_SEEDS)

    def _spec(
        self, point: Point, part: str, evaluate_every: int, *, first_seed: int = 0, curve: bool = False
    ) -> RunSpec:
        split, numbers = self.split, {name: f"{value:g}" for name, value in self.values(point).items()}
        own = "-".join(f"{value:g}" for value in point)
        return RunSpec(
            f"{STUDY}-{split.alpha:g}-{split.images}-{self.model}-{slug(self.name)}{part}-{own}",
            "fedavg-digits",
            (
                f"rounds={ROUNDS}",
                f"evaluate_every={evaluate_every}",
                f"clients_per_round={COHORT}",
                f"chunk_size={CLIENTS}",
                "checkpoint_seconds=100000",
                "evaluate_clients=[validation, test]",
                f"data={{kind: narrowcast_papers.personal.clients:MixedClients, alpha: {split.alpha:g}, "
                f"images: {split.images}}}",
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
    return [Cell(split, model, name) for name in MODELS[model][1]]


def plan_of(split: Split, model: str) -> Plan:
    """Return the plan of a split and a model: the search of each cell, then its tests."""

    def plan(rows: Rows) -> Iterator[Planned]:
        for cell in cells(split, model):
            best, tried = cell.searched(rows)
            for spec in map(cell.tuning, tried):
                for seed in spec.seeds(TUNING_SEEDS):
                    yield Planned(STUDY, spec, seed, test=False)
            if best is not None:
                for seed in range(TEST_SEEDS):
                    yield Planned(STUDY, cell.test(best), seed)

    return plan
