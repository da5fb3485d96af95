"""The projection reproduces what the paper measured (arXiv 2503.01328, figure 1 and its table of MFU)."""

import numpy as np
import pytest

from benchmarks import against_paper

# The paper's 59 % there stands out of its own table: 68 % for 10.5B, and 66 % for this model at half the length.
OUTLIER = ("18.1B", 16384, "gis-h")


def test_what_a_fast_link_hides_costs_nothing():
    cells = [(k, ours) for _, _, k, _, ours in against_paper.fig1() if k < 0.95]
    assert len(cells) == 12
    assert max(ours for _, ours in cells) <= 1


def test_slowdowns_on_a_slow_link_are_ranked_as_measured():
    assert against_paper.rank_correlation() >= 0.9


@pytest.mark.parametrize(("hidden", "length", "k"), [(4096, 4096, 1.70), (8192, 4096, 0.92), (10240, 4096, 0.74)])
def test_k_is_the_papers(hidden, length, k):
    assert against_paper.transfer_ratio(hidden=hidden, length=length) == pytest.approx(k, abs=0.01)


def test_mfu_is_within_five_percent_by_rates_fitted_to_other_models():
    errors = {(row.model, row.length, row.schedule): ours / row.mfu - 1 for row, ours in against_paper.projected()}
    assert len(errors) == 42
    assert {key for key, error in errors.items() if abs(error) > 0.05} == {OUTLIER}


def test_a_constant_guess_would_fail():
    measured = np.array([row.mfu for row in against_paper.rows()])
    best = 2 / (1 / measured.min() + 1 / measured.max())  # the guess whose worst relative error is least
    assert np.abs(best / measured - 1).max() > 0.05
