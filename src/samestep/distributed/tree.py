"""One fixed binary tree over a window's micro-batches: the order in which gradients are added, whoever adds them.

Node (level, index) stands for the leaves [index * 2**level, (index + 1) * 2**level) that exist. Its value is left + right,
or left alone where there is no right. A rank adds up its own share to as few nodes as it can, at most 2 log2(M); from
these anybody finishes the tree with the same additions, so the sum has the same bits for any number of ranks.
"""

from __future__ import annotations

import torch

__all__ = ["Node", "Stack", "added_copies", "are_siblings", "cover", "kept_nodes", "parent", "root"]

Node = tuple[int, int]
"""(level, index)."""


def parent(node: Node) -> Node:
    """The node above."""
    return node[0] + 1, node[1] // 2


def are_siblings(left: Node, right: Node) -> bool:
    """Whether the two are the left and the right child of one node."""
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


def cover(leaves: range) -> list[Node]:
    """The fewest nodes that make up these leaves, from left to right."""
    nodes: list[Node] = []
    for leaf in leaves:
        nodes.append((0, leaf))
        while len(nodes) > 1 and are_siblings(nodes[-2], nodes[-1]):
            nodes[-2:] = [parent(nodes[-1])]
    return nodes


def kept_nodes(leaves: range) -> int:
    """How many gradients a rank keeps apart at most while it works through these leaves, the last one not counted."""
    return max((len(cover(range(leaves.start, stop))) for stop in leaves), default=0)


def added_copies(shares: list[range]) -> float:
    """Gradients the exact exchange holds besides .grad on the busiest rank: kept apart, received, put together to send.

    The backend's own staging comes on top: gloo gathers into a copy.
    """
    kept = max(kept_nodes(share) for share in shares)
    if len(shares) == 1:
        return float(kept)
    sending = max(len(cover(share)) for share in shares)
    return kept + sum(len(cover(share)) for share in shares) / len(shares) + (sending if sending > 1 else 0)


def root(values: dict[Node, torch.Tensor], num_leaves: int) -> torch.Tensor:
    """The sum of all leaves, from nodes that cover them. Adds in place: the given tensors are used up."""
    level = max(num_leaves - 1, 0).bit_length()
    total = _value(values, (level, 0), num_leaves)
    assert total is not None
    return total


def _value(values: dict[Node, torch.Tensor], node: Node, num_leaves: int) -> torch.Tensor | None:
    if node in values:
        return values[node]
    level, index = node
    if index << level >= num_leaves:
        return None
    left = _value(values, (level - 1, 2 * index), num_leaves)
    right = _value(values, (level - 1, 2 * index + 1), num_leaves)
    assert left is not None
    return left if right is None else left.add_(right)


class Stack:
    """Leaves added one after the other, siblings merged as soon as both are there: at most log2 + 1 values are kept."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[list[torch.Tensor]] = []

    def push(self, leaf: int, tensors: list[torch.Tensor]) -> None:
        """Add one leaf's tensors, which are used up."""
        self.nodes.append((0, leaf))
        self.values.append(tensors)
        while len(self.nodes) > 1 and are_siblings(self.nodes[-2], self.nodes[-1]):
            torch._foreach_add_(self.values[-2], self.values.pop())
            self.nodes[-2:] = [parent(self.nodes[-1])]
