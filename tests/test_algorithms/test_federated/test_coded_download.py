"""Downloads of a rounded model, and of the rows that a client asks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.codecs.low_rank import SVD
from narrowcast.algorithms.codecs.messages import GridPayload, dense_wire_bits
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.codecs.wire import HEADER_BITS
from narrowcast.algorithms.federated.adaptive_svd import AdaptiveSVD
from narrowcast.algorithms.federated.downloads import CodedDownload
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.local_training.negatives import draw_samples
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.schemes import Masked
from narrowcast.experiment import load_experiment
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.laws.algorithm_cases import AlgorithmCase
from narrowcast.laws.small_tasks import PLAN, interactions, run, sha256, task_of
from narrowcast.platform.contracts import Recipients
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.plan import Buffered
from narrowcast.platform.types import Chunk, PayloadError

MODEL = MatrixFactorisation(embedding_dim=8)
STEP = 0.25
GRIDS = {
    "fedmf": FedMF(download=CodedDownload(step=STEP, rows="touched")),
    "adaptive_svd": AdaptiveSVD(rank=2, download=CodedDownload(step=STEP, rows="touched")),
    "colr": CoLR(rank=2, download=CodedDownload(step=STEP, rows="touched")),
    "scolr": SCoLR(rank=4, download=CodedDownload(step=STEP, rows="touched")),
    "fedavg": FedAvg(download=CodedDownload(step=2**-6, rounding="nearest", history=3)),
    "fedmf-nearest": FedMF(rows="all", download=CodedDownload(step=STEP, rounding="nearest")),
}
CASES = {
    name: case
    for name, case in algorithm_cases.cases(GRIDS).items()
    if (case.algorithm.kind == "fedavg") == name.startswith("mlp")
}
EXCEPT = {
    # A request is sent besides the upload, and may be all that is.
    "matrix_factorisation-fedmf": algorithm_laws.no_client_exceeds_its_budget,
    "matrix_factorisation-adaptive_svd": algorithm_laws.no_client_exceeds_its_budget,
    "matrix_factorisation-colr": algorithm_laws.no_client_exceeds_its_budget,
    "matrix_factorisation-scolr": algorithm_laws.no_client_exceeds_its_budget,
    # The numbers of the rounds in its history are no part of the model.
    "mlp-fedavg": algorithm_laws.updates_of_half_weight_move_the_server_half_as_far,
}


@pytest.mark.parametrize("law", (*algorithm_laws.UNCODED[:3], *algorithm_laws.LAWS), ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", CASES)
def test_coded_downloads_keep_the_laws_of_algorithms(name: str, law: Callable[[AlgorithmCase], None]) -> None:
    if law is not EXCEPT.get(name):
        law(CASES[name])


@pytest.mark.parametrize(
    "algorithm", [FedMF(), AdaptiveSVD(rank=2), CoLR(rank=2), SCoLR(rank=4)], ids=lambda each: each.kind
)
def test_a_lossless_download_of_the_rows_is_no_codec(algorithm: Any) -> None:
    task, pulling = task_of(MODEL), algorithm.model_copy(update={"download": CodedDownload(rows="touched")})
    plain, pulled = run(PLAN, algorithm, task), run(PLAN, pulling, task)
    assert sha256(algorithm, plain) == sha256(pulling, pulled)
    assert [each.metrics for each in plain] == [each.metrics for each in pulled]
    for ours, theirs in zip(pulled, plain, strict=True):
        requests = ours.ledger.uplink_bits - theirs.ledger.uplink_bits
        assert (requests == HEADER_BITS).all(), "the list of rows, which the request has, is not in the upload"
        samples = draw_samples(task, ours.ledger.client, ours.record.round)
        rows = np.empty(len(samples.order), dtype=np.int64)
        rows[samples.order] = np.diff(samples.row_starts)
        seeded = isinstance(algorithm, CoLR | SCoLR)
        expected = [dense_wire_bits(8 * each, seed=seeded) for each in rows.tolist()]
        assert ours.ledger.downlink_bits.tolist() == expected, "the basis costs its seed"


@pytest.mark.slow
def test_the_download_follows_from_its_bytes_and_the_public_seed_in_another_process() -> None:
    """Send the rows of one client of round 3 as bytes, and decode them where nothing but public data is known."""
    task, algorithm = task_of(MODEL), FedMF(download=CodedDownload(step=STEP, rows="touched"))
    state = run(PLAN.model_copy(update={"rounds": 2}), algorithm, task)[-1].state
    assert state is not None
    broadcast = algorithm.broadcast(state.server, task, 3)
    rows = draw_samples(task, np.array([4]), 3).row_items
    assert isinstance(broadcast.full, GridPayload)
    sent = GridPayload([broadcast.full.points[0][rows]]).to_bytes()
    charged = algorithm.download_bits(
        state.server, broadcast, task, Recipients(np.array([4]), np.zeros(1, dtype=np.int64), 3)
    )
    assert charged is not None
    assert charged.tolist() == [8 * len(sent)]
    decode = f"""
import sys
import numpy as np
from narrowcast.algorithms.federated.downloads import CodedDownload
from narrowcast.laws.small_tasks import task_of
from narrowcast.platform.models.factorisation import MatrixFactorisation
model = MatrixFactorisation(embedding_dim=8)
start = model.init_server(task_of(model).data, {task.seed})
download = CodedDownload(step={STEP})
rows = np.array({rows.tolist()})
sys.stdout.buffer.write(download.decoded_rows(bytes.fromhex({sent.hex()!r}), rows, start, {task.seed}, 3).tobytes())
"""
    decoded = subprocess.run([sys.executable, "-c", decode], capture_output=True, check=True).stdout
    assert decoded == np.ascontiguousarray(broadcast.arrays[ITEM_FACTORS][rows]).tobytes()


def test_dithered_values_are_off_by_uniform_noise_whatever_they_are() -> None:
    task, algorithm = task_of(MODEL), FedMF(download=CodedDownload(step=0.5))
    server = dict(algorithm.init(task))
    for value in (0.0, 0.2, 3.1):
        server[ITEM_FACTORS] = np.full_like(server[ITEM_FACTORS], value)
        errors = np.array([algorithm.broadcast(server, task, each).arrays[ITEM_FACTORS] - value for each in (1, 2, 3)])
        assert abs(errors).max() <= 0.25 + 1e-6
        assert abs(errors.mean()) < 0.01
        assert errors.var() == pytest.approx(0.25 / 12, rel=0.05)
        assert abs(np.corrcoef(errors.reshape(3, -1))[0, 1]) < 0.1, "each round has noise of its own"


def test_a_grid_payload_refuses_bytes_of_other_shapes() -> None:
    points = np.arange(-3, 3, dtype=np.int32).reshape(3, 2)
    data = GridPayload([points], seed=7).to_bytes()
    read = GridPayload.from_bytes(data, [(3, 2)])
    assert np.array_equal(read.points[0], points)
    assert read.seed == 7
    for cut in range(len(data)):
        with pytest.raises(PayloadError):
            GridPayload.from_bytes(data[:cut], [(3, 2)])
    zeros = GridPayload([np.zeros((40, 8), dtype=np.int32)])
    assert zeros.wire_bits() <= HEADER_BITS + 64
    assert not GridPayload.from_bytes(zeros.to_bytes(), [(40, 8)]).points[0].any()


def test_a_returning_client_is_sent_the_change_since_its_round_in_one_message() -> None:
    """Follow a run from outside, and hold the points of every broadcast."""
    download = CodedDownload(step=2**-7, rounding="nearest", history=3)
    algorithm, task = FedAvg(download=download), task_of(MLP(hidden=(16,)))
    server, sent, changes = algorithm.init(task), {}, 0
    for outcome in run(PLAN, algorithm, task):
        round_index = outcome.record.round
        broadcast = algorithm.broadcast(server, task, round_index)
        assert isinstance(broadcast.full, GridPayload)
        sent[round_index] = broadcast.full.points
        last, whole = np.arange(round_index), broadcast.full.wire_bits()
        charged = algorithm.download_bits(server, broadcast, task, Recipients(last, last, round_index))
        assert charged is not None
        for each, bits in zip(last.tolist(), charged.tolist(), strict=True):
            if each < max(1, round_index - 3):
                assert bits == whole, "a newcomer, or one that was away for more than three rounds"
                continue
            change = GridPayload([now - then for now, then in zip(sent[round_index], sent[each], strict=True)])
            assert bits == min(change.wire_bits(), whole)
            changes += bits < whole
        assert outcome.state is not None
        server = outcome.state.server
    assert changes >= 3, "a change since the last rounds is smaller than the model"


def test_a_buffered_run_goes_on_after_a_resume() -> None:
    case = CASES["mlp-fedavg"]
    plan = PLAN.model_copy(update={"schedule": Buffered(concurrency=4, buffer_size=2)})
    straight = run(plan, case.algorithm, case.task)
    resumed = run(plan, case.algorithm, case.task, state=straight[1].state)
    assert sha256(case.algorithm, straight) == sha256(case.algorithm, resumed)
    assert [each.record for each in straight[2:]] == [each.record for each in resumed]


def test_a_client_that_uploads_nothing_has_asked() -> None:
    case = CASES["matrix_factorisation-fedmf"]
    chunk_state = {name: values[:3] for name, values in case.algorithm.init_clients(case.task).items()}
    chunk_state = {name: np.full_like(values, np.nan) for name, values in chunk_state.items()}
    broadcast = case.algorithm.broadcast(case.algorithm.init(case.task), case.task, 1).arrays
    result = case.algorithm.train(broadcast, Chunk(1, 0, np.arange(3), chunk_state), case.task)
    assert not result.ledger.delivered.any()
    assert (result.ledger.uplink_bits > 0).all()
    budget = np.array([10**6, 240, 64])
    limited = case.algorithm.train(broadcast, Chunk(1, 0, np.arange(3), chunk_state, budget), case.task)
    whole, request, nothing = limited.ledger.uplink_bits.tolist()
    assert (whole, nothing) == (result.ledger.uplink_bits[0], 0)
    assert HEADER_BITS < request <= 240, "a request that fits is sent, although the upload does not fit"


@pytest.mark.parametrize(
    ("algorithm", "advice"),
    [
        (FedMF(rows="all", download=CodedDownload(rows="touched")), r"use algorithm\.rows = touched"),
        (FedMF(downlink_codec=(SVD(rank=1),), download=CodedDownload(step=1)), "are two ways down; leave out one"),
        (
            CoLR(downlink_codec=(Quantise(levels=4),), download=CodedDownload(step=1)),
            "are two ways down; leave out one",
        ),
        (SecureAggregation(GRIDS["colr"], Masked(), 6), r"use download\.rows = all"),
        (
            AdaptiveSVD(rank=2, row_choice="strongest", download=CodedDownload(rows="touched")),
            r"row_choice = strongest uploads some of the rows",
        ),
        (SecureAggregation(GRIDS["fedmf"], Masked(), 6), r"use download\.rows = all"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(algorithm: Any, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        algorithm.check(task_of(MODEL))


def test_a_network_of_low_rank_changes_has_no_coded_model() -> None:
    with pytest.raises(
        UserError, match=r"codes the downloads of an item matrix, not of mlp; use algorithm\.downlink_codec"
    ):
        GRIDS["colr"].check(task_of(MLP(hidden=(16,))))


def test_a_whole_model_on_a_grid_goes_with_masks() -> None:
    SecureAggregation(GRIDS["fedmf-nearest"], Masked(), 6).check(task_of(MODEL))
    SecureAggregation(CoLR(rank=2, download=CodedDownload(step=STEP)), Masked(), 6).check(task_of(MODEL))


@pytest.mark.parametrize("download", ["{step: 1, rows: touched}", "{step: 1, rounding: nearest, history: 3}"])
def test_one_transmission_to_all_carries_no_downloads_of_their_own(download: str) -> None:
    words = ["radio={channel: {kind: rayleigh, access: shared}, upload_seconds: 1, downlink: broadcast}"]
    experiment = load_experiment("fedmf-ml1m", [*words, f"algorithm.download={download}", "algorithm.rows=touched"])
    with pytest.raises(UserError, match=r"^radio\.downlink = broadcast .* use radio\.downlink = unicast"):
        experiment.task(interactions(np.full(6, 20)))
    experiment = load_experiment("fedmf-ml1m", [*words, "algorithm.download={step: 1}", "clients_per_round=2"])
    experiment.task(interactions(np.full(6, 20)))
