"""docs/gpu.md. References: the formulas of the trainer, and figures that the page shows beside them."""

import pytest

from benchmarks import cards
from tests.helpers import ROOT
from trainer.pretrain.flops import flops_per_token


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", cards.TABLES)
def test_a_table_of_the_page_is_what_the_formula_gives(page, title):
    table = "\n".join(cards.TABLES[title]())
    assert table in page, f"python benchmarks/cards.py prints the tables; docs/gpu.md has another one of {title}"


def test_the_arithmetic_of_one_card(page):
    """26 M, 32 rows of 512."""
    of_token = flops_per_token(cards.config_of("26m"), cards.CONTEXT)
    of_micro_batch = of_token * 32 * cards.T
    assert f"{of_token / 1e6:.0f} MFLOP" in page
    assert f"{of_micro_batch / 1e12:.2f} TFLOP" in page
    least = 1e3 * of_micro_batch / 790e12
    assert f"{least:.1f} ms: no code" in page
    # 38 to 43 % of the product rate
    assert round(least / 0.43) == 8 and round(least / 0.38) == 9


def test_more_memory_holds_more_rows():
    for size in cards.NAMES:
        rows = [cards.most_rows(size, gigabytes) for gigabytes in (6, 16, 80)]
        assert rows == sorted(rows) and rows[0] > 0
        assert cards.peak(size, rows[0]) <= cards.SAFE_SHARE * 6e9 < cards.peak(size, 2 * rows[0])
