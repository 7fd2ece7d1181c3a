"""The page of what is there and what is left out names kinds that exist and links to pages that exist."""

from __future__ import annotations

import re

from narrowcast.experiment import Experiment
from narrowcast.platform.config.catalog import REGISTRIES
from pages import DOCS

PAGE = (DOCS / "left-out.md").read_text()
PAPERS = DOCS.parent / "papers" / "narrowcast_papers"


def test_every_kind_is_in_the_catalog() -> None:
    named = [tuple(span.split(": ")) for span in re.findall(r"`(\w+: [\w-]+)`", PAGE) if span != "registry: kind"]
    assert len(named) > 50
    assert [(registry, kind) for registry, kind in named if kind not in REGISTRIES[registry]] == []
    assert "start_from" in Experiment.model_fields


def test_every_link_leads_to_a_page() -> None:
    for target in set(re.findall(r"\]\(([\w./-]+\.md)", PAGE)):
        page = (
            PAPERS / target[len("papers/") : -len(".md")] / "README.md"
            if target.startswith("papers/")
            else DOCS / target
        )
        assert page.is_file(), target
