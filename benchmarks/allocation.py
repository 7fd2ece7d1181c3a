"""Seconds of a channel draw and of an allocation, beside a general convex solver that is given every constraint.

Medians over repeats, after one call that compiles. The general solver (SLSQP) gets all 2^n - 1 sets of users, and its
least error has to agree with ours.

    python benchmarks/allocation.py [--repeats 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize

from narrowcast.algorithms.channel.allocation import least_error
from narrowcast.algorithms.channel.curves import DistortionCurves, ErrorCurves
from narrowcast.algorithms.channel.regions import GaussianRegion
from narrowcast.platform.config.catalog import ALLOCATIONS, CHANNELS
from narrowcast.platform.types import Profiles

sys.path.append(str(Path(__file__).parent.parent / "papers"))
from narrowcast_papers.wireless.errors import Neighbourhoods

COHORT, POPULATION, SECONDS = 60, 100_000, 0.5


def main() -> None:
    arguments = _arguments()
    rows = [*draws(arguments.repeats), *allocations(arguments.repeats), *against_a_solver(arguments.repeats)]
    report = {
        "rows": rows,
        "repeats": arguments.repeats,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
    }
    table = Table("what", "users", "ms", "note", title="Channels and allocations, medians")
    for row in rows:
        table.add_row(row["what"], f"{row['users']:,}", f"{1e3 * row['seconds']:.3f}", row["note"])
    Console(width=110).print(table)
    print(f"{report['machine']}; load average {report['load_average'][0]:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def draws(repeats: int) -> list[dict]:
    """A round's links for everybody at once."""
    rows = []
    for kind in ("fixed", "lognormal", "rayleigh"):
        channel, everybody = CHANNELS[kind](), profiles(POPULATION)
        seconds = timed(lambda channel=channel, everybody=everybody: channel.draw(everybody, 0, 1), repeats)
        rows.append({"what": f"draw: {kind}", "users": POPULATION, "seconds": seconds, "note": ""})
    return rows


def allocations(repeats: int) -> list[dict]:
    """Each rule on cohorts of a Rayleigh cell and on cohorts with adversarial SNRs, and on a large one."""
    rows = []
    for name, n_users, n_cohorts in (("cell", COHORT, 9), ("SNR 1e-8..1e8", COHORT, 9), ("cell", POPULATION, 1)):
        figures: dict[tuple[str, str], list[float]] = {}
        for seed in range(n_cohorts):
            region, errors = cohort(name, n_users, seed)
            window = SECONDS * n_users / COHORT
            cases = [("min_error", note, each) for note, each in errors.items()]
            cases += [(kind, "", None) for kind in ("max_min", "proportional", "equal")]
            for kind, note, each in cases:
                rule, nothing = ALLOCATIONS[kind](), np.zeros(n_users, dtype=np.int64)
                seconds = timed(lambda: rule.bits(region, window, nothing, None, each), repeats)  # noqa: B023
                figures.setdefault((kind, note), []).append(seconds)
        for (kind, note), seconds in figures.items():
            slowest = f"; slowest of {n_cohorts} cohorts {1e3 * max(seconds):.1f} ms" if n_cohorts > 1 else ""
            rows.append(
                {"what": f"{kind}, {name}", "users": n_users, "seconds": median(seconds), "note": f"{note}{slowest}"}
            )
    return rows


def cohort(name: str, n_users: int, seed: int) -> tuple[GaussianRegion, dict[str, ErrorCurves]]:
    """A shared band, and what errors over it cost; no tables for large cohorts, where trades look at pairs of users."""
    random = np.random.default_rng(seed)
    cell = CHANNELS["rayleigh"](access="shared", shadowing_decibel=8.0).draw(profiles(n_users), seed, 1).region
    region = cell if name == "cell" else GaussianRegion(10 ** random.uniform(-8, 8, n_users), 1e6)
    weight = 10 ** random.uniform(-1, 1, n_users)
    errors: dict[str, ErrorCurves] = {"eq. (9)": Neighbourhoods(weight, np.full(n_users, 1700.0), 1000)}
    if n_users <= COHORT:
        points = np.cumsum(random.integers(100, 3000, (n_users, 32)), axis=1)
        errors["curves of 32 points"] = DistortionCurves.of(
            points, -np.sort(-random.random((n_users, 32)), axis=1), weight
        )
    return region, errors


def against_a_solver(repeats: int) -> list[dict]:
    """Eq. (9) by decomposition and by SLSQP, which has to come to the same least error."""
    rows = []
    for n_users in (4, 6, 8):
        random = np.random.default_rng(n_users)
        region = GaussianRegion(10 ** random.uniform(-1, 2, n_users), 4.0)
        errors = Neighbourhoods(10 ** random.uniform(-1, 1, n_users), np.zeros(n_users), 1)
        sets = [users for size in range(1, n_users + 1) for users in combinations(range(n_users), size)]
        matrix = np.array([[float(user in users) for user in range(n_users)] for users in sets])
        limits = np.array([region.capacity_of(np.array(users)) for users in sets])
        start = least_share(region)

        def solve() -> np.ndarray:
            return minimize(
                lambda x: errors.values(x).sum(),  # noqa: B023
                start,  # noqa: B023
                jac=lambda x: -2 * np.log(2) * errors.weight / np.exp2(2 * x),  # noqa: B023
                method="SLSQP",
                bounds=[(0, None)] * n_users,  # noqa: B023
                constraints={"type": "ineq", "fun": lambda x: limits - matrix @ x, "jac": lambda _: -matrix},  # noqa: B023
                options={"ftol": 1e-14, "maxiter": 1000},
            ).x

        ours, theirs = errors.values(least_error(errors, region, 1.0)).sum(), errors.values(solve()).sum()
        if abs(ours / theirs - 1) > 1e-5:
            raise SystemExit(f"{n_users} users: decomposition finds {ours:g}, SLSQP {theirs:g}")
        note = f"least error {ours:.6g}, SLSQP / ours - 1 = {theirs / ours - 1:.1e}"
        for what, call in (("decomposition", lambda: least_error(errors, region, 1.0)), ("SLSQP, all sets", solve)):  # noqa: B023
            rows.append({"what": what, "users": n_users, "seconds": timed(call, repeats), "note": note})
    return rows


def least_share(region: GaussianRegion) -> np.ndarray:
    """A point inside: everybody at an equal part of the least it can have, that when decoded first."""
    everyone = np.arange(len(region))
    return np.array([region.contracted(np.delete(everyone, user)).capacity_of(everyone[:1]) for user in everyone])


def profiles(n_users: int) -> Profiles:
    ones = np.ones(n_users)
    return Profiles(np.arange(n_users), np.ones(n_users, dtype=np.int64), 1e6 * ones, 3e6 * ones, ones)


def timed(call: Callable[[], object], repeats: int) -> float:
    call()
    figures = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        figures.append(time.perf_counter() - began)
    return median(figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
