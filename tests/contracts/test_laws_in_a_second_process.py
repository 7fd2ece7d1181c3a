"""What depends on the process that computes it is found by `narrowcast check`, with its cause."""

from __future__ import annotations

from typing import Any

import pytest
from test_registries import tried

import process_dependent
from narrowcast.laws import second_process
from narrowcast.laws.registries import DIGESTS, LAWS
from sampling import sampled


@pytest.mark.parametrize("registry", sampled(process_dependent.CLASSES, {"algorithm", "codec"}))
def test_a_class_that_depends_on_its_process_is_found(registry: str) -> None:
    make, because = process_dependent.CLASSES[registry]
    cases = dict([next(iter(LAWS[registry].cases(make()).items()))])
    with second_process.started(DIGESTS[registry], cases) as verdict:
        reason = verdict().reason
    assert because in (reason or "it holds")


@pytest.mark.slow
def test_what_fails_in_another_process_is_said(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent_there.py").write_text("def digest_of(case): return 'here'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import absent_there

    with second_process.started(absent_there.digest_of, {"": 1}) as verdict:
        assert verdict().reason is None
    with second_process.started(absent_there.digest_of, {"": lambda: 1}) as verdict:
        assert "cannot be pickled" in str(verdict().reason)
    (tmp_path / "absent_there.py").write_text("raise ImportError('not there')\n")
    with second_process.started(absent_there.digest_of, {"": 1}) as verdict:
        assert verdict().reason == "it fails there: ImportError: not there"


@pytest.mark.slow
def test_no_class_of_the_catalog_depends_on_its_process() -> None:
    cases = {}
    for each in tried():
        registry, value = each.values
        if registry.name in DIGESTS:
            label, case = next(iter(LAWS[registry.name].cases(value).items()), ("", None))
            cases |= {} if case is None else {f"{each.id} {label}": (DIGESTS[registry.name], case)}
    assert len(cases) > 60
    with second_process.started(process_dependent.digest_of, cases) as verdict:
        assert verdict().reason is None
