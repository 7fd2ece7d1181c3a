"""Laws of algorithms, on every model that an algorithm trains and with every codec that it accepts."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from pydantic import ValidationError

from narrowcast.algorithms.client.client_pass import ClientPass
from narrowcast.laws.algorithm_cases import AlgorithmCase, with_fields
from narrowcast.laws.law import LawBrokenError, require
from narrowcast.laws.small_tasks import (
    N_CLIENTS,
    PLAN,
    Limited,
    Shuffled,
    close,
    digest,
    local,
    records,
    run,
    sha256,
    stepped,
    stepped_server,
    train_everyone,
)
from narrowcast.platform.config.catalog import SERVER_OPTIMIZERS
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.contract_checks import check_final
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, FloatArray, IntArray, LocalUpdates
from narrowcast.platform.types import Chunk as ClientChunk


def results_do_not_depend_on_the_placement_or_order_of_chunks(case: AlgorithmCase) -> None:
    """Train the chunks in reverse, on pickled copies with read-only arrays, and compare bit by bit."""
    shuffled = run(PLAN, case.algorithm, case.task, executor=Shuffled(case.algorithm, case.task))
    require(sha256(case.algorithm, case.straight) == sha256(case.algorithm, shuffled), "the models differ")
    require(records(case.straight) == records(shuffled), "the records differ")
    require(
        [outcome.metrics for outcome in case.straight] == [outcome.metrics for outcome in shuffled],
        "the metrics differ",
    )


def a_resumed_run_equals_the_uninterrupted_run(case: AlgorithmCase) -> None:
    """Go on from the state after rounds 1 and 3."""
    for middle in (1, 3):
        resumed = run(PLAN, case.algorithm, case.task, state=case.straight[middle - 1].state)
        require(
            sha256(case.algorithm, resumed) == sha256(case.algorithm, case.straight),
            f"after a resume from round {middle} the model is another",
        )
        require(
            records(resumed) == records(case.straight[middle:]),
            f"after a resume from round {middle} the records are others",
        )


def another_seed_gives_another_result(case: AlgorithmCase) -> None:
    """Run with seeds 0 and 1."""
    reseeded = run(PLAN.model_copy(update={"seed": 1}), case.algorithm, case.task_at(1))
    require(sha256(case.algorithm, case.straight) != sha256(case.algorithm, reseeded), "seeds 0 and 1 give one model")


def the_server_does_not_depend_on_the_private_seed(case: AlgorithmCase) -> None:
    """Give the server's half another private seed than its clients have."""
    algorithm, task, everyone = case.algorithm, case.task, np.arange(N_CLIENTS)
    changed = replace(task, private_seed=PrivateSeed(task.private_seed.value + 1))
    states, sent, known = [], [], []
    for variant in (task, changed):
        server = stepped_server(algorithm, variant, case.free)
        states.append(digest(server))
        first, second = (
            algorithm.broadcast(algorithm.init(variant), variant, 1),
            algorithm.broadcast(server, variant, 2),
        )
        updates = [broadcast.update.to_bytes() for broadcast in (first, second) if broadcast.update]
        sent.append((digest(first.arrays), digest(second.arrays), first.full.to_bytes(), updates))
        bits = algorithm.upload_bits(first.arrays, variant, everyone)
        known.append(pickle.dumps((bits, algorithm.rate_distortion(variant, everyone))))
    require(states[0] == states[1], "with another private seed the same uploads give another server state")
    require(sent[0] == sent[1], "with another private seed the server sends something else")
    require(known[0] == known[1], "with another private seed the server expects uploads of other sizes")


def the_model_changes_and_the_bits_add_up(case: AlgorithmCase) -> None:
    """Look at the parameters and the bits of every round."""
    state = case.straight[-1].state
    assert state is not None
    ledgers = [outcome.ledger for outcome in case.straight]
    if not case.algorithm.traits.sends:
        require(not (state.uplink_bits or state.downlink_bits), "bits are sent, and traits.sends is False")
        require(any(values.any() for values in state.clients.values()), "clients neither send nor keep anything")
        return
    after, grows = case.algorithm.final(state.server), case.algorithm.traits.grows
    shapes = [{name: values.shape for name, values in arrays.items()} for arrays in (case.before, after)]
    check_final(case.algorithm, case.task, state.server)
    unchanged = {*shapes[0]} == {*shapes[1]} if grows else shapes[0] == shapes[1]
    require(unchanged, f"parameters were {shapes[0]} and are {shapes[1]}")
    wanted = case.task.model.held_dtype
    require(all(values.dtype == wanted for values in after.values()), f"parameters are not {wanted}")
    # A model that grows may take more rounds than these until it is complete.
    then, now = (case.algorithm.init(case.task), state.server) if grows else (case.before, after)
    changed = [name for name in now if name not in then or not np.array_equal(now[name], then[name])]
    require(bool(changed), "no parameter has changed after five rounds")
    require(state.uplink_bits == sum(int(ledger.uplink_bits.sum()) for ledger in ledgers), "uplink bits do not add up")
    for ledger in ledgers:
        require((ledger.uplink_bits[ledger.delivered] > 0).all(), "an upload of no bits was delivered")
        sent_nothing = case.algorithm.traits.peers or case.algorithm.traits.stays_silent
        require(sent_nothing or (ledger.downlink_bits > 0).all(), "a client was sent nothing")
        silence = 1 if case.algorithm.traits.stays_silent else 0
        whole = (ledger.uplink_bits % 8 == 0) | (ledger.uplink_bits % 8 == silence)
        require(whole.all(), "uploads are not whole bytes")
        require((ledger.downlink_bits % 8 == 0).all(), "downloads are not whole bytes")


def client_state_has_a_row_for_each_client(case: AlgorithmCase) -> None:
    """Compare the clients' state with that before round 1."""
    initial, state = case.algorithm.init_clients(case.task), case.straight[-1].state
    assert state is not None
    require(set(state.clients) == set(initial), f"clients had {sorted(initial)} and have {sorted(state.clients)}")
    for name, values in initial.items():
        require(len(values) == N_CLIENTS, f"{name} has {len(values)} rows for {N_CLIENTS} clients")
        wanted = (len(state.participants), *values.shape[1:])
        require(state.clients[name].shape == wanted, f"{name} has the shape {state.clients[name].shape}, not {wanted}")


def permuting_the_clients_of_a_chunk_changes_no_record(case: AlgorithmCase) -> None:
    """Train three clients in each order."""
    algorithm, task = case.algorithm, case.task
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    initial = algorithm.init_clients(task)
    lines: set[tuple[Any, ...]] = set()
    metrics: list[Arrays] = []
    for order in permutations([1, 4, 6]):
        clients = np.array(order)
        state = _rows(initial, clients)
        result = algorithm.train(broadcast, ClientChunk(1, 0, clients, state), task)
        ledger, ascending = result.ledger, np.argsort(clients)
        own = {name: metric.take(ascending) for name, metric in result.metrics.items()}
        metrics.append({name: np.stack([metric.values, metric.weight]) for name, metric in own.items()})
        require(ledger.client.tolist() == list(order), f"the ledger of {list(order)} is of {ledger.client.tolist()}")
        columns = (ledger.client, ledger.rank, ledger.uplink_bits, ledger.examples, ledger.delivered)
        lines |= set(zip(*columns, strict=True))
    require(len(lines) == 3, f"three clients have {len(lines)} different lines")
    for name, wanted in metrics[0].items():
        same = all(np.allclose(other[name], wanted, rtol=1e-4, atol=1e-6, equal_nan=True) for other in metrics)
        require(same, f"the metric {name} of a client depends on its place in the chunk")


def what_clients_use_does_not_depend_on_held_out_samples(case: AlgorithmCase) -> None:
    """Give the held-out samples of a classification other labels, and compare the models of clients after round 1."""
    algorithm, task = case.algorithm, case.task
    if not (algorithm.personalises and isinstance(data := task.data, Samples)):
        return
    wrong = [Labelled(part.features, part.labels[::-1].copy()) for part in (data.validation, data.test)]
    server = stepped_server(algorithm, task, case.free)
    broadcast = algorithm.broadcast(server, task, 2).arrays
    chunk = ClientChunk(2, 0, np.arange(N_CLIENTS), case.free.state)
    models = (
        algorithm.own_models(broadcast, chunk, variant)
        for variant in (task, replace(task, data=replace(data, validation=wrong[0], test=wrong[1])))
    )
    for part, other in zip(*models, strict=True):
        require(not (differing := _differing(part.parameters, other.parameters)), f"{differing} saw held-out samples")
        places = {values.shape[0] for values in part.parameters.values()}
        require(places <= {1, len(part.places)}, f"{len(part.places)} clients use {places} models")


def attackers_change_the_model_and_no_bits(case: AlgorithmCase) -> None:
    """Let two clients claim the opposite of what they have learnt, and again all clients the same."""
    algorithm, task = case.algorithm, case.task
    if not isinstance(algorithm, ClientPass):
        return
    signs = np.where(np.isin(np.arange(N_CLIENTS), (1, 4)), -1.0, 1.0)
    honest, attacked = (train_everyone(_tampering(algorithm, factors), task) for factors in (np.ones(N_CLIENTS), signs))
    for tensors in (case.free.partial, case.free.state):
        got = honest.partial if tensors is case.free.partial else honest.state
        require(not (differing := _differing(tensors, got)), f"{differing} differs where attackers change nothing")
    if not case.coded:
        same = np.array_equal(case.free.ledger.uplink_bits, attacked.ledger.uplink_bits)
        require(same, "attackers send other numbers of bits")
    for column in ("examples", "loss"):
        same = np.array_equal(getattr(case.free.ledger, column), getattr(attacked.ledger, column), equal_nan=True)
        require(same, f"attackers change the ledger's {column}")
    require(_differing(case.free.partial, attacked.partial), "what attackers claim does not reach the sums")


def _tampering(algorithm: ClientPass, factors: FloatArray) -> Algorithm:
    """Return the algorithm with clients that claim their changes times a factor of each, [U]."""
    cls = type(algorithm)

    def tamper(self: Any, broadcast: Arrays, chunk: ClientChunk, task: Task, updates: LocalUpdates) -> LocalUpdates:
        claimed = cls.tamper(self, broadcast, chunk, task, updates)
        return claimed.scaled(factors[chunk.clients])

    attacking: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, "tamper": tamper})
    fields = {name: getattr(algorithm, name) for name in cls.model_fields}
    variant: Algorithm = attacking.model_construct(**fields)
    return variant


def local_calls_divide_the_clients_of_a_chunk(case: AlgorithmCase) -> None:
    """Look at the chunks of the calls that the training of four clients consists of."""
    algorithm, task, clients = case.algorithm, case.task, np.array([1, 3, 4, 6])
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    state = _rows(algorithm.init_clients(task), clients)
    calls = algorithm.local_calls(broadcast, ClientChunk(1, 0, clients, state), task)
    if calls is not None:
        trained = np.concatenate([call.chunk.clients for call in calls]).tolist()
        require(sorted(trained) == clients.tolist(), f"for clients {clients.tolist()} it trains {trained}")


def what_no_client_trains_stays_as_it_is(case: AlgorithmCase) -> None:
    """Compare parameters that every call of round 1 holds fixed, before and after the round, bit for bit."""
    algorithm, task, clients = case.algorithm, case.task, np.arange(N_CLIENTS)
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    calls = algorithm.local_calls(broadcast, ClientChunk(1, 0, clients, algorithm.init_clients(task)), task)
    fixed = [
        set(call.server) - set(call.server if call.terms.trained is None else call.terms.trained)
        for call in calls or ()
    ]
    if not (held := set(case.before).intersection(*fixed) if fixed else set()):
        return
    after = stepped(algorithm, task, case.free)
    moved = _differing({name: case.before[name] for name in held}, after)
    require(not moved, f"{moved} changed, which LocalTerms.trained does not name")


def with_limits_results_do_not_depend_on_placement_or_resume(case: AlgorithmCase) -> None:
    """Give clients budgets from nothing to plenty, and lose some uploads."""
    algorithm, task, bits = case.algorithm, case.task, int(case.free.ledger.uplink_bits.max())
    plan = PLAN.model_copy(update={"rounds": 3})
    straight = run(plan, algorithm, task, executor=Limited(local(algorithm, task), bits))
    shuffled = run(plan, algorithm, task, executor=Limited(Shuffled(algorithm, task), bits))
    require(sha256(algorithm, straight) == sha256(algorithm, shuffled), "the models differ")
    require(records(straight) == records(shuffled), "the records differ")
    again = run(plan, algorithm, task, state=straight[1].state, executor=Limited(local(algorithm, task), bits))
    require(sha256(algorithm, again) == sha256(algorithm, straight), "after a resume the model is another")


def no_client_exceeds_its_budget(case: AlgorithmCase) -> None:
    """Give clients nothing, three tenths and all of what they would send."""
    if not case.algorithm.traits.sends:
        return
    free = case.free.ledger
    for share in (0.0, 0.3, 1.0):
        budgets = (share * free.uplink_bits).astype(np.int64)
        tight = train_everyone(case.algorithm, case.task, budget_bits=budgets).ledger
        over = np.flatnonzero(tight.uplink_bits > budgets)
        require(
            not over.size, f"with {share:g} of its bits, client {over[:1]} sends {tight.uplink_bits[over[:1]]} bits"
        )
        require(np.array_equal(tight.delivered, tight.uplink_bits > 0), "delivered and sent are not the same clients")
        require((tight.rank[~tight.delivered] <= 0).all(), "who sends nothing has a rank")
        if share == 1.0:
            require(tight.delivered.all(), "a budget of all its bits does not let a client send")
        elif not case.coded:
            require(not tight.delivered.any(), "without a codec, a client sends less than its update")


def a_client_that_cannot_send_changes_nothing_and_keeps_its_codec_state(case: AlgorithmCase) -> None:
    """Give no client any bits."""
    nothing = train_everyone(case.algorithm, case.task, budget_bits=np.zeros(N_CLIENTS, dtype=np.int64))
    after = stepped(case.algorithm, case.task, nothing)
    changed = [name for name in case.before if not np.array_equal(after[name], case.before[name])]
    require(not changed, f"{', '.join(changed)} changed though no client sent anything")
    for name, values in nothing.state.items():
        if name.startswith(("codec/", "control/")):
            require(not values.any(), f"{name} changed though nothing was sent")


def a_round_in_which_nobody_delivers_leaves_the_server_as_it_is(case: AlgorithmCase) -> None:
    """Lose all uploads of round 2, or give clients no bits, and compare round 3 with that of a server without round 2.

    What a server keeps of its broadcasts, for the sizes of later ones, may differ; what it sends and does may not. A
    case without a codec and a server optimizer is tried with every one that it takes, too.
    """
    if not case.algorithm.traits.sends:
        return
    _is_left_by_silence(case.algorithm, case.task, case.free)
    if case.coded or getattr(case.algorithm, "server_optimizer", case) is not None:
        return
    optimizers = {kind: {"server_optimizer": {"kind": kind}} for kind in SERVER_OPTIMIZERS}
    for kind, algorithm in with_fields(case.algorithm, optimizers).items():
        try:
            Run(PLAN, algorithm, case.task).check()
        except UserError:
            continue
        try:
            _is_left_by_silence(algorithm, case.task, train_everyone(algorithm, case.task))
        except LawBrokenError as broken:
            raise LawBrokenError(f"with server_optimizer = {kind}: {broken}") from broken


def _is_left_by_silence(algorithm: Any, task: Task, free: ChunkResult) -> None:
    clients = np.array([1, 3, 4, 6])
    server, state = stepped_server(algorithm, task, free), _rows(free.state, clients)
    lost, nothing = np.ones(len(clients), dtype=bool), np.zeros(len(clients), dtype=np.int64)
    shortages: tuple[dict[str, Any], ...] = {"lost": lost}, {"budget_bits": nothing}
    for limits in shortages:
        sent = algorithm.broadcast(server, task, 2).arrays
        result = algorithm.train(sent, ClientChunk(2, 0, clients, state, **limits), task)
        require(not result.ledger.delivered.any(), "an upload counts as delivered")
        after = algorithm.step(server, sent, algorithm.fold([result.partial]), task, 2)
        moved = _differing(algorithm.final(server), algorithm.final(after))
        require(not moved, f"{moved} changed in round 2, in which no client delivered")
        after_silence, before = (algorithm.broadcast(server_state, task, 3).arrays for server_state in (after, server))
        require(not (differing := _differing(before, after_silence)), f"{differing} of the next broadcast is another")
        total = algorithm.fold([algorithm.train(after_silence, ClientChunk(3, 0, clients, state), task).partial])
        steps = [
            algorithm.final(algorithm.step(server_state, after_silence, total, task, 3))
            for server_state in (server, after)
        ]
        require(not (differing := _differing(*steps)), f"{differing} takes another step in round 3")


def _rows(state: Arrays, clients: IntArray) -> Arrays:
    """Return the rows of some clients of a state [U, ...]."""
    return {name: values[clients] for name, values in state.items()}


def _differing(wanted: Arrays, got: Arrays) -> str:
    """Return the names of arrays that differ, with a comma between them."""
    return ", ".join(sorted(name for name in wanted if not np.array_equal(wanted[name], got[name])))


def a_lost_upload_is_counted_and_not_aggregated(case: AlgorithmCase) -> None:
    """Lose the uploads of every third client."""
    if not case.algorithm.traits.sends:
        return
    algorithm, task, free = case.algorithm, case.task, case.free
    lost = np.arange(N_CLIENTS) % 3 == 1
    partial = train_everyone(algorithm, task, lost=lost)
    require(np.array_equal(partial.ledger.uplink_bits, free.ledger.uplink_bits), "a lost upload costs other bits")
    require(
        np.array_equal(partial.ledger.delivered, free.ledger.delivered & ~lost), "a lost upload counts as delivered"
    )
    without = train_everyone(algorithm, task, np.flatnonzero(~lost))
    everyone = stepped(algorithm, task, free)
    got, wanted = stepped(algorithm, task, partial), stepped(algorithm, task, without)
    require(close(got, wanted, case.before, 1e-5), "the model is not that of the others alone")
    # a median of sparse updates may stand still
    if any((everyone[name] != case.before[name]).any() for name in case.before):
        # each by its own scale: a factor that is drawn anew moves farther than what uploads move
        same = [close({name: got[name]}, {name: everyone[name]}, case.before, 1e-3) for name in everyone]
        require(not all(same), "the model is that of all clients")
    for name, values in partial.state.items():
        if name.startswith("codec/"):
            require(np.array_equal(values, free.state[name]), f"{name} is not what it is after a delivered upload")


def a_client_that_is_drawn_twice_counts_twice(case: AlgorithmCase) -> None:
    """Draw two clients twice, and compare with the sum of the round and of these two alone."""
    algorithm, task, again = case.algorithm, case.task, np.array([1, 4])
    if not algorithm.traits.counts_draws:
        return
    draws = np.where(np.isin(np.arange(N_CLIENTS), again), 2, 1)
    twice = train_everyone(algorithm, task, draws=draws)
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    total = algorithm.fold([case.free.partial, train_everyone(algorithm, task, again).partial])
    wanted = algorithm.final(algorithm.step(server, broadcast, total, task, 1))
    require(close(stepped(algorithm, task, twice), wanted, case.before, 1e-3), "draws are not weights")
    require(np.array_equal(twice.ledger.uplink_bits, case.free.ledger.uplink_bits), "a client pays for its draws")


def chunk_sizes_change_results_by_rounding_alone(case: AlgorithmCase) -> None:
    """Train six clients as one chunk and as six."""
    algorithm, task = case.algorithm, case.task
    whole, parts = (run(PLAN.model_copy(update={"rounds": 2, "chunk_size": size}), algorithm, task) for size in (6, 1))
    ends = [algorithm.final(outcomes[-1].state.server) for outcomes in (whole, parts) if outcomes[-1].state]
    require(close(ends[0], ends[1], case.before, 1e-4), "the models differ by more than rounding")
    for joint, part in zip(whole, parts, strict=True):
        require(np.array_equal(joint.ledger.delivered, part.ledger.delivered), "other clients deliver")
        require(np.allclose(joint.ledger.uplink_bits, part.ledger.uplink_bits, rtol=0.01), "uploads have other sizes")


def a_replica_equals_its_single_run(case: AlgorithmCase) -> None:
    """Run seeds 0 and 1 in lockstep."""
    tasks = [case.task, replace(case.task, seed=1)]
    plans = [PLAN.model_copy(update={"seed": task.seed, "rounds": 3}) for task in tasks]
    runs = [Run(plan, case.algorithm, task) for plan, task in zip(plans, tasks, strict=True)]
    together = list(lockstep(runs))
    for index, (plan, task) in enumerate(zip(plans, tasks, strict=True)):
        got, wanted = together[-1][index], run(plan, case.algorithm, task)
        require(isinstance(got, Outcome), f"seed {index} failed: {got}")
        assert isinstance(got, Outcome)
        require(
            sha256(case.algorithm, [got]) == sha256(case.algorithm, wanted), f"the model of seed {index} is another"
        )
        bits = [got.record.total_uplink_bits, wanted[-1].record.total_uplink_bits]
        require(bits[0] == bits[1], f"seed {index} sends {bits[0]} bits, alone {bits[1]}")


def sizes_known_before_training_are_exact(case: AlgorithmCase) -> None:
    """Compare examples and bits that were predicted with those of the ledger."""
    task, everyone, ledger = case.task, np.arange(N_CLIENTS), case.free.ledger
    predicted = task.training.samples(task, everyone) * task.training.epochs
    require((predicted == ledger.examples).all(), "clients train on other numbers of examples than predicted")
    broadcast = case.algorithm.broadcast(case.algorithm.init(task), task, 1).arrays
    bits = case.algorithm.upload_bits(broadcast, task, everyone)
    if type(case.algorithm).upload_bits is not Algorithm.upload_bits:
        require((bits is None) == case.coded, "bits are known in advance exactly without a codec")
    require(bits is None or (bits == ledger.uplink_bits).all(), "clients send other numbers of bits than predicted")


def updates_of_half_weight_move_the_server_half_as_far(case: AlgorithmCase) -> None:
    """Scale a partial sum as stale updates are scaled."""
    algorithm, task, result = case.algorithm, case.task, case.free
    before, whole = algorithm.init(task), stepped_server(algorithm, task, result)
    weighted = algorithm.weighted_by_staleness(result.partial, 0.5)
    if weighted is None:
        return
    scaled = replace(result, partial=weighted)
    half = stepped_server(case.algorithm, task, scaled)
    for name, values in before.items():
        near = np.allclose(half[name] - values, (whole[name] - values) / 2, rtol=1e-4, atol=1e-6)
        require(near, f"{name} does not move half as far")
        require(half[name].dtype == whole[name].dtype, f"{name} is {half[name].dtype}, not {whole[name].dtype}")


def with_a_fine_quantiser_the_result_is_close_to_float32(case: AlgorithmCase) -> None:
    """Quantise updates to 2^14 levels."""
    if (fine := through_a_fine_quantiser(case)) is None:
        return
    got, wanted = (
        stepped(algorithm, case.task, train_everyone(algorithm, case.task)) for algorithm in (fine, case.algorithm)
    )
    require(close(got, wanted, case.before, 1e-3), "the model differs by more than a thousandth of the step")


def through_a_fine_quantiser(case: AlgorithmCase) -> Algorithm | None:
    """Return the algorithm with 2^14 levels in place of float32; None if it takes no such codec, or has one."""
    if case.coded or "codec" not in type(case.algorithm).model_fields:
        return None
    stages = [{"kind": "quantise", "levels": 2**14, "scale": "max"}]
    fields = {**case.algorithm.model_dump(exclude={"kind"}), "codec": stages}
    try:
        fine: Algorithm = type(case.algorithm).model_validate(fields)
        fine.check(case.task)
    except (UserError, ValidationError):
        return None
    return fine


def digest_of(case: AlgorithmCase) -> str:
    """Return the sha256 of what all clients send in round 1, and of the server's state and theirs after it."""
    result = train_everyone(case.algorithm, case.task)
    server = stepped_server(case.algorithm, case.task, result)
    return digest({**{f"server {name}": values for name, values in server.items()}, **result.state})


UNCODED = (
    results_do_not_depend_on_the_placement_or_order_of_chunks,
    a_resumed_run_equals_the_uninterrupted_run,
    another_seed_gives_another_result,
    with_a_fine_quantiser_the_result_is_close_to_float32,
)
"""Laws that are tried without a codec only: with one, those with limits say more."""
LAWS = (
    the_server_does_not_depend_on_the_private_seed,
    the_model_changes_and_the_bits_add_up,
    client_state_has_a_row_for_each_client,
    permuting_the_clients_of_a_chunk_changes_no_record,
    what_clients_use_does_not_depend_on_held_out_samples,
    attackers_change_the_model_and_no_bits,
    local_calls_divide_the_clients_of_a_chunk,
    what_no_client_trains_stays_as_it_is,
    with_limits_results_do_not_depend_on_placement_or_resume,
    no_client_exceeds_its_budget,
    a_client_that_cannot_send_changes_nothing_and_keeps_its_codec_state,
    a_round_in_which_nobody_delivers_leaves_the_server_as_it_is,
    a_lost_upload_is_counted_and_not_aggregated,
    a_client_that_is_drawn_twice_counts_twice,
    chunk_sizes_change_results_by_rounding_alone,
    a_replica_equals_its_single_run,
    sizes_known_before_training_are_exact,
    updates_of_half_weight_move_the_server_half_as_far,
)
