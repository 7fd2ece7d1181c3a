"""What is drawn from which seed: every purpose in the code is listed here with its side."""

from __future__ import annotations

import ast
import hashlib
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import narrowcast
from narrowcast.experiment import load_experiment, load_replicas
from narrowcast.platform.seeds import PrivateSeed, generator, stream_keys, uniform_bits

SOURCE = Path(narrowcast.__file__).parent
PAPERS = Path(__file__).parents[2] / "papers" / "narrowcast_papers"
PUBLIC = {
    # what a run is simulated with, and the data
    ("algorithms/client/sums.py", "f'privacy {name}'"),
    ("algorithms/federated/aggregator.py", "'buckets'"),
    ("algorithms/federated/dynamic_averaging.py", "'augmentation'"),
    ("algorithms/federated/fedmatch.py", "'probes'"),
    ("algorithms/federated/topology.py", "'topology'"),
    ("algorithms/federated/topology.py", "'matching'"),
    ("algorithms/federated/topology.py", "'link outages'"),
    ("algorithms/federated/link_rates.py", "'link rates'"),
    ("platform/rounds/sampling.py", "'cohort'"),
    ("platform/rounds/sampling.py", "'new clients'"),
    ("platform/rounds/adversary.py", "'attackers'"),
    ("platform/rounds/sampling.py", "purpose"),
    ("platform/rounds/fleet.py", "'fleet'"),
    ("algorithms/channel/links.py", "purpose"),
    ("algorithms/channel/two_bands.py", "'bands'"),
    ("platform/data/soundness.py", "'loading'"),
    ("platform/data/classification.py", "purpose"),
    ("platform/data/classification.py", "'labelled samples'"),
    ("platform/data/scikit_learn.py", "'diabetes: test'"),
    ("platform/data/scikit_learn.py", "'digits: test'"),
    ("platform/data/rating_matrix.py", "'ratings'"),
    ("platform/data/rating_matrix.py", "'clients of users'"),
    ("platform/data/rating_matrix.py", "'columns'"),
    ("platform/data/text.py", "'documents'"),
    ("platform/data/watch.py", "'subjects'"),
    ("platform/data/rated_items.py", "'users'"),
    ("platform/data/mail.py", "'domains'"),
    ("platform/data/mail.py", "'order of the mails'"),
    ("gossip/consensus.py", "'vectors'"),
    ("platform/data/shift.py", "f'classes of group {group}'"),
    ("platform/data/partition.py", "split + ' of clients'"),
    ("platform/data/own.py", "'users'"),
    ("platform/data/partition.py", "'partition'"),
    ("platform/data/text.py", "'characters'"),
    ("platform/data/synthetic.py", "'least squares'"),
    ("platform/data/synthetic.py", "'synthetic'"),
    ("platform/data/synthetic.py", "'block model'"),
    ("fedma/grey_images.py", "'grey images'"),
    ("platform/data/graph.py", "'graph projection'"),
    ("solves/completion_problems.py", "'completion matrix'"),
    ("solves/completion_problems.py", "'completion pattern'"),
    ("solves/completion_problems.py", "'completion noise'"),
    ("solves/completion_problems.py", "'completion pixels'"),
    ("solves/completion_problems.py", "'completion held out'"),
    ("solves/weighted_graph.py", "'graph edges'"),
    ("solves/weighted_graph.py", "'torus weights'"),
    ("solves/nuclear_norm.py", "'nuclear ball start'"),
    ("solves/frank_wolfe.py", "'in-face lanczos'"),
    ("solves/hazan.py", "'hazan lanczos'"),
    ("solves/localisation.py", "'sensor places'"),
    ("solves/localisation.py", "'sensor noise'"),
    ("solves/localisation.py", "'localisation start'"),
    ("sdp/frank_wolfe.py", "'frank-wolfe held out'"),
    ("sdp/localisation.py", "'localisation control'"),
    ("solves/mixing.py", "'mixing start'"),
    ("solves/mixing.py", "'mixing order'"),
    ("solves/burer_monteiro.py", "'factor start'"),
    ("solves/burer_monteiro.py", "'factor noise'"),
    ("solves/certificate.py", "'lanczos start'"),
    ("sdp/mixing.py", "'perturbation'"),
    ("solves/max_cut.py", "'hyperplane'"),
    ("tuning/samplers.py", "'sampler'"),
    ("personal/clients.py", "'mixtures of classes'"),
    ("personal/mnist.py", "'training images'"),
    ("ditto/theory.py", "'points'"),
    ("fedrep/problem.py", "'linear representation'"),
    ("leakage/observed.py", "'attacked images'"),
    ("wireless/figures.py", "'least squares'"),
    ("wireless/figures.py", "'quantisers'"),
    # the global model before round 1
    ("platform/models/modules.py", "'model'"),
    ("platform/models/graph.py", "'gcn'"),
    ("algorithms/federated/fedpara.py", "'hadamard' + name + part"),
    ("solves/observed.py", "'completion start'"),
    # what a decoder or the server regenerates
    ("algorithms/federated/low_rank.py", "'basis'"),
    ("algorithms/federated/lora.py", "'factors ' + a"),
    ("algorithms/federated/low_rank.py", "'components' + name"),
    ("algorithms/federated/rank_policy.py", "'rank'"),
    ("algorithms/federated/fedmavg.py", "'senders'"),
    ("algorithms/federated/unit_slices.py", "'width'"),
    ("algorithms/federated/unit_slices.py", "'units'"),
    ("algorithms/federated/unit_slices.py", "'circle'"),
    ("algorithms/federated/fedma.py", "'matching order'"),
    ("algorithms/federated/fedmd.py", "'public subset'"),
    ("algorithms/federated/server_free.py", "'elected server'"),
    ("algorithms/federated/aggregator.py", "'clip noise'"),
    ("algorithms/federated/push_sum.py", "'message losses'"),
    ("algorithms/federated/downloads.py", "'downlink codec'"),
    ("algorithms/federated/downloads.py", "'download'"),
    ("algorithms/client/uploads.py", "'codec'"),
    ("algorithms/codecs/low_rank.py", "kind + name"),
    # an attacker, who tries the seed that he knows
    ("algorithms/attacks/inference.py", "'negatives'"),
    # the start of an attacker's search
    ("algorithms/attacks/gradient_inversion.py", "'dummy images'"),
    # when simulated clients stop answering
    ("algorithms/secure/masking_client.py", "'secure dropout'"),
    # Rounding and sampling inside a codec: drawn under the key of the upload, which its stages are given whole.
    ("algorithms/codecs/low_rank.py", "name"),
    ("algorithms/codecs/atomo.py", "'atomo'"),
    ("algorithms/federated/adaptive_svd.py", "'rows'"),
    # With `training.shared_negatives` alone.
    ("algorithms/local_training/negatives.py", "'negatives'"),
}
PRIVATE = {
    ("algorithms/local_training/negatives.py", "'negatives'"),
    ("algorithms/local_training/negatives.py", "'shuffle'"),
    ("algorithms/local_training/negatives.py", "'shuffle'"),
    ("algorithms/local_training/calls.py", "'shuffle'"),
    ("algorithms/local_training/forward_draws.py", "'forward'"),
    ("algorithms/local_training/consistency.py", "'unlabelled'"),
    ("algorithms/local_training/consistency.py", "'views'"),
    ("algorithms/local_training/graph.py", "'graph steps'"),
    ("algorithms/federated/fedprox.py", "'partial work'"),
    ("algorithms/federated/fedma.py", "'initial model'"),
    ("algorithms/federated/fedmd.py", "'initial model'"),
    ("algorithms/secure/schemes.py", "'secure rounding'"),
    ("platform/rounds/adversary.py", "'attack'"),
    ("algorithms/attacks/poisoning.py", "'poisoned samples'"),
}
OF_THE_CALLER = {
    ("platform/models/factorisation.py", "purpose"),
    ("platform/models/factorisation.py", "purpose"),
}
"""Factors of items come from the public seed, those of users from the private one."""
DERIVED_FROM_0 = 7585169673735339510
INITIAL_STATE = {
    f"algorithms/federated/{name}.py"
    for name in (
        "adaptive_atomo",
        "dynamic_averaging",
        "fedavg",
        "fedmavg",
        "fedmf",
        "gossip",
        "local",
        "scaffold",
        "submodel",
    )
}
CLIENT_SIDE = {
    "algorithms/federated/fedmd.py",
    "algorithms/federated/fedma.py",
    "algorithms/local_training/graph.py",
    "algorithms/federated/fedprox.py",
    "algorithms/federated/personal.py",
    "algorithms/local_training/negatives.py",
    "algorithms/local_training/consistency.py",
    "algorithms/local_training/forward_draws.py",
    "algorithms/local_training/calls.py",
    "algorithms/secure/aggregation.py",
}
ASSEMBLY = {
    *("experiment.py", "runs/learning.py", "colr/components.py"),
    "laws/algorithm_laws.py",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the package and of the papers beside it."""
    for root in (SOURCE, PAPERS):
        for path in sorted(root.rglob("*.py")):
            yield path.relative_to(root).as_posix(), ast.parse(path.read_text())


def test_every_purpose_has_its_side() -> None:
    public, private = set(), set()
    for name, tree in modules():
        if name == "platform/seeds.py":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Name) and called.id in ("generator", "stream_keys"):
                public.add((name, ast.unparse(node.args[1])))
            elif isinstance(called, ast.Attribute) and called.attr in ("generator", "stream_keys"):
                private.add((name, ast.unparse(node.args[0])))
    assert public == PUBLIC | OF_THE_CALLER
    assert private == PRIVATE


def test_only_clients_draw_from_the_private_seed() -> None:
    uses, values = set(), set()
    for name, tree in modules():
        names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        if "private_seed" in names:
            uses.add(name)
        if "private_seed.value" in ast.unparse(tree):
            values.add(name)
    assert uses == INITIAL_STATE | CLIENT_SIDE | ASSEMBLY
    assert values == INITIAL_STATE | {"laws/algorithm_laws.py"}  # for the clients' state before round 1


def test_a_private_seed_is_no_number() -> None:
    seed, clients = PrivateSeed(7), np.arange(3)
    assert np.array_equal(seed.stream_keys("shuffle", 2, clients), stream_keys(7, "shuffle", 2, clients))
    with pytest.raises((TypeError, ValueError)):
        stream_keys(seed, "shuffle", 2, clients)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        generator(seed, "shuffle")  # type: ignore[arg-type]
    assert "7" not in repr(seed)


def test_a_derived_seed_is_another_for_each_seed_and_never_changes() -> None:
    derived = [PrivateSeed.derived(seed).value for seed in (0, 1, 2, 2**63 - 1)]
    assert len({*derived, 0, 1, 2, 2**63 - 1}) == 8 and all(0 <= value < 2**63 for value in derived)
    assert derived[0] == DERIVED_FROM_0
    assert PrivateSeed(derived[0]).successor().value not in (derived[0], PrivateSeed(1).successor().value)


def test_the_private_seed_follows_the_seed_unless_it_is_given() -> None:
    replicas = load_replicas("fedavg-digits", ["replicas.seed=[0,1]"])
    assert [each.private_seed for each in replicas] == [PrivateSeed.derived(0), PrivateSeed.derived(1)]
    given = load_replicas("fedavg-digits", ["replicas.seed=[0,1]", "client_seed=5"])
    assert [each.private_seed for each in given] == [PrivateSeed(5, own=True)] * 2
    one_seed = load_replicas("fedavg-digits", ["replicas.seed=[0,1]", "client_seed=1"])
    assert [each.private_seed.own for each in one_seed] == [True, False]  # `client_seed` = `seed` is known to everybody
    alone = load_experiment("fedavg-digits")
    assert alone.digest() != load_experiment("fedavg-digits", ["client_seed=5"]).digest()
    task = alone.task(alone.data.load())
    assert (task.seed, task.private_seed) == (0, alone.private_seed)


def _unmixed(word: int) -> int:
    """Return what SplitMix64 mixes to this word."""
    for shift, multiplier in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        word = word * pow(multiplier, -1, 2**64) % 2**64
        left = word
        for _ in range(64 // shift):
            left = word ^ (left >> shift)
        word = left
    return word


def _mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def seed_behind(word: int, purpose: str, round_index: int, client: int, place: int) -> int:
    """Return the seed of the streams of public numbers from one word of one client."""
    golden = 0x9E3779B97F4A7C15
    key = (_unmixed(word) - (place + 1) * golden) % 2**64
    key = (_unmixed(key) - _mixed((client + golden) % 2**64)) % 2**64
    key = (_unmixed(key) - golden) % 2**64
    for part in (round_index, zlib.crc32(purpose.encode())):
        key = (_unmixed(key ^ _mixed((part + golden) % 2**64)) - golden) % 2**64
    return key


@pytest.mark.parametrize("own", [False, True])
def test_one_word_of_a_client_tells_the_seed_unless_it_is_the_clients_own(own: bool) -> None:
    seed, clients = PrivateSeed(2**62 + 12345, own), np.arange(5)
    words = uniform_bits(seed.stream_keys("negatives", 3, clients)[:, None], np.arange(4))
    for client, place in product(range(5), range(4)):
        found = seed_behind(int(words[client, place]), "negatives", 3, client, place)
        assert (found == seed.value) != own
        for purpose, round_index in (("shuffle", 3), ("negatives", 4), ("negatives", 3)):
            others = PrivateSeed(found % 2**63).stream_keys(purpose, round_index, clients)
            agree = others == seed.stream_keys(purpose, round_index, clients)
            assert agree.all() != own
            assert agree.any() != own or (purpose, round_index) == ("negatives", 3)


def test_streams_of_an_own_seed_are_a_keyed_hash_of_purpose_round_and_client() -> None:
    seed, clients = PrivateSeed(77, own=True), np.array([9, 0, 2**40, 9])
    wanted = []
    for client in clients.tolist():
        content = b"shuffle\x0012\0" + client.to_bytes(8, "little")
        key = (77).to_bytes(8, "little")
        digest = hashlib.blake2b(content, key=key, digest_size=8, person=b"narrowcast keys").digest()
        wanted.append(int.from_bytes(digest, "little"))
    assert seed.stream_keys("shuffle", 12, clients).tolist() == wanted
    assert seed.stream_keys("shuffle", 12, clients[:0]).tolist() == []
    many = PrivateSeed(5, own=True).stream_keys("shuffle", 1, np.arange(20_000))
    assert len(np.unique(many)) == 20_000
    bits = (many[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 20_000**0.5
    after = seed.successor()
    assert after.own
    assert not np.intersect1d(after.stream_keys("shuffle", 12, clients), wanted).size


def test_a_run_whose_clients_have_a_seed_of_their_own_is_another_than_that_of_version_0_2() -> None:
    for seed, hashed in ("null", False), ("0", False), ("5", True):
        experiment = load_experiment("fedavg-digits", [f"client_seed={seed}"])
        assert ("client_streams" in experiment.identity()) == hashed


def test_settings_that_came_later_leave_the_digests_of_experiments_without_them() -> None:
    assert load_experiment("fedavg-digits").digest().startswith("c9c0b7782f36"), "a new setting needs a line in LATER"
