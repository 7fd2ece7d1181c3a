"""Rates of links between clients: how long a round takes, who waits for whom, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digits import digits, make_task
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.gossip import Gossip
from narrowcast.algorithms.federated.topology import Topology, mixing
from narrowcast.experiment import load_experiment
from narrowcast.platform.config.catalog import ALGORITHMS, TOPOLOGIES
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from running import local

TASK = make_task(digits([20, 12, 9, 16, 8]), MLP(hidden=(6,)))
RATES = {(0, 1): 0.03, (1, 2): 0.5, (2, 3): 0.08, (3, 0): 2.0, (1, 3): 0.2, (3, 4): 0.01}
"""Mbit/s of the links of five clients."""


def topology(kind: str, **fields: Any) -> Topology:
    value: Topology = TOPOLOGIES[kind].model_validate({"kind": kind, **fields})
    return value


def algorithm(kind: str, **fields: Any) -> Gossip:
    value: Gossip = ALGORITHMS[kind].model_validate({"kind": kind, **fields})
    return value


@pytest.fixture
def listed(tmp_path: Path) -> Mapping[str, Any]:
    path = tmp_path / "links.csv"
    lines = [f"{first},{second},{rate}" for (first, second), rate in RATES.items()]
    path.write_text("\n".join(["client,neighbour,mbit_per_second", *lines, "4,7,9", ""]))
    return {"kind": "edge_list", "path": path}


@pytest.mark.parametrize("transmission", ["broadcast", "unicast"])
@pytest.mark.parametrize("kind", ["d_psgd", "choco_sgd", "push_sum"])
def test_a_round_lasts_until_the_slowest_link_has_carried_its_message(
    kind: str, transmission: str, listed: Mapping[str, Any]
) -> None:
    method = algorithm(kind, topology=listed, transmission=transmission)
    model_bits = FedAvg().broadcast(FedAvg().init(TASK), TASK, 1).full.wire_bits()
    message_bits = model_bits + (32 if kind == "push_sum" else 0)
    downlink, speed = TASK.profiles.downlink_bits_per_second, TASK.profiles.compute_speed
    known, now = set[int](), 0.0
    for outcome in rounds(Run(plan := Plan(rounds=4, clients_per_round=3), method, TASK), local(method, TASK)):
        ledger, slowest = outcome.ledger, []
        for client, bits, seconds in zip(ledger.client.tolist(), ledger.uplink_bits, ledger.seconds, strict=True):
            rates = [1e6 * rate for link, rate in RATES.items() if client in link]
            assert bits == message_bits * (len(rates) if transmission == "unicast" else 1)
            trained = plan.clock.compute_slowdown * plan.clock.seconds_per_example * TASK.data.examples[client]
            first = 0 if client in known else model_bits / downlink[client]
            slowest.append(first + trained / speed[client] + max(message_bits / rate for rate in rates))
            assert seconds == pytest.approx(slowest[-1])
            known.add(client)
        now += max(slowest)
        assert outcome.record.simulated_seconds == pytest.approx(now)
    assert known == set(range(5)), "a newcomer of a later round downloads the first model too"


def test_rates_change_the_time_alone(listed: Mapping[str, Any], tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("\n".join(["client,neighbour", *(f"{first},{second}" for first, second in RATES), ""]))
    ends = []
    for given in (
        listed,
        {"kind": "edge_list", "path": plain},
        {"kind": "unequal", "topology": {**listed, "path": plain}},
    ):
        method = algorithm("d_psgd", topology=given)
        *_, end = rounds(Run(Plan(rounds=3, clients_per_round=5), method, TASK), local(method, TASK))
        ends.append(end.record)
    same = [(end.total_uplink_bits, end.total_downlink_bits, end.loss, end.metrics) for end in ends]
    assert same[0] == same[1] == same[2]
    assert len({end.simulated_seconds for end in ends}) == 3


def test_a_rate_is_drawn_for_a_pair_whatever_else_there_is() -> None:
    given, pairs = topology("unequal", topology="complete"), np.column_stack(np.triu_indices(80, 1))
    rates = given.rates(pairs, 5)
    assert rates is not None
    assert np.array_equal(given.rates(pairs[::-7, ::-1], 5), rates[::-7])  # type: ignore[arg-type]
    logarithms = np.log(rates / 2e6)
    assert logarithms.mean() == pytest.approx(0, abs=4 / len(pairs) ** 0.5)
    assert logarithms.std() == pytest.approx(1, abs=4 / (2 * len(pairs)) ** 0.5)
    assert np.abs(np.corrcoef(logarithms[:-1], logarithms[1:])[0, 1]) < 4 / len(pairs) ** 0.5
    assert not np.intersect1d(rates, given.rates(pairs, 6)).size  # type: ignore[arg-type]


def test_clients_send_at_the_rate_of_the_slowest_of_their_own_links() -> None:
    forward = topology("unequal", topology={"kind": "ring", "direction": "forward"})
    rates = forward.rates(np.column_stack([np.arange(6), np.arange(1, 7) % 6]), 0)
    pushes = algorithm("push_sum", topology=forward, message_loss=0.9)
    task = make_task(digits([8] * 6))
    assert np.array_equal(pushes.sending_rates(task, np.arange(6), 2), rates)  # type: ignore[arg-type]
    matching = topology("intermittent", topology={"kind": "unequal", "topology": "random_matching"}, outage=0.3)
    up = matching.links(6, 3, 0)
    assert 0 < len(up) < 3
    slowest = mixing(matching, 6, 3, 0).slowest
    assert slowest is not None
    assert np.array_equal(slowest[up], np.repeat(matching.rates(up, 0), 2).reshape(-1, 2))  # type: ignore[arg-type]
    alone = np.setdiff1d(np.arange(6), up)
    own = algorithm("d_psgd", topology=matching).sending_rates(task, alone, 3)
    assert np.array_equal(own, task.profiles.uplink_bits_per_second[alone])  # type: ignore[arg-type]
    assert algorithm("d_psgd", topology="torus").sending_rates(task, alone, 3) is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0,1,2\n1,2,\n", r"line 3: .*; give the numbers of two clients, and the link's rate if there is a column"),
        ("0,1,2\n1,2,0\n", r"line 3: got 0 Mbit/s; a link's rate is above 0"),
        ("0,1,2\n1,2,nan\n", r"line 3: got nan Mbit/s; a link's rate is above 0"),
        ("0,1,2\n1,2,3\n1,0,4\n", r"line 4: the link of 1 and 0 has 4 Mbit/s, and 2 in a line before; give it one"),
        ("0,1,2\n1,2,1e-12\n", r"rates of 1 of 2 links are not between 0.001 and 1e\+18 bit/s, such as 1e-06 of that"),
    ],
)
def test_rates_that_no_link_has_are_refused(lines: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text(f"client,neighbour,mbit_per_second\n{lines}")
    with pytest.raises(UserError, match=said):
        topology("edge_list", path=tmp_path / "links.csv").check(3, 0)


def test_rates_of_a_topology_of_ones_own_are_checked() -> None:
    class Short(type(topology("ring"))):  # type: ignore[misc]
        def rates(self, pairs: Any, seed: Any) -> Any:
            return np.ones(len(pairs) - 1)

    with pytest.raises(UserError, match=r"rates returned the shape \[3\] for 4 pairs of clients; return one rate for"):
        Short().check(4, 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"radio": {"channel": "fixed"}}, "has rates of its links, and radio would share other links among"),
        (
            {"clock": {"uploads": "sequential"}},
            "and clock.uploads = sequential would share other links among the clients",
        ),
        (
            {"topology": {"kind": "unequal", "topology": "unequal"}},
            "topology have rates already; leave out one of both",
        ),
        ({"topology": {"kind": "unequal", "mbit_per_second": {"median": 2, "sigma": 900}}}, "change the rates"),
    ],
)
def test_two_sources_of_a_rate_are_refused(settings: dict[str, Any], said: str) -> None:
    method = {"kind": "d_psgd", "topology": settings.pop("topology", "unequal")}
    given = {"data": {"kind": "digits", "clients": 16}, "algorithm": method, "backend": "local", **settings}
    experiment = load_experiment(given)
    with pytest.raises(UserError, match=said):
        Run(experiment, experiment.algorithm, experiment.task(experiment.data_source.load())).check()
