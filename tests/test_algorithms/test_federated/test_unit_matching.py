"""The matching of units: brute force, a plain reference, permutations that are undone, and the fields of the code."""

from __future__ import annotations

from itertools import permutations
from math import log
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.unit_matching import (
    LayerRows,
    Matching,
    UnitPrior,
    best_assignment,
    joined_head,
    match_units,
)
from narrowcast.laws.small_tasks import samples, windows
from narrowcast.platform.models.networks import CNN, MLP, VGG9, CharLSTM

RANDOM = np.random.default_rng


def by_trying_all(gains: np.ndarray) -> tuple[int, ...]:
    """The columns of the largest sum, found by trying every way to choose them."""
    columns = permutations(range(gains.shape[1]), len(gains))
    return max(columns, key=lambda each: sum(gains[row, column] for row, column in enumerate(each)))


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (3, 3), (3, 6), (4, 5)])
def test_the_assignment_is_the_best_of_all(shape: tuple[int, int]) -> None:
    for seed in range(10):
        gains = RANDOM(seed).standard_normal(shape)
        assert tuple(best_assignment(gains)) == by_trying_all(gains)


class Plain:
    """The matching as its paper and code write it: one number at a time, assignments by trying all."""

    def __init__(self, clients: list[np.ndarray], prior: UnitPrior) -> None:
        self.clients, self.prior, self.owned = clients, prior, dict[int, list[int]]()
        self.atoms: list[set[int]] = []

    def run(self, random: np.random.Generator) -> list[np.ndarray]:
        order = sorted(range(len(self.clients)), key=lambda client: -len(self.clients[client]))
        for client in order:
            self.match(client)
        for _ in range(self.prior.sweeps):
            for client in random.permutation(len(self.clients)).tolist():
                self.take_out(client)
                self.match(client)
        return [self.mean(atom) for atom in range(len(self.atoms))]

    def take_out(self, client: int) -> None:
        self.owned.pop(client)
        for atom in self.atoms:
            atom.discard(client)
        kept = [place for place, atom in enumerate(self.atoms) if atom]
        self.atoms = [self.atoms[place] for place in kept]
        self.owned = {each: [kept.index(place) for place in places] for each, places in self.owned.items()}

    def match(self, client: int) -> None:
        own, prior, n_clients, before = self.clients[client], self.prior, len(self.clients), len(self.atoms)
        n_new = max(min(len(own), max(prior.most_units - before, 1)), len(own) - before)
        gains = np.zeros((len(own), before + n_new))
        s, s0 = 1 / prior.sigma, 1 / prior.sigma_prior
        for row, unit in enumerate(own):
            for atom in range(before):
                weighted, precision = self.weighted(atom), s0 + s * len(self.atoms[atom])
                popular = min(len(self.atoms[atom]), 10)
                gains[row, atom] = sum((s * w + g) ** 2 for w, g in zip(unit, weighted, strict=True)) / (s + precision)
                gains[row, atom] -= sum(g**2 for g in weighted) / precision
                gains[row, atom] += prior.popularity_factor * log(popular / (n_clients - popular))
            for k in range(n_new):
                joined = sum((s * w + s0 * m) ** 2 for w, m in zip(unit, prior.mean, strict=True)) / (s0 + s)
                rest = sum((s0 * m) ** 2 for m in prior.mean) / s0
                gains[row, before + k] = joined - rest - 2 * log(k + 1) + 2 * log(prior.gamma / n_clients)
        columns = list(by_trying_all(gains))
        new = sorted(row for row, column in enumerate(columns) if column >= before)
        for place, row in enumerate(new):
            columns[row] = before + place
            self.atoms.append(set())
        for column in columns:
            self.atoms[column].add(client)
        self.owned[client] = columns

    def weighted(self, atom: int) -> np.ndarray:
        total = self.prior.mean / self.prior.sigma_prior
        for client in self.atoms[atom]:
            total = total + self.clients[client][self.owned[client].index(atom)] / self.prior.sigma
        return total

    def mean(self, atom: int) -> np.ndarray:
        mean: np.ndarray = self.weighted(atom) / (1 / self.prior.sigma_prior + len(self.atoms[atom]) / self.prior.sigma)
        return mean


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sigma": 0.5, "sigma_prior": 4.0, "gamma": 1.0},
        {"popularity_factor": 2, "sweeps": 2},
        {"gamma": 1e-3},
        {"most_units": 4, "gamma": 100.0},
    ],
)
def test_it_is_the_plain_matching(fields: dict[str, Any]) -> None:
    sizes = (3, 2, 3, 3)
    for seed in range(4):
        random = RANDOM(seed)
        shared = 2 * random.standard_normal((5, 4))
        clients = [shared[random.permutation(5)[:size]] + 0.3 * random.standard_normal((size, 4)) for size in sizes]
        prior = UnitPrior(np.array([0, 0, 0, 0.1]), **fields)
        matched, plain = match_units(clients, prior, RANDOM(7)), Plain(clients, prior)
        wanted = plain.run(RANDOM(7))
        assert np.allclose(matched.means, wanted, rtol=1e-12, atol=1e-12)
        assert [units.tolist() for units in matched.units] == [plain.owned[client] for client in range(len(clients))]
        assert matched.owners.tolist() == [len(atom) for atom in plain.atoms]
        assert max(sizes) <= len(matched.means) <= sum(sizes)


def test_one_client_is_matched_with_itself() -> None:
    own = RANDOM(0).standard_normal((4, 3))
    matched = match_units([own], UnitPrior(np.zeros(3), gamma=1.0), RANDOM(0))
    assert matched.units[0].tolist() == list(range(4))
    assert np.array_equal(matched.sums, own)
    assert np.allclose(matched.means, own / 2)


@pytest.mark.parametrize("copies", [2, 3, 12])
def test_permuted_copies_are_one_network_up_to_the_shrinkage(copies: int) -> None:
    unit = 3 * RANDOM(0).standard_normal((6, 10))
    orders = [RANDOM(seed + 1).permutation(6) for seed in range(copies)]
    matched = match_units([unit[order] for order in orders], UnitPrior(np.full(10, 0.1)), RANDOM(0))
    assert len(matched.means) == 6
    assert (matched.owners == copies).all()
    for order, units in zip(orders, matched.units, strict=True):
        assert np.allclose(matched.means[units], (copies * unit[order] + 0.1) / (copies + 1))
        assert np.allclose(matched.sums[units] / copies, unit[order])


def test_a_larger_prior_variance_makes_more_units_and_units_never_go_above_the_cap() -> None:
    clients = [RANDOM(seed).standard_normal((8, 20)) for seed in range(4)]
    sizes = [len(match_units(clients, UnitPrior(np.zeros(20), sigma_prior=s), RANDOM(0)).means) for s in (1.0, 10.0)]
    assert sizes[0] <= sizes[1]
    free, capped = (match_units(clients, UnitPrior(np.zeros(20), gamma=1e6, most_units=n), RANDOM(0)) for n in (99, 10))
    assert len(free.means) == 32
    assert 8 <= len(capped.means) <= 10 + len(clients)


# Layers of networks

IMAGES, TEXT = samples(np.array([9, 4])), windows(np.array([9, 4]))
NETWORKS: dict[str, Any] = {
    "mlp": (MLP(hidden=(7, 5), dtype="float64"), IMAGES),
    "cnn": (CNN(channels=(4, 3), hidden=6, dtype="float64"), IMAGES),
    "vgg9": (VGG9(dtype="float64"), IMAGES),
    "lstm": (CharLSTM(embedding_dim=3, hidden=5, layers=1, dtype="float64"), TEXT),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_order_of_units_does_not_change_the_network(name: str) -> None:
    model, data = NETWORKS[name]
    hidden, server = model.matched_units(data), model.init_server(data, 0)
    assert hidden.counts_in(server) == hidden.counts
    units = tuple(RANDOM(layer).permutation(count) for layer, count in enumerate(hidden.counts))
    shuffled = hidden.take(server, units)
    before, after = (model.evaluate(each, {}, data, "test") for each in (server, shuffled))
    assert after["loss"] == pytest.approx(before["loss"], abs=1e-6, rel=0)
    assert all(np.array_equal(hidden.put(each, shuffled[each], units), values) for each, values in server.items())


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_of_units_are_their_weights_and_biases(name: str) -> None:
    model, data = NETWORKS[name]
    hidden, server = model.matched_units(data), model.init_server(data, 0)
    taken = list[str](hidden.outputs)
    for layer, count in enumerate(hidden.counts):
        layer_rows = LayerRows(hidden, layer)
        rows = layer_rows.rows(server)
        assert len(rows) == count
        again = layer_rows.tensors(rows, server)
        assert set(again) | set(layer_rows.recurrent) == set(layer_rows.names)
        assert all(np.array_equal(again[each], server[each]) for each in again)
        order = RANDOM(layer).permutation(count)
        units = [np.arange(each) for each in hidden.counts]
        units[layer] = order
        assert np.array_equal(layer_rows.rows(hidden.take(server, tuple(units))), rows[order])
        biases = [server[each] for each in layer_rows.names if server[each].ndim == 1]
        n_biases = sum(each.size for each in biases) // count
        if biases:
            assert np.array_equal(np.sort(rows[:, -n_biases:].ravel()), np.sort(np.concatenate(biases)))
        ends = [layer_rows.prior_mean(server, 0.1, on_first_weights=first) for first in (False, True)]
        assert ends[0].tolist() == ends[1][::-1].tolist() == [0.0] * (rows.shape[1] - n_biases) + [0.1] * n_biases
        taken += layer_rows.names
    assert sorted(taken) == sorted(server)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
@pytest.mark.parametrize("unit_mean", ["owners", "posterior"])
def test_permuted_networks_are_joined_to_the_function_of_one(name: str, unit_mean: Any) -> None:
    """Layer by layer, the inputs of each permuted copy put in the places of their global units."""
    model, data = NETWORKS[name]
    hidden, server = model.matched_units(data), model.init_server(data, 0)
    server = {each: 30 * values for each, values in server.items()}  # far apart, so that no two units are alike
    orders = [tuple(RANDOM(10 * c + n).permutation(k) for n, k in enumerate(hidden.counts)) for c in range(3)]
    clients = [hidden.take(server, order) for order in orders]
    joined, places = dict[str, Any](), list[Any]()
    for layer in range(len(hidden.counts)):
        inputs = [
            tuple(places[n][c] if n < layer else np.arange(k) for n, k in enumerate(hidden.counts)) for c in range(3)
        ]
        names = LayerRows(hidden, layer).names
        own = [
            {each: hidden.put(each, client[each], units) for each in names}
            for client, units in zip(clients, inputs, strict=True)
        ]
        matching = Matching(unit_mean=unit_mean, bias_mean=0.0)
        layer_of_all, units = matching.join(hidden, layer, own, np.ones(3), server, RANDOM(0))
        for place, order in zip(units, orders, strict=True):
            assert orders[0][layer][place].tolist() == order[layer].tolist()
        for each, values in layer_of_all.items():
            shrunk = 0.75 if unit_mean == "posterior" and each not in LayerRows(hidden, layer).recurrent else 1.0
            assert np.allclose(values, shrunk * clients[0][each], rtol=1e-12, atol=1e-12)
        joined |= layer_of_all
        places.append(units)
    assert set(joined) == set(server) - set(hidden.outputs)


def test_weights_between_units_are_averaged_over_who_has_the_reader_or_over_all() -> None:
    model, data = NETWORKS["lstm"]
    layer_rows = LayerRows(model.matched_units(data), 1)
    clients = [model.init_server(data, seed) for seed in range(2)]
    units, name = (np.array([0, 1, 2, 3, 4]), np.array([6, 5, 4, 3, 0])), "lstm.weight_hh_l0"
    total, owners = np.zeros((4, 7, 7)), np.array([2, 1, 1, 2, 2, 1, 1])
    for client, own in zip(clients, units, strict=True):
        for gate, row, column in np.ndindex(4, 5, 5):
            total[gate, own[row], own[column]] += client[name].reshape(4, 5, 5)[gate, row, column]
    by_owners, by_all = (
        layer_rows.recurrent_means(clients, units, owners, divisor)[name] for divisor in ("owners", "clients")
    )
    assert np.allclose(by_owners.reshape(4, 7, 7), total / owners[:, None])
    assert np.allclose(by_all.reshape(4, 7, 7), total / 2)


def test_the_prior_of_biases_may_be_at_the_first_weight_as_in_the_code() -> None:
    model, data = NETWORKS["mlp"]
    hidden = model.matched_units(data)
    one = [model.init_server(data, 0)]
    zeros = [{name: np.zeros_like(values) for name, values in each.items()} for each in one]
    for layer, (weight, bias) in enumerate((("1.weight", "1.bias"), ("3.weight", "3.bias"))):
        right, code = (
            Matching(bias_prior=where).join(hidden, layer, zeros, np.ones(1), one[0], RANDOM(0))[0]
            for where in ("bias", "first_weight")
        )
        assert np.allclose(right[bias], 0.05)
        assert not right[weight].any()
        assert np.allclose(code[bias], 0.05 if layer == 0 else 0)
        assert np.allclose(code[weight][:, 0], 0 if layer == 0 else 0.05)


def test_the_last_layer_is_a_mean_by_class() -> None:
    random = RANDOM(0)
    clients = [{"w": random.standard_normal((3, 4)), "b": random.standard_normal(3)} for _ in range(2)]
    examples, classes = np.array([6.0, 2.0]), np.array([[6.0, 0, 0], [1, 1, 0]])
    shares = [[6 / 7, 1 / 7], [0, 1], [6 / 8, 2 / 8]]  # the third class is nobody's
    joined = joined_head(["w", "b"], clients, examples, classes)
    for name, values in joined.items():
        wanted = [a * clients[0][name][c] + b * clients[1][name][c] for c, (a, b) in enumerate(shares)]
        assert np.allclose(values, wanted)
    plain = joined_head(["w", "b"], clients, examples, None)
    assert np.allclose(plain["w"], 0.75 * clients[0]["w"] + 0.25 * clients[1]["w"])


@pytest.mark.parametrize(("units", "same"), [("by_index", False), ("untrained", True)])
def test_the_controls_keep_the_order_of_units(units: Any, same: bool) -> None:
    model, data = NETWORKS["mlp"]
    hidden, untrained = model.matched_units(data), model.init_server(data, 9)
    clients = [model.init_server(data, seed) for seed in range(3)]
    layer, places = Matching(units=units).join(hidden, 0, clients, np.array([1.0, 2, 5]), untrained, RANDOM(0))
    assert all(place.tolist() == list(range(7)) for place in places)
    mean = (clients[0]["1.weight"] + 2 * clients[1]["1.weight"] + 5 * clients[2]["1.weight"]) / 8
    assert np.allclose(layer["1.weight"], untrained["1.weight"] if same else mean)
