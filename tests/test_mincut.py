"""Minimum cuts against all cuts there are."""

import itertools
import random

import pytest

from pipejax.mincut import minimum_cut


def cost(capacities, there):
    cut = [capacity for (start, end), capacity in capacities.items() if start not in there and end in there]
    return None if None in cut else sum(cut)


def test_the_narrow_place_is_cut():
    wide = {("s", "a"): 9, ("s", "b"): 9, ("a", "c"): 2, ("b", "c"): 1, ("c", "t"): 4}
    assert minimum_cut(wide, "s", "t") == {"c", "t"}
    assert minimum_cut({**wide, ("a", "c"): 4}, "s", "t") == {"t"}
    assert minimum_cut({**wide, ("a", "c"): None}, "s", "t") == {"t"}


def test_of_equal_cuts_the_one_nearest_to_the_sink():
    assert minimum_cut({("s", "a"): 2, ("a", "b"): 2, ("b", "t"): 2}, "s", "t") == {"t"}


def test_nothing_is_cut_where_nothing_flows():
    assert minimum_cut({}, "s", "t") == {"t"}
    assert minimum_cut({("s", "a"): 3, ("b", "t"): None}, "s", "t") == {"b", "t"}


@pytest.mark.parametrize("seed", range(5))
def test_no_cut_is_cheaper_in_random_networks(seed):
    draw = random.Random(seed)
    for _ in range(60):
        size = draw.randint(2, 7)
        pairs = [pair for pair in itertools.permutations(range(size), 2) if draw.random() < 0.5]
        capacities = {pair: None if draw.random() < 0.15 else draw.randint(0, 6) for pair in pairs}
        sides = [{size - 1, *some} for n in range(size) for some in itertools.combinations(range(1, size - 1), n)]
        costs = [(cost(capacities, side), len(side)) for side in sides]
        allowed = [pair for pair in costs if pair[0] is not None]
        if allowed:
            found = minimum_cut(capacities, 0, size - 1)
            assert (cost(capacities, found), len(found)) == min(allowed)
