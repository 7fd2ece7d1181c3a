import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from narrowcast.platform.data import download
from narrowcast.platform.data.interactions import NO_ITEM, Interactions, Validation
from narrowcast.platform.data.movielens import MovieLens1M, MovieLens100K, MovieLensLatestSmall
from narrowcast.platform.data.ncf import NCF, write_ncf_train
from narrowcast.platform.errors import UserError
from small_sets import write_inter


def check_disjoint(data: Interactions) -> None:
    users = np.repeat(np.arange(data.n_users), data.examples)
    known = np.zeros((data.n_users, data.n_items), dtype=bool)
    known[users, data.items] = True
    assert known.sum() == len(data.items)
    everyone = np.arange(data.n_users)
    assert not known[everyone, data.test].any()
    has = data.validation != NO_ITEM
    assert not known[everyone[has], data.validation[has]].any()
    assert not (data.validation == data.test).any()
    assert (np.diff(data.items)[np.diff(users) == 0] > 0).all()


@pytest.mark.data("ml-100k")
@pytest.mark.parametrize(("validation", "train"), [("second_last", 98_114), ("random", 98_114), ("none", 99_057)])
def test_ml_100k(validation: Validation, train: int) -> None:
    data = MovieLens100K(validation=validation).load()
    assert (data.name, data.n_users, data.n_items, len(data.items)) == ("ml-100k", 943, 1682, train)
    check_disjoint(data)


def test_ml_100k_holds_out_what_came_last(root: Path) -> None:
    users, items, times = write_inter(root / "ml-100k").T
    data = MovieLens100K().load()
    assert (data.name, data.n_users, data.n_items, len(data.items)) == ("ml-100k", 60, 200, len(users) - 2 * 60)
    assert data.source == str(root / "ml-100k" / "ml-100k.inter")
    check_disjoint(data)
    when = np.zeros((60, 200), dtype=np.int64)
    when[users - 1, items - 1] = times
    everyone = np.arange(60)
    test, held_out = when[everyone, data.test], when[everyone, data.validation]
    assert (test >= held_out).all()
    assert (held_out >= np.maximum.reduceat(when[np.repeat(everyone, data.examples), data.items],
                                            data.indptr[:-1])).all()  # fmt: skip
    assert (when[everyone[:, None], data.negatives] == 0).all()


def test_u_data_gives_the_same_as_the_recbole_file(root: Path) -> None:
    write_inter(root / "ml-100k")
    expected = MovieLens100K().load()
    _, _, rows = (root / "ml-100k" / "ml-100k.inter").read_text().partition("\n")
    (root / "ml-100k" / "ml-100k.inter").unlink()
    (root / "ml-100k" / "u.data").write_text(rows)
    data = MovieLens100K().load()
    assert data.source.endswith("u.data")
    assert data.digest == expected.digest


@pytest.mark.data("ml-latest-small")
def test_ml_latest_small() -> None:
    data = MovieLensLatestSmall().load()
    assert (data.n_users, data.n_items, len(data.items)) == (610, 9724, 100_836 - 2 * 610)
    check_disjoint(data)
    assert data.digest == MovieLensLatestSmall().load().digest != MovieLensLatestSmall(seed=1).load().digest


@pytest.mark.data("ml-1m/ml-1m.test.negative")
@pytest.mark.parametrize(("validation", "train"), [("random", 988_129), ("none", 994_169)])
def test_ml_1m_keeps_the_published_protocol(validation: Validation, train: int) -> None:
    folder = download.find("ml-1m", ("ml-1m.test.negative",))
    data = MovieLens1M(validation=validation).load()
    assert (data.n_users, data.n_items, len(data.items)) == (6040, 3706, train)
    check_disjoint(data)
    for user, line in enumerate((folder / "ml-1m.test.negative").read_text().splitlines()):
        pair, *negatives = line.split("\t")
        assert pair == f"({user},{data.test[user]})"
        assert [int(item) for item in negatives] == data.negatives[user].tolist()
    ratings = (line.split("\t") for line in (folder / "ml-1m.test.rating").read_text().splitlines())
    assert [int(item) for _, item, *_ in ratings] == data.test.tolist()
    assert (data.negatives == data.test[:, None]).sum() == 156
    known = np.zeros((6040, 3706), dtype=bool)
    known[np.repeat(np.arange(6040), data.examples), data.items] = True
    if validation == "random":
        known[np.arange(6040), data.validation] = True
    assert not known[np.arange(6040)[:, None], data.negatives].any()
    train_file = next(folder.glob("ml-1m.train.rating*"))
    content = train_file.read_bytes()
    lines = (gzip.decompress(content) if train_file.suffix == ".gz" else content).splitlines()
    given = {(int(user), int(item)) for user, item, *_ in (line.split(b"\t") for line in lines)}
    assert given == set(map(tuple, np.argwhere(known).tolist()))


RATINGS = [  # user, movie, stars, time; user 3's last row in time is its first row
    *((1, movie, 5, 100 + movie) for movie in range(300, 100, -2)),
    *((2, movie, 3, 500 - movie) for movie in range(101, 301)),
    *((3, movie, 1, 900 - movie) for movie in (150, 103, 222, 101)),
]


@pytest.fixture
def ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small `ratings.dat` in the folder where ml-1m is looked for."""
    path = tmp_path / "ml-1m" / "ratings.dat"
    path.parent.mkdir()
    path.write_text("".join(f"{u}::{m}::{s}::{t}\n" for u, m, s, t in RATINGS))
    monkeypatch.setenv(download.VARIABLE, str(tmp_path))
    return path


def ncf_numbers() -> dict[int, int]:
    return {movie: number for number, movie in enumerate(dict.fromkeys(movie for _, movie, *_ in RATINGS))}


def write_lists(folder: Path, negatives: int = 99) -> dict[int, int]:
    """NCF's two evaluation files for `RATINGS`: the last item by time; negatives 1, 2, ... regardless."""
    number = ncf_numbers()
    test = {u - 1: number[max((t, m) for v, m, _, t in RATINGS if v == u)[1]] for u in (1, 2, 3)}
    (folder / "ml-1m.test.rating").write_text("".join(f"{u}\t{i}\t4\t978300000\n" for u, i in test.items()))
    rows = (f"({u},{i})\t" + "\t".join(map(str, range(1, negatives + 1))) + "\n" for u, i in test.items())
    (folder / "ml-1m.test.negative").write_text("".join(rows))
    return test


def test_ratings_dat_is_split_by_time(ratings: Path) -> None:
    data = MovieLens1M(validation="second_last", min_interactions=100, seed=3, layout="ratings")
    with pytest.raises(UserError, match="leaves 0 of 200 items"):
        data.load()
    with ratings.open("a") as file:
        file.writelines(f"9::{movie}::5::7\n" for movie in range(1000, 1120))
    split = data.load()
    assert (split.n_users, split.n_items) == (3, 320)
    assert split.test.tolist() == [300 - 101, 0, 319]
    assert split.validation.tolist() == [298 - 101, 1, 318]
    assert MovieLens1M(min_interactions=100).load().source == str(ratings)


def test_ncf_training_file_is_rebuilt_from_ratings_dat(ratings: Path) -> None:
    test = write_lists(ratings.parent)
    train = ratings.parent / "ml-1m.train.rating"
    write_ncf_train(ratings, ratings.parent / "ml-1m.test.rating", train)
    number = ncf_numbers()
    rows = [(u - 1, number[m], s, t) for u, m, s, t in RATINGS]
    expected = [row for row in rows if test[row[0]] != row[1]]
    assert len(expected) == len(RATINGS) - 3
    assert train.read_text() == "".join("\t".join(map(str, row)) + "\n" for row in expected)

    data = MovieLens1M(validation="second_last").load()
    assert data.test.tolist() == [test[user] for user in range(3)]
    latest = {row[0]: row[1] for row in sorted(expected, key=lambda row: row[3])}
    assert data.validation.tolist() == [latest[user] for user in range(3)]
    assert data.n_items == 200
    assert (data.negatives == np.arange(1, 100)).all()
    check_disjoint(data)
    with pytest.raises(UserError, match=r'min_interactions is 5, but .* use layout "ratings"'):
        MovieLens1M(min_interactions=5).load()
    ratings.unlink()
    with pytest.raises(UserError, match=r'which is not the complete layout "ratings"; use another layout, or move'):
        MovieLens1M(layout="ratings").load()


def test_lists_of_other_ratings_are_refused(ratings: Path) -> None:
    write_lists(ratings.parent)
    test = ratings.parent / "ml-1m.test.rating"
    test.write_text("0\t100\n1\t1\n2\t2\n")
    with pytest.raises(UserError, match="a test item is not among its user's ratings"):
        write_ncf_train(ratings, test, ratings.parent / "ml-1m.train.rating")
    test.write_text("0\t1\n")
    with pytest.raises(UserError, match="expected one row for each user 0 to 2"):
        write_ncf_train(ratings, test, ratings.parent / "ml-1m.train.rating")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Three NCF files of three users without times, the training file gzipped, its test rows out of order."""
    with gzip.open(tmp_path / "tiny.train.rating.gz", "wt") as file:
        file.write("0\t4\t1\n0\t2\t1\n0\t4\t1\n1\t150\t1\n2\t5\t1\n2\t6\t1\n2\t9\t1\n")
    (tmp_path / "tiny.test.rating").write_text("2\t9\n0\t7\n1\t8\n")
    rows = (f"({pair})\t" + "\t".join(map(str, range(10, 109))) + "\n" for pair in ("2,9", "0,7", "1,8"))
    (tmp_path / "tiny.test.negative").write_text("".join(rows))
    return tmp_path / "tiny"


def test_ncf_files_keep_their_ids_and_lose_repeats_and_the_test_item(prefix: Path) -> None:
    data = NCF(path=prefix, validation="none").load()
    assert (data.name, data.n_items) == ("tiny", 151)
    assert [chunk.tolist() for chunk in np.split(data.items, data.indptr[1:-1])] == [[2, 4], [150], [5, 6]]
    assert data.test.tolist() == [7, 8, 9]
    drawn = NCF(path=prefix).load()
    assert drawn.validation[1] == NO_ITEM
    assert drawn.examples.tolist() == [1, 1, 1]
    assert len({NCF(path=prefix, seed=seed).load().digest for seed in range(20)}) == 4


def test_second_last_needs_times(prefix: Path) -> None:
    with pytest.raises(UserError, match=r'has no times, so .*; use "random" or "none"'):
        NCF(path=prefix, validation="second_last").load()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("test.negative", "\t108", "", "98 negatives per user, but the protocol needs 99"),
        ("test.negative", "\t108\n(0", "\n(0", "Expected 99 columns, got 100"),
        ("test.negative", "(0,7)", "(0,8)", r"its \(user,item\) pairs differ from the rows of tiny.test.rating"),
        ("test.negative", "(0,7)", "0,7", r"every row to begin with \(user,item\)"),
        ("test.negative", "\t55", "\t-1", "an item id is negative"),
        ("test.rating", "1\t8", "3\t8", "expected one row for each user 0 to 2"),
        ("test.rating", "\t", " ", "invalid value '2 9'"),
        ("test.rating", "1\t8", "1\tx", "invalid value 'x'"),
    ],
)
def test_malformed_ncf_files_are_user_errors(prefix: Path, file: str, old: str, new: str, message: str) -> None:
    path = prefix.with_name(f"tiny.{file}")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=f"^{prefix}.*{message}"):
        NCF(path=prefix).load()


def test_missing_users_files_and_columns_are_user_errors(prefix: Path) -> None:
    train = prefix.with_name("tiny.train.rating.gz")
    train.write_bytes(train.read_bytes()[:20])
    with pytest.raises(UserError, match=r"train.rating.gz: .*; download the file again"):
        NCF(path=prefix).load()
    train.write_bytes(gzip.compress(b"3\t1\t1\t0\n"))
    with pytest.raises(UserError, match="expected users 0 to 2"):
        NCF(path=prefix).load()
    train.write_bytes(gzip.compress(b"3\n"))
    with pytest.raises(UserError, match=r"expected at least 3 columns, separated by '\\t'"):
        NCF(path=prefix).load()
    train.unlink()
    with pytest.raises(UserError, match=r"tiny.train.rating \(or tiny.train.rating.gz\) does not exist"):
        NCF(path=prefix).load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Empty CSV file"),
        ("userId,movieId,rating\n1,2,3\n", "expected a header with userId, movieId, timestamp"),
        ("userId,movieId,rating,timestamp\n1,2,3,soon\n", "invalid value 'soon'"),
        ("userId,movieId,rating,timestamp\n1,2,3,\n", "invalid value ''"),
        ("userId,movieId,rating,timestamp\n1,2,3\n", "Expected 4 columns, got 3"),
        ("userId,movieId,rating,timestamp\n", r"no user has 20 interactions \(the most is 0\)"),
    ],
)
def test_malformed_ratings_are_user_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    path = tmp_path / "ml-latest-small" / "ratings.csv"
    path.parent.mkdir()
    path.write_text(text)
    monkeypatch.setenv(download.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        MovieLensLatestSmall().load()
    assert not isinstance(caught.value, pa.ArrowException)
    assert "\n" not in str(caught.value)


def test_models_are_frozen_and_refuse_what_they_do_not_know() -> None:
    model = MovieLens1M()
    assert (model.validation, model.layout, MovieLens100K().validation) == ("random", "auto", "second_last")
    with pytest.raises(UserError, match="frozen"):
        model.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        MovieLens100K.model_validate({"layout": "ncf"})
    with pytest.raises(UserError, match="greater than or equal to 3"):
        MovieLens100K(min_interactions=2)
