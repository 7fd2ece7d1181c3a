import numpy as np
import pytest

from narrowcast.platform.data import synthetic
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.synthetic import Synthetic
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator


def by_client(data: Samples) -> list[np.ndarray]:
    return [data.order[begin:end] for begin, end in zip(data.indptr[:-1], data.indptr[1:], strict=True)]


def test_shapes_and_sizes_are_those_of_fedprox() -> None:
    data = Synthetic(validation_share=0).load()
    assert (data.name, data.n_clients, data.n_classes) == ("synthetic(0,0)", 30, 10)
    assert data.train.features.shape[1:] == (60,)
    assert data.train.features.dtype == np.float32
    # 90 % of at least 50 samples.
    assert data.examples.min() >= 45
    assert len(data.train) / (len(data.train) + len(data.test)) == pytest.approx(0.9, abs=0.01)
    assert np.array_equal(np.sort(data.order), np.arange(len(data.train)))


def test_sizes_are_lognormal_with_an_offset() -> None:
    data = Synthetic(clients=500, validation_share=0, seed=1).load()
    logs = np.log(data.examples / 0.9 - 49)
    assert np.median(logs) == pytest.approx(4, abs=0.2)
    assert np.quantile(logs, 0.84) - np.median(logs) == pytest.approx(2, abs=0.25)


@pytest.mark.parametrize("iid", [False, True])
def test_features_have_the_variances_of_the_paper(iid: bool) -> None:
    data = Synthetic(iid=iid, validation_share=0, seed=2).load()
    residuals = np.concatenate(
        [data.train.features[rows] - data.train.features[rows].mean(axis=0) for rows in by_client(data)]
    )
    variances = residuals.var(axis=0) * len(residuals) / (len(residuals) - data.n_clients)
    assert np.allclose(variances / np.arange(1, 61) ** -1.2, 1, atol=0.15)
    means = np.array([data.train.features[rows].mean(axis=0) for rows in by_client(data)])
    # Synthetic(0,0) has means N(0, 1) around zero; iid users all have the mean 0.
    assert means[:, -1].std() == pytest.approx(0 if iid else 1, abs=0.3)


def test_beta_moves_the_users_means_and_alpha_does_not() -> None:
    for alpha, beta in ((0, 0), (1, 0), (0, 3)):
        data = Synthetic(alpha=alpha, beta=beta, clients=100, validation_share=0).load()
        centres = np.array([data.train.features[rows].mean() for rows in by_client(data)])
        # 60 coordinates N(B, 1) with B ~ N(0, beta).
        assert centres.std() == pytest.approx(np.sqrt(beta**2 + 1 / 60), rel=0.2)


def test_variances_are_squares_of_deviations() -> None:
    deviations = Synthetic(alpha=0.5, beta=2, validation_share=0).load()
    variances = Synthetic(alpha=0.25, beta=4, as_variances=True, validation_share=0).load()
    assert variances.train.features.tobytes() == deviations.train.features.tobytes()
    assert variances.train.labels.tobytes() == deviations.train.labels.tobytes()


@pytest.mark.parametrize(("iid", "low", "high"), [(True, 0.05, 0.2), (False, 0.5, 0.9)])
def test_only_iid_users_have_the_same_classes(iid: bool, low: float, high: float) -> None:
    data = Synthetic(iid=iid, validation_share=0).load()
    overall = np.bincount(data.train.labels, minlength=10) / len(data.train)
    shares = [np.bincount(data.train.labels[rows], minlength=10) / len(rows) for rows in by_client(data)]
    # The distance in total variation; 45 samples and more of one distribution are about 0.15 apart.
    assert low < np.mean([np.abs(share - overall).sum() / 2 for share in shares]) < high


def test_iid_labels_are_those_of_one_linear_model() -> None:
    data = Synthetic(iid=True, validation_share=0).load()
    shared = generator(0, "synthetic")
    weights, bias = shared.normal(0, 1, (60, 10)), shared.normal(0, 1, 10)
    margins = np.sort(data.train.features @ weights + bias, axis=1)
    certain = margins[:, -1] - margins[:, -2] > 1e-3  # the features are rounded to 32 bits, the labels are not
    assert certain.mean() > 0.99
    labels = np.argmax(data.train.features @ weights + bias, axis=1)
    assert np.array_equal(labels[certain], data.train.labels[certain])


def test_users_do_not_depend_on_how_many_there_are() -> None:
    few, many = (Synthetic(alpha=1, beta=1, clients=n, validation_share=0).load() for n in (3, 8))
    assert np.array_equal(few.train.features, many.train.features[: len(few.train)])
    assert few.digest == Synthetic(alpha=1, beta=1, clients=3, validation_share=0).load().digest
    assert few.digest != Synthetic(alpha=1, beta=1, clients=3, validation_share=0, seed=1).load().digest


def test_validation_takes_from_the_users() -> None:
    whole, held_out = Synthetic(validation_share=0).load(), Synthetic().load()
    assert len(held_out.validation) == round(0.1 * len(whole.train))
    assert (held_out.examples < whole.examples).mean() > 0.9
    assert held_out.examples.sum() == len(held_out.train)
    again = Synthetic(partition="iid", clients=7).load()
    assert np.ptp(again.examples) <= 1


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="iid: true takes no alpha and beta, got 1 and 0; omit them"):
        Synthetic(iid=True, alpha=1)
    monkeypatch.setattr(synthetic, "MOST_SAMPLES", 100)
    with pytest.raises(UserError, match=r"3 clients have .* samples, but at most 100 are allowed; lower clients"):
        Synthetic(clients=3).load()
