"""What sources with shares mean. References: numbers worked out by hand, and numpy's integral of the interpolated points."""

import json

import numpy as np
import pytest

from common.errors import DataError
from dataset.shares import Curve, Point, Source, group_sources, read_mixture, source_of_argument

COURSES = [
    [(0, 0.0), (1, 1.0)],
    [(0.3, 0.5)],
    [(0, 0.8), (0.9, 0.8), (0.9, 0.2), (1, 0.2)],
    [(0.1, 0.0), (0.5, 0.0), (0.5, 1.0), (0.6, 0.0)],
    [(0, 0.25), (0.25, 1.0), (1, 0.0)],
]


@pytest.mark.parametrize("path", ["a.jsonl", r"C:\texts\a.jsonl", "odd:name"])
def test_an_argument_is_a_path_with_shares_and_passes(path):
    assert source_of_argument(path) == Source([path], None, 1)
    for words, shares, repeat in (
        (":0.7..0.2", [0.7, 0.2], 1),
        (":0.7>0.2", [0.7, 0.2], 1),
        (":1...5", [1, 0.5], 1),
        (":0.7..0.2:x2.5", [0.7, 0.2], 2.5),
        (":7", [7], 1),
    ):
        assert source_of_argument(path + words) == Source([path], tuple(map(Point, range(2), shares)), repeat)


def test_contradictions_on_the_command_line_are_one_line():
    for arguments, why in (
        (["a:0.7..0.2", "b:0.3"], "shares sum to 1 at the start and to 0.5 at 1 of the run"),
        (["a:0.7..0.2", "b"], "give every source a share, or none; b has none"),
        (["a:0.5:x0", "b:0.5"], "repeat is 0; 1 to 1,000 passes are possible"),
        (["a:-1..1", "b:2..0"], "--data_path a:-1..1: a share is a number from 0 to 1e[+]09, and"),
    ):
        with pytest.raises(DataError, match=why) as caught:
            group_sources(arguments)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("course", COURSES)
def test_the_area_under_a_curve_and_back(course):
    curve = Curve([Point(*point) for point in course])
    grid = np.linspace(0, 1, 200_001)
    x, y = zip(*course, strict=True)
    # At a jump numpy takes the second of two points: the grid has a value there, which adds nothing to an area.
    areas = np.append(0, np.cumsum(np.interp((grid[1:] + grid[:-1]) / 2, x, y) / (len(grid) - 1)))
    for at in range(0, len(grid), 10_000):
        assert curve.area(grid[at]) == pytest.approx(areas[at], abs=1e-5)
    asked = np.linspace(1e-6, curve.area(1.0) * (1 - 1e-6), 1000)
    moments = curve.where(asked)
    assert (np.diff(moments) >= 0).all() and moments[0] >= 0 and moments[-1] <= 1
    assert np.allclose(np.interp(moments, grid, areas), asked, atol=1e-5)


def test_a_file_says_what_the_command_line_cannot(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text(
        "sources:\n  - path: [web/, more.jsonl]\n    share: [[0, 0.8], [0.9, 0.8], [1, 0.2]]\n"
        "  - path: books.jsonl\n    share: [[0.0, 0.2], [0.9, 0.2], [1, 0.8]]\n    repeat: 4\n"
    )
    web, books = read_mixture(path)
    assert web == Source(["web/", "more.jsonl"], (Point(0, 0.8), Point(0.9, 0.8), Point(1, 0.2)))
    assert books == Source(["books.jsonl"], (Point(0, 0.2), Point(0.9, 0.2), Point(1, 0.8)), repeat=4)
    as_json = tmp_path / "mix.json"
    as_json.write_text(json.dumps({"sources": [{"path": "a", "share": 0.5}, {"path": "b", "share": 1, "repeat": 2}]}))
    assert read_mixture(as_json) == group_sources(["a:0.5", "b:1:x2"])


def test_a_file_that_is_no_mixture_is_one_line(tmp_path):
    for text, why in (
        ("sources: [{path: a, share: 1}]\nepochs: 3", "expected a list `sources:` and nothing else"),
        ("sources: [{path: a, share: 1, repeats: 2}]", "source 1: expected path"),
        ("sources: [{path: a, share: much}]", "source 1: expected path"),
        ("sources: [{path: a, share: nan}]", "a share is a number from 0 to 1e"),
        ("sources: [{path: a, share: [[0, 0], [1, 0], [1, 1]]}]", "the share is 0 from start to end"),
        ("sources: [{path: a, share: [[0.5, 1], [0.2, 1]]}]", "the progress of its points rises from 0 to 1"),
        ("sources: !!python/object/apply:os.system [touch]", "source 1: expected path"),
        ("sources: [{path: a, share: [[0, 2], [0.5, 2], [0.5, 3]]}]", "sum to 2 at the start and to 3 at 0.5"),
    ):
        path = tmp_path / "mix.yaml"
        path.write_text(text)
        with pytest.raises(DataError, match="--mixture") as caught:
            read_mixture(path)
        assert why in str(caught.value) and "\n" not in str(caught.value)
