"""The tree gives one sum, bit for bit, however its leaves are shared out."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.distributed.tree import Stack, cover, root


def leaf(number: int) -> torch.Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number % 5)


def summed(bounds: list[int]) -> torch.Tensor:
    """The root from shares [bounds[i], bounds[i + 1]), each merged by a stack of its own."""
    values = {}
    for first, last in itertools.pairwise(bounds):
        stack = Stack()
        for number in range(first, last):
            stack.push(number, [leaf(number)])
        values |= {node: tensors[0] for node, tensors in zip(stack.nodes, stack.values, strict=True)}
    return root(values, bounds[-1])


@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=4))
def test_any_cut_into_shares_gives_the_same_bits(leaves: int, cuts: list[int]) -> None:
    whole = summed([0, leaves])
    parts = summed([0, *sorted(min(cut, leaves) for cut in cuts), leaves])
    assert torch.equal(whole, parts)


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_share_is_at_most_two_log_nodes_that_cover_it_in_order(start: int, length: int) -> None:
    nodes = cover(range(start, start + length))
    covered = [number for level, index in nodes for number in range(index << level, (index + 1) << level)]
    assert covered == list(range(start, start + length))
    assert len(nodes) <= 2 * math.log2(max(length, 1)) + 1


@given(st.integers(1, 64))
def test_the_stack_keeps_at_most_log_plus_one_values(leaves: int) -> None:
    stack = Stack()
    for number in range(leaves):
        stack.push(number, [leaf(number)])
        assert len(stack.values) <= math.log2(number + 1) + 1
    assert stack.nodes == cover(range(leaves))


def test_the_order_of_additions_matters_so_the_test_above_means_something() -> None:
    leaves = [leaf(number) for number in range(39)]
    assert not torch.equal(summed([0, 39]), sum(leaves[1:], leaves[0]))
