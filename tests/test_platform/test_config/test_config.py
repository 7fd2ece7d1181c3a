"""Experiment files: how they are read and overridden, and what the errors say."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.config.files import apply_overrides, command, flatten, suggest, validate
from narrowcast.platform.config.yaml import read_yaml, write_yaml
from narrowcast.platform.errors import UserError
from narrowcast.tuning.study_file import load_study

MINIMAL: dict[str, Any] = {"data": "ml-100k", "algorithm": {"kind": "scolr"}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5e-4", 5e-4),
        ("1E3", 1000.0),
        ("2", 2),
        ("0o17", 15),
        ("017", 17),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("12:30", "12:30"),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        ("{a: {b: 1e-3}}", {"a": {"b": 1e-3}}),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    got = read_yaml(text, "x")
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: {c: 2\nd: 3\n", "my.yaml, line 3, column 2"),
        ("a: 1\n  b: 2\n", "my.yaml, line 2, column 4"),
        ("a: 1\na: 2\n", "my.yaml, line 2, column 1"),
        ("a: 1\n---\nb: 2\n", "my.yaml, line 2, column 1"),
        ("a: [1, 2\n", "my.yaml, line 2, column 1"),
        ("a:\n\t- 1\n", "my.yaml, line 2, column 1"),
        ("a: !!python/object/apply:os.system [false]\n", "my.yaml, line 1, column 4"),
    ],
)
def test_a_syntax_error_names_file_line_and_column(text: str, place: str) -> None:
    with pytest.raises(UserError) as caught:
        read_yaml(text, "my.yaml")
    message = str(caught.value)
    assert message.startswith(f"{place}: not valid YAML: ")
    assert message.endswith("; correct the file")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["rounds=7"], {"rounds": 7}),
        (["rate=1e-3"], {"rate": 1e-3}),
        (["a.b.c=1"], {"a": {"b": {"c": 1}}}),
        (["a=1", "a.b=2"], {"a": {"b": 2}}),
        (["text=a=b"], {"text": "a=b"}),
        (["gone="], {"gone": None}),
        (["tiers.1.share=5"], {"tiers": [{"share": 1}, {"share": 5}]}),
        (["tiers.0={share: 9}"], {"tiers": [{"share": 9}, {"share": 2}]}),
        (["tiers=[]"], {"tiers": []}),
        (["algorithm.kind=colr"], {"algorithm": {"kind": "colr"}}),
        (["algorithm.kind=colr", "algorithm.rank=2"], {"algorithm": {"kind": "colr", "rank": 2}}),
        (["algorithm.kind=scolr"], {"algorithm": {"kind": "scolr", "rank": 8}}),
        (["algorithm=colr", "algorithm.rank=2"], {"algorithm": {"kind": "colr", "rank": 2}}),
    ],
)
def test_overrides_set_dotted_paths(overrides: list[str], wanted: dict[str, Any]) -> None:
    values = {"algorithm": {"kind": "scolr", "rank": 8}, "tiers": [{"share": 1}, {"share": 2}]}
    assert apply_overrides(values, overrides) == {**values, **wanted}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds", '"rounds" is not an override; write a.b=value, such as algorithm.rank=8'),
        ("=3", '"=3" is not an override'),
        ("a..b=3", '"a..b=3" is not an override'),
        (".a=3", '".a=3" is not an override'),
        ("a.=3", '"a.=3" is not an override'),
        ("a={b", "override a, line 1, column"),
        ("tiers.3.share=5", 'override tiers.3.share: "3" is not an element of a list of 2; use 0 to 1, or 2 to append'),
        ("tiers.x=5", 'override tiers.x: "x" is not an element of a list of 2'),
        ("tiers.-1=5", 'override tiers.-1: "-1" is not an element of a list of 2'),
    ],
)
def test_a_malformed_override_says_how_to_write_one(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_overrides({"tiers": [{}, {}]}, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.rnk=3"], 'algorithm.rnk is unknown; known here: .*rank, .*Did you mean "rank"'),
        (["round=3"], 'f: round is unknown; known here: .*rounds.*Did you mean "rounds"'),
        (["training.lerning_rate=1"], 'training.lerning_rate is unknown.*Did you mean "learning_rate"'),
        (["fleet={kind: tiers, tiers: [{nam: a}]}"], 'fleet.tiers.0.nam is unknown; .*Did you mean "name"'),
        (["algorithm.rank_policy={kind: uniform, x: 1}"], "algorithm.rank_policy.x is unknown; known here: kind"),
        (["algorithm.kind=scolar"], 'algorithm.kind = "scolar" is unknown; known: .*Did you mean "scolr"'),
        (["fleet=tires"], 'fleet.kind = "tires" is unknown; known: tiers, lognormal, trace. Did you mean "tiers"'),
        (["algorithm={rank: 3}"], "algorithm.kind is missing; add kind: ..."),
        (["data={kind: ncf}"], "data.path is missing"),
        (["algorithm.rank=many"], "algorithm.rank = 'many': should be a valid integer"),
        (["algorithm.rank=0"], "algorithm.rank = 0: should be greater than or equal to 1"),
        (["algorithm.rank=1.5"], "algorithm.rank = 1.5: should be a valid integer"),
        (["sampling=none"], 'sampling.kind = "none" is unknown; known: round_robin, uniform, by_examples, poisson'),
        (["training=fast"], 'training.kind = "fast" is unknown; known: factorisation_sgd, sgd'),
        (["fleet={kind: trace, path: nowhere.csv}"], "fleet = .*no file nowhere.csv; give the path of a CSV file"),
        (["rounds=0", "seed=-1"], "seed = -1: .*; rounds = 0: "),
        (["a=1", "b=1", "c=1", "d=1", "e=1", "f=1"], r"a is unknown.*d is unknown.*\(and 2 more\)$"),
    ],
)
def test_a_bad_value_is_named_with_what_was_got_and_what_is_allowed(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        validate(Experiment, apply_overrides(deepcopy(MINIMAL), overrides), "f")
    assert str(caught.value).startswith("f: ")
    assert "\n" not in str(caught.value)


def test_what_is_wrong_between_the_fields_of_a_section_is_said_without_a_dump_of_it(tmp_path: Path) -> None:
    late = ["schedule={kind: buffered, concurrency: 20, buffer_size: 10}", "deadline_seconds=3"]
    with pytest.raises(UserError, match=r"^fedavg-digits.yaml: schedule = buffered: has no rounds; leave out radio"):
        load_experiment("fedavg-digits", late)
    (tmp_path / "study.yaml").write_text(
        "experiment: fedavg-digits\nspace: {training.learning_rate: {kind: float, low: 0.1, high: 1}}\n"
        "study: {objectives: {validation.accuracy: maximize, total_bits: minimize}, pruner: median, trials: 20}\n"
    )
    with pytest.raises(UserError, match=r"study.yaml: study.pruner.on is missing: one of validation.accuracy$"):
        load_study(str(tmp_path / "study.yaml"))
    with pytest.raises(UserError, match=r": study.sampler = cma_es is for one objective; use tpe, gp or nsga2$"):
        load_study(str(tmp_path / "study.yaml"), ["study.sampler=cma_es", "study.pruner=none"])


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("test.f1", ["test.loss", "test.accuracy"], ""),  # what they share is their section
        ("test.los", ["test.loss", "test.accuracy"], '. Did you mean "test.loss"?'),
        ("test.uplink_bits", ["test.loss", "uplink_bits"], '. Did you mean "uplink_bits"?'),
        ("fedavgg", ["fedavg", "fedprox"], '. Did you mean "fedavg"?'),
    ],
)
def test_names_of_one_section_are_compared_without_it(word: str, known: list[str], said: str) -> None:
    assert suggest(word, known) == said


def test_a_printed_command_can_be_pasted() -> None:
    assert command("ui", "--output", Path("my runs/ünï")) == "narrowcast ui --output 'my runs/ünï'"


def test_an_empty_file_is_said_to_be_empty() -> None:
    with pytest.raises(UserError, match="f: the file is empty; give a mapping"):
        validate(Experiment, None, "f")


@pytest.mark.parametrize("values", [[1], "text", 3])
def test_what_is_no_mapping_is_refused(values: Any) -> None:
    with pytest.raises(UserError, match=r"f: should be a mapping at the top, .* got"):
        validate(Experiment, values, "f")


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "nan", "inf", "1e999"])
@pytest.mark.parametrize("path", ["training.learning_rate", "fleet.tiers.0.share", "clock.server_seconds"])
def test_numbers_are_finite(path: str, number: str) -> None:
    tier = {"name": "a", "share": 1, "uplink_mbit_per_second": 1, "downlink_mbit_per_second": 1}
    values = {**MINIMAL, "fleet": {"kind": "tiers", "tiers": [tier]}}
    with pytest.raises(UserError, match=f"f: {path} = '?-?(nan|inf)'?: should be"):
        validate(Experiment, apply_overrides(values, [f"{path}={number}"]), "f")


def test_flatten_gives_dotted_keys_and_keeps_plain_lists() -> None:
    values = {"a": 1, "b": {"c": None, "d": {"e": [1, 2]}}, "f": [{"g": 1}, {"g": [2]}], "h": [], "i": {}}
    assert flatten(values) == {"a": 1, "b.c": None, "b.d.e": [1, 2], "f.0.g": 1, "f.1.g": [2], "h": []}


def test_written_yaml_reads_back_equal_and_in_order(tmp_path: Path) -> None:
    values = {
        "z": 1e-3,
        "a": {"text": "yes", "number": "017", "none": None, "flag": True, "colon": "a: b # c", "empty": ""},
        "list": [{"x": 1.0}, {"x": 1e300}],
        "unicode": "é\n\ttwo lines",
    }
    write_yaml(values, tmp_path / "values.yaml")
    text = (tmp_path / "values.yaml").read_text()
    back = read_yaml(text, "values.yaml")
    assert back == values
    assert list(back) == list(values)
    assert text.startswith("z: ")


_BOMB = "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_BOMB, "more than 100000 values"),
        ("a: &a {b: *a}\n", "contains it"),
        ("[" * 100_000, "levels of nesting"),
        ("- " * 100_000, "levels of nesting"),
        ("a: " + "x" * 2**20, "more than 1048576 bytes"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: !!timestamp 2026-99-99\n", "not valid YAML"),
        ("a: !!bool maybe\n", "not valid YAML: a value is not of its tag"),
        ("a: !!int _\n", "not valid YAML: a value is not of its tag"),
        ("? &x [{a: 1}]\n: 2\n", "not valid YAML: unhashable type"),
    ],
    ids=["aliases", "itself", "flow", "block", "long", "digits", "date", "truth", "number", "key"],
)
def test_a_text_that_stands_for_too_much_is_refused_in_one_line(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text)
    for read in (
        lambda: read_yaml(text, "my.yaml"),
        lambda: load_experiment(str(tmp_path / "my.yaml")),
        lambda: load_study(str(tmp_path / "my.yaml")),
        lambda: apply_overrides({}, [f"algorithm={text}"]),
    ):
        with pytest.raises(UserError, match=problem) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_aliases_within_the_limit_are_read() -> None:
    assert read_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "x") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(UserError, match="not a text in UTF-8"):
        load_experiment(str(tmp_path / "my.yaml"))
