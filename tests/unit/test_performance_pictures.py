"""The pictures of the page on performance show the recorded figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pictures.diagrams import IMAGES
from tests.pictures.performance import FIGURES, Pair, Picture, as_json, recorded
from tests.readme import ROOT

PAGE = ROOT / "docs" / "performance.md"
MEASURED = Picture(
    "p", "title", "ms", "other", "m", "c", (Pair("a", 1, 2, "0 to 2", "b: s: ours", "b: s: other"),)
)


@pytest.mark.parametrize("picture", recorded(), ids=lambda picture: picture.name)
def test_a_picture_shows_its_figures_beside_the_machine_and_the_command(picture: Picture) -> None:
    drawn = picture.path.read_text()
    assert drawn == picture.svg(), "run python -m tests.pictures.performance"
    assert f"{picture.machine}: {picture.command}<" in drawn
    assert f"(images/{picture.path.name})" in PAGE.read_text()


def test_each_picture_has_figures() -> None:
    assert {each.path for each in recorded()} == set(IMAGES.glob("performance-*.svg"))
    assert FIGURES.read_text() == as_json(recorded())


def test_a_run_replaces_the_figures_of_a_picture_all_of_which_it_measured() -> None:
    new = MEASURED.measured({"b: s: ours": 3, "b: s: other": 4}, "there")
    assert new == replace(
        MEASURED, machine="there", pairs=(replace(MEASURED.pairs[0], ours=3, other=4, shown=""),)
    )
    assert MEASURED.measured({"b: s: ours": 3}, "there") == MEASURED
    unnamed = replace(MEASURED, pairs=(*MEASURED.pairs, Pair("b", 1, 2)))
    assert unnamed.measured({"b: s: ours": 3, "b: s: other": 4}, "there") == unnamed
