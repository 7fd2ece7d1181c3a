"""The targets of `narrowcast reproduce` that are studies of narrowcast's own, of hundreds of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowcast.reproduce import decay, fedma_bias, fedma_networks, headline_secure, heterofl_mnist, total_traffic
from narrowcast.reproduce.against_reference import Runs, compared_with_first
from narrowcast.reproduce.baseline_runs import BASELINES
from narrowcast.reproduce.channel_ablation import ML1M, MNIST, Ablation
from narrowcast.reproduce.channel_table import ChannelTable
from narrowcast.reproduce.cohort_split_study import COHORT_SPLIT
from narrowcast.reproduce.completion_table import COMPLETION, COMPLETION_REPORT
from narrowcast.reproduce.decay_table import judge_decay, plot_decay
from narrowcast.reproduce.fedma_bias_table import judge_bias, plot_bias
from narrowcast.reproduce.fedma_networks_table import judge_networks, plot_networks
from narrowcast.reproduce.fedma_table import judge_controls, plot_controls
from narrowcast.reproduce.fedmavg_table import MARGIN as ITEM_MARGIN
from narrowcast.reproduce.fedmavg_table import judge_clusters, judge_items, plot_clusters, plot_items
from narrowcast.reproduce.fedmd_table import judge_distillation, plot_distillation
from narrowcast.reproduce.fedprox_table import judge_fedprox, plot_fedprox
from narrowcast.reproduce.frontier import judge_frontier, judge_tuning, plot_frontier
from narrowcast.reproduce.gist_table import GIST_CITESEER, GIST_CORA
from narrowcast.reproduce.headline import OPEN
from narrowcast.reproduce.headline_secure_table import judge_sums, plot_sums
from narrowcast.reproduce.headline_table import judge_contest, plot_contest
from narrowcast.reproduce.heterofl_table import judge_slices, plot_slices
from narrowcast.reproduce.long_runs import Queue, work
from narrowcast.reproduce.long_studies import (
    OTHER_SEEDS,
    TEST_SEEDS,
    channel_results,
    finished,
    others,
    tested,
)
from narrowcast.reproduce.max_cut_table import GSET
from narrowcast.reproduce.measured_target import MeasuredTarget
from narrowcast.reproduce.method_comparison import NARROW_LINKS, SERVER_OPTIMIZERS, Comparison
from narrowcast.reproduce.method_table import judge_methods, plot_methods
from narrowcast.reproduce.mixing_rates_table import MIXING_RATES
from narrowcast.reproduce.qffl_table import judge_fairness, plot_fairness
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.scaffold_table import judge_rounds, plot_rounds
from narrowcast.reproduce.sdp_tables import SDP_COMPLETION, SDP_LOCALISATION
from narrowcast.reproduce.sfmf_table import judge_sfmf
from narrowcast.reproduce.total_traffic import Traffic
from narrowcast.reproduce.tuning_study import read_tuning_study
from narrowcast.reproduce.verdict import PaperVerdict
from narrowcast.runs.significance import MARGIN

Finished = tuple[list[PaperVerdict], list[Path]]
_MEMORY_GIB = 100.0
FEDMA = "Wang et al., ICLR 2020 (arXiv:2002.06440)"
FEDMAVG = "Wang, Suwandi and Chang, ICASSP 2021"
SOURCE = "no paper: a study of narrowcast"
_BUDGETS = (
    "Ours: test HR@10 in percent. Rates are the best on validation items of three seeds that are not test seeds, by a "
    "search in factors of two that ends where no neighbour is better. At a budget between two evaluations accuracy is "
    "linear between them. Differences from one upload are paired by seed, with intervals of 95 %; p values are "
    "corrected over the uploads of a budget by Holm's method."
)


@dataclass(frozen=True)
class StudyTarget:
    """A table of studies, whose runs have seeds and rounds of their own; `finish` takes their rows.

    `takes`: time on 2 cores. `source`: the paper that it repeats, on other data or settings.
    """

    what: str
    takes: str
    studies: tuple[str, ...]
    finish: Callable[[Rows, Path], Finished]
    notes: tuple[str, ...] = ()
    source: str = SOURCE

    def rows(self, results: Path, output: Path, at_once: int, seconds: float) -> Rows:
        """Return the rows in the CSV files of both folders, after running what they lack for so many seconds."""
        queue = Queue(self.studies, [results, output])
        if seconds and next(queue.missing(), None) is not None:
            work(queue, output, at_once, seconds, _MEMORY_GIB)
        return queue.rows


def _frontier(name: str, takes: str) -> StudyTarget:
    def finish(rows: Rows, path: Path) -> Finished:
        study = read_tuning_study(name)
        plot_frontier(study, rows, png := path.with_suffix(".png"))
        return judge_frontier(study, rows), [png]

    return StudyTarget(f"accuracy against traffic, {name}", takes, (f"tuning-{name}", f"frontier-{name}"), finish)


def _tuning(name: str, takes: str) -> StudyTarget:
    def finish(rows: Rows, path: Path) -> Finished:
        del path
        return judge_tuning(read_tuning_study(name), rows), []

    return StudyTarget(f"equal trials of every method on validation users, {name}", takes, (f"tuning-{name}",), finish)


def _decay(rows: Rows, path: Path) -> Finished:
    plot_decay(rows, png := path.with_suffix(".png"))
    return judge_decay(rows), [png]


def _methods(comparison: Comparison, what: str, takes: str) -> StudyTarget:
    def finish(rows: Rows, path: Path) -> Finished:
        plot_methods(comparison, rows, png := path.with_suffix(".png"))
        return judge_methods(comparison, rows), [png]

    return StudyTarget(what, takes, (comparison.name,), finish)


def _networks(name: str, model: str, takes: str) -> StudyTarget:
    settings, what = fedma_networks.STUDIES[name], f"FedMA beside FedAvg and FedProx by bytes and rounds, {model}"

    def finish(rows: Rows, path: Path) -> Finished:
        verdicts = judge_networks(settings, rows)
        plot_networks(settings, rows, png := path.with_suffix(".png"))
        return verdicts, [png] if verdicts else []

    note = (
        "Methods have equal rates on validation samples. Differences are from FedAvg after as many rounds, of the "
        "ensemble after the first pass. Rows have the seeds that all methods have so far."
    )
    return StudyTarget(what, takes, (name,), finish, (note,), FEDMA)


def _bias(rows: Rows, path: Path) -> Finished:
    if not (verdicts := judge_bias(rows)):
        return [], []
    plot_bias(rows, png := path.with_suffix(".png"))
    return verdicts, [png]


def _slices(rows: Rows, path: Path) -> Finished:
    cells = {cell.method: cell for cell in heterofl_mnist.CELLS}
    runs = tested(rows, cells, heterofl_mnist.TRIES, heterofl_mnist.TEST_SEEDS)
    plot_slices(runs, png := path.with_suffix(".png"))
    return judge_slices(runs), [png]


def _total(traffic: Traffic, takes: str, reference: decay.Cell | None = None) -> StudyTarget:
    """Return the target of a study of traffic; `reference` is a cell of another one, with which its are compared."""
    known = {} if reference is None else {reference.codec: reference}

    def finish(rows: Rows, path: Path) -> Finished:
        del path
        runs = tested(rows, known, decay.RATES[3000], TEST_SEEDS) | tested(
            rows, traffic.cells, traffic.rates, TEST_SEEDS
        )
        return compared_with_first(runs, traffic.metric, read_tuning_study(traffic.dense_from).dense_bits), []

    what = f"accuracy against uplink plus downlink, downloads on a grid, {traffic.dense_from}"
    return StudyTarget(what, takes, (traffic.name, *(["decay-ml1m-3000"] if known else [])), finish)


def _open_sums(rows: Rows, path: Path) -> Finished:
    plot_contest(OPEN, rows, png := path.with_suffix(".png"))
    return judge_contest(OPEN, rows), [png]


def _hidden_sums(rows: Rows, path: Path) -> Finished:
    plot_sums(rows, png := path.with_suffix(".png"))
    return judge_sums(rows), [png]


def _channel(ablation: Ablation, what: str, takes: str) -> StudyTarget:
    def finish(rows: Rows, path: Path) -> Finished:
        table = ChannelTable(ablation, channel_results(rows, ablation))
        table.plot(png := path.with_suffix(".png"))
        return table.judge(), [png]

    notes = (
        "Cells of one scenario and upload time take equal time. Differences are paired by seed; level: two one-sided t "
        f"tests put them within {MARGIN:g} points. p values are corrected over all differences by Holm's method.",
    )
    return StudyTarget(what, takes, (ablation.name,), finish, notes)


def _fedprox(rows: Rows, path: Path) -> Finished:
    plot_fedprox(rows, png := path.with_suffix(".png"))
    return judge_fedprox(rows), [png]


def _fairness(data: str, what: str, takes: str, note: str) -> StudyTarget:
    def finish(rows: Rows, path: Path) -> Finished:
        plot_fairness(data, rows, png := path.with_suffix(".png"))
        return judge_fairness(data, rows), [png]

    notes = (
        f"Ours: mean over clients, worst and best tenth, variance in percent squared; by seed: the worst. {note} "
        "Differences are paired by seed; p values are corrected over all of them by Holm's method.",
    )
    return StudyTarget(what, takes, (f"qffl-{data}",), finish, notes, "Li et al., ICLR 2020 (arXiv:1905.10497)")


def _scaffold(rows: Rows, path: Path) -> Finished:
    plot_rounds(rows, png := path.with_suffix(".png"))
    return judge_rounds(rows), [png]


def _items(rows: Rows, path: Path) -> Finished:
    plot_items(rows, png := path.with_suffix(".png"))
    return judge_items(rows), [png]


def _controls(rows: Rows, path: Path) -> Finished:
    plot_controls(rows, png := path.with_suffix(".png"))
    return judge_controls(rows), [png]


def _distillation(rows: Rows, path: Path) -> Finished:
    plot_distillation(rows, png := path.with_suffix(".png"))
    return judge_distillation(rows), [png]


def _clusters(rows: Rows, path: Path) -> Finished:
    verdicts = judge_clusters(rows)
    plot_clusters(verdicts, png := path.with_suffix(".png"))
    return verdicts, [png]


def _sfmf(rows: Rows, path: Path) -> Finished:
    del path
    return judge_sfmf(rows), []


def _others(rows: Rows, path: Path) -> Finished:
    del path
    groups: dict[str, dict[str, Runs]] = {}
    for planned in others(rows):
        data = planned.spec.label.partition("-frontier-")[0]
        if found := finished(rows, planned.spec, OTHER_SEEDS):
            groups.setdefault(data, {})[planned.spec.label] = found
    return [
        verdict
        for data, runs in groups.items()
        for verdict in compared_with_first(runs, "hr@10" if data.startswith("ml-") else "accuracy")
    ], []


STUDY_TARGETS: Mapping[str, StudyTarget | MeasuredTarget] = {
    "tuning-ml1m": _tuning("ml1m", "112 runs, 2 h"),
    "tuning-mnist": _tuning("mnist", "105 runs, 1 h"),
    "frontier-ml1m": _frontier("ml1m", "about 280 runs, 4 h"),
    "frontier-mnist": _frontier("mnist", "about 150 runs, 1 h"),
    "decay-ml1m": StudyTarget(
        "decay of the item matrix: float32, SVD, quantised and EDEN",
        "252 runs, 3 h",
        ("decay-ml1m", "decay-ml1m-3000"),
        _decay,
    ),
    "narrow-links": _methods(
        NARROW_LINKS,
        "nine optimisation methods, from FedAvg to SCAFFOLD, through the same codecs at the same bits, MNIST",
        "396 runs, 40 min",
    ),
    "server-optimizers": _methods(
        SERVER_OPTIMIZERS, "FedAvgM, FedAdam, FedYogi and FedAdagrad against FedAvg, Shakespeare", "66 runs, 15 min"
    ),
    "heterofl-mnist": StudyTarget(
        "slices of a model for unequal devices: HeteroFL, FedRolex, IST, and SCoLR's ranks at the same bits, MNIST",
        "66 runs, 10 min",
        (heterofl_mnist.STUDY,),
        _slices,
        (
            "20 clients, Dirichlet(0.5), a fifth each with 1 to 1/16 of the speed and link; all take part in 20 rounds "
            "of one epoch. The best of six settings of every method on validation samples of another seed. Slices give "
            "a client its share of work and bits; SCoLR as many bits, at the whole model's work. Differences are "
            "paired by seed, and p values corrected over all of them by Holm's method.",
        ),
        "the setting of Diao et al., ICLR 2021 (arXiv:2010.01264), with a perceptron",
    ),
    "channel-ml1m": _channel(ML1M, "levels, allocation and knowledge of the channel, each apart", "220 runs, 1 h"),
    "channel-mnist": _channel(MNIST, "the same for a network on MNIST", "46 runs, 30 min"),
    OPEN.name: StudyTarget(
        "which upload for which budget: SVD, rows, smaller models, CoLR and SCoLR over unequal links, ML-100K",
        "about 300 runs, 1 h",
        (OPEN.name,),
        _open_sums,
        (f"All methods have the same coded download of the rows that a client trains. {_BUDGETS}",),
    ),
    headline_secure.STUDY: StudyTarget(
        "the same for sums that nobody may open: CoLR, SCoLR and smaller models as integers of common levels",
        "36 runs, 20 min, after those of headline-ml100k",
        (OPEN.name, headline_secure.STUDY),
        _hidden_sums,
        (
            "Runs are of plain integers, which give the model of masks to the bit; bits and seconds of a round are "
            f"those of a short run under masks. Rates are those of headline-ml100k. {_BUDGETS}",
        ),
    ),
    "total-ml1m": _total(total_traffic.ML1M, "40 runs, 1 h"),
    "total-ml1m-3000": _total(
        total_traffic.ML1M_3000,
        "8 runs, 20 min, beside those of decay-ml1m-3000",
        decay.Cell("FedMF, float32", "5e-4", 3000),
    ),
    "total-mnist": _total(total_traffic.MNIST, "48 runs, 15 min"),
    "frontier-others": StudyTarget(
        "the best methods of the frontiers on ML-100K, ML-latest-small and CIFAR-10 (JPEG copy, 12,000 images)",
        "45 runs, 1 h",
        ("tuning-ml1m", "tuning-mnist", "frontier-others"),
        _others,
    ),
    "fedprox-synthetic": StudyTarget(
        "stragglers dropped or kept, and mu, on synthetic data",
        "739 runs, 15 min",
        ("fedprox-synthetic",),
        _fedprox,
        (
            "50 rounds of 10 of 30 clients, 20 epochs; the paper has 200 rounds. The best of five values, of mu at the "
            "paper's rate or of the rate, by mean validation accuracy over three other seeds. Differences are paired "
            "by seed, in points, with intervals of 95 %; p values of the means over the heterogeneous sets are "
            "corrected by Holm's method.",
        ),
        "Li et al., MLSys 2020 (arXiv:1812.06127), Figure 1",
    ),
    "qffl-fashion": _fairness(
        "fashion",
        "three classes of clothes, one a client: q-FFL, AFL and FedAvg",
        "33 runs, 10 min",
        "The best of six settings of every method by the worst client's validation accuracy, of another seed.",
    ),
    "qffl-synthetic": _fairness(
        "synthetic",
        "synthetic data: accuracy over clients by q",
        "36 runs, 5 min",
        "The best of four rates of every q by the mean validation accuracy over clients, of another seed.",
    ),
    "scaffold-similarity": StudyTarget(
        "rounds to a target accuracy at 0, 10 and 100 % similar data",
        "1380 runs, 15 min",
        ("scaffold-similarity",),
        _scaffold,
        (
            "Digits in place of the paper's EMNIST, so that its numbers of rounds cannot be compared, only the order. "
            "The best of twelve step sizes of every method, by mean rounds to the target on validation samples of "
            "three other seeds; FedProx has mu = 1. Differences are paired by seed; p values are corrected over all "
            "of them by Holm's method. A client of SCAFFOLD sends 32 bits more than one of FedAvg, and receives twice "
            "as many.",
        ),
        "Karimireddy et al., ICML 2020 (arXiv:1910.06378), Table 3",
    ),
    "fedmavg-items": StudyTarget(
        "FedMAvg: error of held-out ratings against the uplink, by senders, uploads, links and local steps",
        "190 runs, 15 min",
        ("fedmavg-items",),
        _items,
        (
            "MovieLens latest-small, rank 10, a fifth of the ratings for testing, 50 rounds. The best of four weight "
            "decays of every setting on validation ratings of another seed. Differences are paired by seed; level: two "
            f"one-sided t tests put them within {ITEM_MARGIN:g}. p values are corrected over all differences by Holm's "
            "method.",
        ),
        FEDMAVG,
    ),
    "fedmavg-clustering": StudyTarget(
        "FedMAvg: clusters of images of one class a client, beside k-means",
        "60 runs, 15 min",
        ("fedmavg-clustering",),
        _clusters,
        ("Ours: accuracy in percent under the best assignment of clusters to classes. Nothing is tuned.",),
        FEDMAVG,
    ),
    "fedma-digits": StudyTarget(
        "FedMA and its controls: what matching adds, and what training the layers above again adds, digits",
        "70 runs, 2 min",
        ("fedma-digits",),
        _controls,
        (
            "Five clients, Dirichlet(0.5), 64-50-10 perceptron, 40 epochs; the rate and the partition of all cells are "
            "those nearest to the other program. Paper: here the means of that program, in numpy, which shares no code "
            "with this one, on partitions of its own. Differences are paired by seed; p values are corrected over all "
            "of them by Holm's method.",
        ),
        f"{FEDMA}, without numbers of its own for this setting",
    ),
    "fedma-mnist": _networks("fedma-mnist", "LeNet", "80 runs, 15 min"),
    "fedma-cifar": _networks("fedma-cifar", "VGG-9", "36 runs, 1 h"),
    "fedma-shakespeare": _networks("fedma-shakespeare", "LSTM", "40 runs, 10 min"),
    "fedma-epochs": _networks("fedma-epochs", "LeNet, by local epochs", "48 runs, 10 min"),
    "fedma-bias": StudyTarget(
        "FedMA and data bias: grey images on one client, coloured ones on the other",
        "40 runs, 15 min",
        (fedma_bias.STUDY,),
        _bias,
        (
            "CIFAR-10 (JPEG copy, 12k), 3,000 training images, LeNet; classes have 95 or 5 % of their training images "
            "in grey, and half of their test images. Each method has three rates on validation images.",
        ),
        FEDMA,
    ),
    "fedmd-digits": StudyTarget(
        "FedMD and its controls: what clients of four architectures gain by each other's outputs, digits",
        "320 runs, 20 min",
        ("fedmd-digits",),
        _distillation,
        (
            "Ten clients, 200 public samples, 10 rounds; but for digestion nothing is tuned. Ours: the mean over "
            "clients of the accuracy in percent, each on its own test samples, which have the classes of its training "
            "samples. Differences are paired by seed; p values are corrected over all of them by Holm's method.",
        ),
        "Li and Wang, 2019 (arXiv:1910.03581), on other data and networks",
    ),
    "sfmf": StudyTarget(
        "SFMF in the clear, under masks, CKKS and Paillier, beside the logs of the released code",
        "6 runs, 25 min, of which 24 are Paillier's",
        ("sfmf",),
        _sfmf,
        (
            "Seven users, 40 items of MovieLens latest-small, 109 ratings for training and 21 for testing, 175 rounds. "
            "The released federated code rounds to 1e-5 and multiplies ciphertexts of single values under 1,024 bits; "
            "here integers of 20 bits, packed under 3,072 bits.",
        ),
        "Chai et al., IEEE Intelligent Systems 2020 (arXiv:1906.05108), and its released logs",
    ),
    "completion": COMPLETION,
    "completion-report": COMPLETION_REPORT,
    "sdp-gset": GSET,
    "sdp-mixing-rates": MIXING_RATES,
    "sdp-cohort-split": COHORT_SPLIT,
    "gist-cora": GIST_CORA,
    "gist-citeseer": GIST_CITESEER,
    "rating-baselines": BASELINES,
    "sdp-completion": SDP_COMPLETION,
    "sdp-localisation": SDP_LOCALISATION,
}
