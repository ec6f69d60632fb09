"""Moving a batch: every tensor, whatever it is in; the caller's own object stays as it was."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

import samestep
from samestep.data.move import move, prefetched

META, CPU = torch.device("meta"), torch.device("cpu")


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict | collections.UserDict):
        return [each for item in value.values() for each in tensors(item)]
    return [each for item in value for each in tensors(item)] if isinstance(value, list | tuple) else []


LEAVES = st.builds(lambda n: torch.ones(n), st.integers(0, 3)) | st.integers() | st.text() | st.none() | st.booleans()
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(NESTED)
def test_every_tensor_moves_and_everything_else_stays(value: Any) -> None:
    moved = move(value, META)
    assert all(each.device == META for each in tensors(moved))
    assert all(each.device == CPU for each in tensors(value))
    assert len(tensors(moved)) == len(tensors(value))
    assert type(moved) is type(value)
    if not tensors(value):
        assert moved == value


class Point(NamedTuple):
    """Named."""

    x: torch.Tensor
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Cannot be assigned to."""

    x: torch.Tensor
    inner: list[torch.Tensor]


class Stacked(list):
    """A list with an attribute."""

    label = "none"


class Encoding(dict):
    """A dict with a constructor of its own."""

    def __init__(self, data: dict, *, kind: str) -> None:
        super().__init__(data)
        self.kind = kind


def test_custom_containers_keep_type_attributes_and_factory() -> None:
    one = torch.ones(1)
    stacked = Stacked([one])
    stacked.label = "mine"
    default = collections.defaultdict(list, a=[one])
    encoding = Encoding({"ids": one}, kind="bert")
    point, frozen = Point(one), Frozen(one, [one])
    out = move((stacked, default, encoding, point, frozen, collections.OrderedDict(b=one, a=one)), META)
    assert (type(out[0]), out[0].label, out[0][0].device) == (Stacked, "mine", META)
    assert out[1]["missing"] == []
    assert "missing" not in default
    assert (type(out[2]), out[2].kind, out[2]["ids"].device) == (Encoding, "bert", META)
    assert (type(out[3]), out[3].x.device, out[3].y) == (Point, META, None)
    assert (out[4].x.device, out[4].inner[0].device) == (META, META)
    assert list(out[5]) == ["b", "a"]
    assert {stacked[0].device, default["a"][0].device, encoding["ids"].device, frozen.x.device} == {CPU}


def test_objects_with_a_to_of_their_own_are_asked() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert move([packed], CPU)[0].data.device == CPU
    assert type(move(packed, CPU)) is type(packed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float16])
def test_dtypes_and_strides_stay(dtype: torch.dtype) -> None:
    value = torch.ones(2, 3).to(dtype).t()
    moved = samestep.move({"x": value}, META)["x"]
    assert (moved.dtype, moved.stride()) == (dtype, value.stride())


def test_what_is_there_already_is_not_copied() -> None:
    value = torch.ones(2)
    assert move(value, CPU) is value


def test_batches_come_in_order_and_lazily() -> None:
    asked: list[int] = []

    def batches() -> Any:
        for number in range(3):
            asked.append(number)
            yield torch.full((1,), float(number))

    stream = prefetched(batches(), CPU)
    assert asked == []
    assert next(stream).item() == 0.0
    assert asked == [0], "a batch is not fetched before it is needed"
    assert [each.device.type for each in prefetched(batches(), META)] == ["meta"] * 3
