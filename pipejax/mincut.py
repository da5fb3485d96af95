"""The cheapest way to cut a network in two."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Mapping

_Left = Mapping[Hashable, dict[Hashable, int]]


def minimum_cut(
    capacities: Mapping[tuple[Hashable, Hashable], int | None], source: Hashable, sink: Hashable
) -> set[Hashable]:
    """Cuts edges of the least total capacity, so that no path leads from source to sink (Dinic 1970).

    Args:
      capacities: of each directed edge (from, to); None for an edge that must not be cut.
      source, sink: nodes to part. Every path between them has an edge that may be cut.

    Returns:
      The nodes on the sink's side; of several cheapest cuts, those of the one nearest to the sink.
    """
    unlimited = 1 + sum(capacity for capacity in capacities.values() if capacity is not None)
    left: dict[Hashable, dict[Hashable, int]] = collections.defaultdict(dict)
    for (start, end), capacity in capacities.items():
        left[start][end] = left[start].get(end, 0) + (unlimited if capacity is None else capacity)
        left[end].setdefault(start, 0)
    while sink in (level := _levels(left, source)):
        _fill(left, level, source, sink)
    backwards = {node: {other: left[other][node] for other in neighbours} for node, neighbours in left.items()}
    return set(_levels(backwards, sink))


def _levels(left: _Left, start: Hashable) -> dict[Hashable, int]:
    """How many edges with capacity left it takes to reach each node that can be reached."""
    level, queue = {start: 0}, collections.deque([start])
    while queue:
        node = queue.popleft()
        for other, capacity in left.get(node, {}).items():
            if capacity and other not in level:
                level[other] = level[node] + 1
                queue.append(other)
    return level


def _fill(left: _Left, level: dict[Hashable, int], source: Hashable, sink: Hashable) -> None:
    """Sends flow along shortest paths until none of them has capacity left."""
    neighbours = {node: list(left[node]) for node in level}
    path = [source]
    while path:
        node = path[-1]
        if node == sink:
            edges = list(itertools.pairwise(path))
            amount = min(left[start][end] for start, end in edges)
            for start, end in edges:
                left[start][end] -= amount
                left[end][start] += amount
            path = [source]
            continue
        # From the last neighbour to the first; one that leads nowhere in this round is never looked at again.
        others = neighbours[node]
        while others and not (left[node][others[-1]] and level.get(others[-1]) == level[node] + 1):
            others.pop()
        if others:
            path.append(others[-1])
        else:
            path.pop()
            if path:
                neighbours[path[-1]].pop()
