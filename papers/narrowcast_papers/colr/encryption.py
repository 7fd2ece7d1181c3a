"""Table 3 of Nguyen et al., WWW 2024 (arXiv:2401.03748): cost of encryption on MovieLens-1M, N = 3,706 items.

The paper does not state the parameters of its schemes; the sizes imply them. A CKKS ciphertext of 3,073 KB holds 32,768
slots: a ring of 65,536 with three primes. Since a sum needs no products, a ring of 8,192 with one prime suffices here,
at 192-bit security. Paillier ciphertexts of 837 bytes are those of a 3,072-bit key in a pickle.

Differs from the paper: 1. our updates carry a signature, and the counts by which each item is divided. 2. a client's
seconds are those of its update and of decrypting the sum, which here one client does for all. 3. the server's seconds
are those of verifying and adding 60 updates. 4. Paillier is measured on some values and scaled to all. Seconds are CPU
seconds of one core of the present machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from narrowcast.algorithms.client.sums import MaskGroup, SumBlock, SumLayout
from narrowcast.algorithms.secure import ckks, paillier
from narrowcast.algorithms.secure.ckks import CKKS
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.schemes import PublicKey
from narrowcast.algorithms.secure.unmasking import Inbox
from narrowcast.platform.tracking.figures import BLUE, VERMILLION, new_figure
from narrowcast.studies.verdicts import PaperVerdict

ITEMS, CLIENTS, DIMENSION = 3706, 60, 64
REPEATS, PAILLIER_VALUES = 5, 48


@dataclass(frozen=True)
class EncryptionCost:
    """Seconds per round of a client and of the server, and kilobytes of an update with and without encryption."""

    client_seconds: float
    server_seconds: float
    ciphertext_kb: float
    plaintext_kb: float


PAPER: dict[str, EncryptionCost] = {
    "FedMF": EncryptionCost(0.93, 2.39, 24587, 927),
    "CoLR@1": EncryptionCost(0.07, 0.24, 3073, 15),
    "CoLR@2": EncryptionCost(0.07, 0.25, 3073, 29),
    "CoLR@4": EncryptionCost(0.07, 0.25, 3073, 58),
    "CoLR@8": EncryptionCost(0.08, 0.25, 3073, 116),
    "CoLR@16": EncryptionCost(0.15, 0.51, 6147, 232),
    "CoLR@32": EncryptionCost(0.30, 1.03, 12293, 464),
    "Top-K@1/64": EncryptionCost(88.20, 88.06, 3028, 29),
    "Top-K@2/64": EncryptionCost(182.02, 185.59, 6056, 58),
    "Top-K@4/64": EncryptionCost(353.25, 364.67, 12112, 116),
    "Top-K@8/64": EncryptionCost(723.45, 750.98, 24225, 232),
    "Top-K@16/64": EncryptionCost(1449.90, 1483.91, 48448, 464),
}


def measure_costs() -> dict[str, EncryptionCost]:
    """Measure every row of the table on this machine."""
    unit = _paillier_unit()
    costs = {}
    for method in PAPER:
        series, _, size = method.partition("@")
        if series == "Top-K":
            values = ITEMS * int(size.partition("/")[0])
            costs[method] = EncryptionCost(*(values * each for each in vars(unit).values()))
        else:
            costs[method] = _ckks(int(size or DIMENSION))
    return costs


def _ckks(rank: int) -> EncryptionCost:
    """Measure updates of this rank under CKKS, from a client's contribution to the decrypted sum."""
    random = np.random.default_rng(0)
    whole = MaskGroup((SumBlock("sum", None, ITEMS * rank),), (SumBlock("weight", None, ITEMS),))
    scheme = CKKS()
    messages = Messages(scheme, SumLayout((whole,), {}, CLIENTS, CLIENTS), CLIENTS)
    key_store = _TimedKeyStore(scheme)
    public, clients = key_store.public, np.arange(CLIENTS)
    keys = dict(
        zip(range(CLIENTS), map(bytes, key_store.call("begin", 1, {"clients": clients})["verify"]), strict=True)
    )
    signing = [key.tobytes() for key in key_store.call("secrets", 1, {"clients": clients})["signing"]]
    update = messages.update(1, public)
    integers = np.concatenate([random.integers(-(2**20), 2**20, ITEMS * rank), random.integers(0, 2, ITEMS)])

    inbox, client_seconds, server_seconds = Inbox(messages, 1, public, keys), [], []
    for client in range(CLIENTS):
        began = time.thread_time()
        body = scheme.encode(whole, integers, messages.fixed_point, public)
        sent = update.seal(client, [body], signing[client])
        ended = time.thread_time()
        inbox.receive(sent)
        client_seconds.append(ended - began)
        server_seconds.append(time.thread_time() - ended)
    total = inbox.sums[0]
    assert total is not None
    began = time.thread_time()
    opened = scheme.decrypt_sum(key_store.secret, whole, total, messages.fixed_point)
    opening_seconds = time.thread_time() - began
    assert np.array_equal(opened, integers * CLIENTS), "the sum of equal updates is a multiple of one"
    in_all = float(np.median(client_seconds)) + opening_seconds
    return EncryptionCost(in_all, sum(server_seconds), len(sent) / 1024, 4 * ITEMS * rank / 1024)


class _TimedKeyStore(KeyStore):
    """A key_store that also opens sums outside of its protocol, so that opening can be timed by itself."""

    @cached_property
    def public(self) -> PublicKey:
        """Return the public key of the store."""
        return PublicKey.of(self.call("public", 0, {}))

    @property
    def secret(self) -> object:
        """The context with the secret key."""
        return self._secret


def _paillier_unit() -> EncryptionCost:
    """Measure one value: a client encrypts it and decrypts the sum, the server adds 60."""
    public, secret = paillier.make_keys()
    values = np.random.default_rng(0).integers(-(2**20), 2**20, PAILLIER_VALUES).tolist()
    encrypted = paillier.encrypt(public, values)
    seconds = _median(lambda: paillier.decrypt(secret, paillier.encrypt(public, values)), repeats=1)
    added = _median(lambda: paillier.Ciphertexts.from_bytes(encrypted.to_bytes(), public) + encrypted)
    assert paillier.decrypt(secret, encrypted + encrypted) == [2 * value for value in values]
    each = len(encrypted.to_bytes()) / PAILLIER_VALUES
    return EncryptionCost(seconds / PAILLIER_VALUES, CLIENTS * added / PAILLIER_VALUES, each / 1024, 8 / 1024)


def _median(work: Callable[[], object], repeats: int = REPEATS) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return float(np.median(seconds))


def judge_costs(costs: dict[str, EncryptionCost]) -> list[PaperVerdict]:
    """Compare sizes, client seconds and server seconds of every method with the paper."""
    columns: Sequence[tuple[str, str, Callable[[EncryptionCost], float], int]] = (
        ("ciphertext", "KB", lambda cost: cost.ciphertext_kb, 0),
        ("plaintext", "KB", lambda cost: cost.plaintext_kb, 0),
        ("client", "s", lambda cost: cost.client_seconds, 3),
        ("server", "s", lambda cost: cost.server_seconds, 3),
    )
    verdicts = []
    for what, unit, of, digits in columns:
        for method, paper in PAPER.items():
            published, ours = of(paper), of(costs[method])
            times = published / ours
            compared = f"1/{times:.1f} of the paper's" if times > 1.05 else f"{1 / times:.2f} times the paper's"
            verdicts.append(
                PaperVerdict(
                    f"{what} ({unit}), {method}",
                    f"{published:.{0 if unit == 'KB' else 2}f}",
                    f"{ours:.{digits}f}",
                    "reproduced" if what == "plaintext" and abs(published - ours) < 1 else compared,
                    "",
                    (ours,),
                )
            )
    return verdicts


def security_notes() -> str:
    """Return the parameters of CKKS and their security level in bits."""
    scheme = CKKS()
    level = ckks.security_bits(scheme.ring, scheme.prime_bits)
    return f"CKKS: ring {scheme.ring}, primes of {scheme.prime_bits} bits, {level}-bit security"


def plot_costs(costs: dict[str, EncryptionCost], path: Path) -> None:
    """Plot ciphertext sizes and client seconds on logarithmic axes."""
    figure, axes = new_figure(f"Table 3: encryption on ml-1m ({security_notes()})", panels=2)
    places = np.arange(len(PAPER))
    for each, label, field in (
        (axes[0], "ciphertext of one update (KB); rings: paper", "ciphertext_kb"),
        (axes[1], "client seconds a round; rings: paper", "client_seconds"),
    ):
        each.barh(places, [getattr(costs[method], field) for method in PAPER], color=BLUE, height=0.6)
        each.plot([getattr(paper, field) for paper in PAPER.values()], places, "o", color=VERMILLION, fillstyle="none")
        each.set(xlabel=label, xscale="log")
        each.set_yticks(places, list(PAPER) if each is axes[0] else [""] * len(PAPER), fontsize=8)
        each.invert_yaxis()
    figure.savefig(path, dpi=150)
