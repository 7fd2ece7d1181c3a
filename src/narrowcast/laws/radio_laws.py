"""Laws of the parts of a radio: channels, allocations, downlinks, and the ranks that follow from links."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.channel.allocation import Allocation
from narrowcast.algorithms.channel.curves import ErrorCurves, Shares
from narrowcast.algorithms.channel.links import Channel, Links
from narrowcast.algorithms.channel.radio import Downlink
from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, Region, contains
from narrowcast.algorithms.federated.rank_policy import RankPolicy
from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.types import IntArray, Profiles


def profiles_of(clients: IntArray) -> Profiles:
    """Return profiles that are each client's own, in the order that is asked for."""
    up = np.array([0.4e6 + 1e5 * (client % 7) for client in clients.tolist()])
    return Profiles(clients, clients + 1, up, 3 * up, np.ones(len(clients)))


@dataclass(frozen=True)
class ChannelCase:
    """A channel, and the clients that it can serve."""

    channel: Channel
    clients: int

    def draw(self, seed: int, round_index: int, clients: IntArray | None = None) -> Links:
        """Draw the links of some of the clients, or of all."""
        chosen = np.arange(self.clients) if clients is None else clients
        return self.channel.draw(profiles_of(chosen), seed, round_index)


def channel_cases(channel: Channel, clients: int = 8) -> dict[str, ChannelCase]:
    """Return the only case."""
    return {"": ChannelCase(channel, clients)}


def links_depend_on_seed_round_and_client_alone(case: ChannelCase) -> None:
    """Draw rounds in another order, through pickle, and for some clients only."""
    rounds = [1, 2, 30]
    forwards = [case.draw(3, index) for index in rounds]
    copied = ChannelCase(pickle.loads(pickle.dumps(case.channel)), case.clients)
    backwards = [copied.draw(3, index) for index in reversed(rounds)][::-1]
    clients = np.arange(case.clients)[::-2].copy()
    for index, first, again in zip(rounds, forwards, backwards, strict=True):
        part = case.draw(3, index, clients)
        for name in ("uplink_bits_per_second", "downlink_bits_per_second", "lost"):
            require(np.array_equal(getattr(first, name), getattr(again, name)), f"{name} of round {index} differs")
            equal = np.array_equal(getattr(first, name)[clients], getattr(part, name))
            require(equal, f"{name} of round {index} differs when fewer clients are there")


def links_are_rates_of_each_client(case: ChannelCase) -> None:
    """Look at the links of twenty rounds."""
    for index in range(1, 21):
        links = case.draw(0, index)
        for name in ("uplink_bits_per_second", "downlink_bits_per_second"):
            rates = getattr(links, name)
            require(rates.shape == (case.clients,), f"{name} has the shape {rates.shape}, not [{case.clients}]")
            require(np.isfinite(rates).all() and (rates >= 0).all(), f"{name} of round {index} are not rates")
        require(links.lost.dtype == np.bool_, f"lost is {links.lost.dtype}, not bool")
        require(len(links.region) == case.clients, f"the region has {len(links.region)} users")
        for user in range(case.clients):
            alone, rate = links.region.take(np.array([user])), links.uplink_bits_per_second[[user]]
            require(contains(alone, rate * (1 - 1e-6)), "a client's own rate is outside of its region alone")


def digest_of_channel(case: ChannelCase) -> str:
    """Return the sha256 of the links of three rounds."""
    links = {index: case.draw(3, index) for index in (1, 2, 30)}
    names = ("uplink_bits_per_second", "downlink_bits_per_second", "lost")
    return digest({f"{name} {index}": getattr(drawn, name) for index, drawn in links.items() for name in names})


CHANNEL_LAWS = (links_depend_on_seed_round_and_client_alone, links_are_rates_of_each_client)


@dataclass(frozen=True)
class AllocationCase:
    """An allocation on a rate region."""

    allocation: Allocation
    region: Region
    seconds: float = 2.0

    @property
    def errors(self) -> ErrorCurves:
        """Errors for the rules that minimise them."""
        return Shares(np.arange(1.0, len(self.region) + 1))

    def bits(self, lower: int = 0) -> IntArray:
        """Allocate the bits of an upload, of which each client needs so many at least."""
        return self.allocation.bits(self.region, self.seconds, np.full(len(self.region), lower), errors=self.errors)


def allocation_cases(allocation: Allocation) -> dict[str, AllocationCase]:
    """Return the allocation on links of their own and on a band that clients share."""
    snr = np.array([3.0, 10.0, 1.0, 30.0, 0.5]) * 1e5
    regions: dict[str, Region] = {
        "own links": Independent(np.array([1e5, 3e5, 2e4, 1e6, 5e5])),
        "shared band": GaussianRegion(snr, 1e5),
    }
    return {name: AllocationCase(allocation, region) for name, region in regions.items()}


def bits_are_inside_the_region(case: AllocationCase) -> None:
    """Allocate with lower bounds from none to more than anyone can have."""
    for lower in (0, 1000, 40_000, 10**12):
        bits = case.bits(lower)
        require(bits.shape == (len(case.region),), f"the bits have the shape {bits.shape}")
        require(np.issubdtype(bits.dtype, np.integer), f"bits are {bits.dtype}, not whole numbers")
        require((bits >= 0).all(), "a client has fewer than no bits")
        require(contains(case.region, bits / case.seconds), f"with at least {lower} bits each, the rates are outside")


def clients_with_bits_can_send_their_smallest_update(case: AllocationCase) -> None:
    """Compare the bits with their lower bounds."""
    for lower in (1000, 40_000, 10**12):
        bits = case.bits(lower)
        less = bits[(bits > 0) & (bits < lower)]
        require(not less.size, f"a client that needs {lower} bits gets {less[:1]}")


def allocating_again_gives_the_same(case: AllocationCase) -> None:
    """Allocate twice, the second time through pickle."""
    again = AllocationCase(pickle.loads(pickle.dumps(case.allocation)), case.region)
    require(np.array_equal(case.bits(100), again.bits(100)), "the bits differ")


def digest_of_allocation(case: AllocationCase) -> str:
    """Return the sha256 of the bits."""
    return digest({"bits": case.bits(100)})


ALLOCATION_LAWS = (
    bits_are_inside_the_region,
    clients_with_bits_can_send_their_smallest_update,
    allocating_again_gives_the_same,
)


def downloads_take_a_finite_time_of_those_waited_for(downlink: Downlink) -> None:
    """Send eight clients as many bits each, and leave out two of them."""
    bits, rates = np.full(8, 10**6), np.linspace(1e5, 2e6, 8)
    for waited_for in (np.ones(8, dtype=bool), np.arange(8) % 4 > 0):
        seconds = downlink.seconds(bits, rates, waited_for)
        require(seconds.shape == (8,), f"the seconds have the shape {seconds.shape}, not [8]")
        require(np.isfinite(seconds[waited_for]).all(), "a client that is waited for never has the model")
        require((seconds[waited_for] > 0).all(), "a download takes no time")
        fastest = bits / rates.max()
        require((seconds[waited_for] >= fastest[waited_for] * (1 - 1e-9)).all(), "a download is faster than any link")


def more_bits_take_no_less_time(downlink: Downlink) -> None:
    """Double the bits."""
    rates, everyone = np.linspace(1e5, 2e6, 8), np.ones(8, dtype=bool)
    once, twice = (downlink.seconds(np.full(8, bits), rates, everyone) for bits in (10**6, 2 * 10**6))
    require((twice >= once).all(), "twice the bits take less time")


DOWNLINK_LAWS = (downloads_take_a_finite_time_of_those_waited_for, more_bits_take_no_less_time)


def ranks_lie_between_none_and_the_highest(policy: RankPolicy) -> None:
    """Choose among eight ranks for a hundred clients."""
    ranks = policy.ranks(profiles_of(np.arange(100)), 8, _bits_at_rank(100), 0, 1)
    require(ranks.shape == (100,), f"the ranks have the shape {ranks.shape}, not [100]")
    require(np.issubdtype(ranks.dtype, np.integer), f"ranks are {ranks.dtype}, not whole numbers")
    require(((ranks >= 0) & (ranks <= 8)).all(), "a rank is not 0 to 8")


def a_rank_depends_on_seed_round_and_client_alone(policy: RankPolicy) -> None:
    """Choose for all clients and for every other one."""
    clients = np.arange(100)[::-2].copy()
    everyone = policy.ranks(profiles_of(np.arange(100)), 8, _bits_at_rank(100), 5, 2)
    require(
        np.array_equal(policy.ranks(profiles_of(clients), 8, _bits_at_rank(len(clients)), 5, 2), everyone[clients]),
        "a client's rank differs when fewer clients are there",
    )


def _bits_at_rank(clients: int) -> IntArray:
    return np.broadcast_to(np.arange(9) * 80_000, (clients, 9))


def digest_of_ranks(policy: RankPolicy) -> str:
    """Return the sha256 of the ranks of a hundred clients."""
    return digest({"ranks": policy.ranks(profiles_of(np.arange(100)), 8, _bits_at_rank(100), 5, 2)})


RANK_POLICY_LAWS = (ranks_lie_between_none_and_the_highest, a_rank_depends_on_seed_round_and_client_alone)
