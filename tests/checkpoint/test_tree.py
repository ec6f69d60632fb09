import collections
import enum
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from samestep.checkpoint.tree import STORED_DTYPES, flatten, unflatten
from samestep.errors import CheckpointError

NAMES = """bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64
complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = [getattr(torch, name) for name in NAMES.split()]


def there_and_back(state):
    value, tensors = flatten(state, "state")
    assert all(tensor.dtype in STORED_DTYPES for tensor in tensors.values())
    return unflatten(json.loads(json.dumps(value, allow_nan=False)), tensors)


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of arbitrary bits (bools: of 0 and 1)."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) * 37 + 11).to(torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


tensors = st.builds(filled, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple))
arrays = st.builds(
    lambda dtype, shape: np.full(shape, 3, dtype),
    st.sampled_from(["bool", "int8", "uint16", "uint32", "int64", "float16", "float32", "float64", "complex128"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.sampled_from(DTYPES) | tensors | arrays
)  # fmt: skip
keys = (
    st.integers() | st.text(max_size=3) | st.sampled_from(["$", "is", "a.b", "a", "__metadata__", "\ud800", "[0]", ""])
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=300)
@given(states)
def test_every_state_comes_back_to_the_bit_and_the_type(same, state):
    assert same(there_and_back(state), state)


def test_names_that_look_alike_keep_their_own_tensors(same):
    state = {"a": {"b": torch.zeros(1), 1: torch.ones(1), "1": torch.full((1,), 2.0)}, "a.b": torch.full((1,), 3.0)}
    assert same(there_and_back(state), state)


def test_a_mapping_with_more_to_it_comes_back_as_a_dict():
    filled_default = collections.defaultdict(list, a=[1])
    assert there_and_back({"o": collections.OrderedDict(b=1, a=2), "d": filled_default}) == {
        "o": {"b": 1, "a": 2},
        "d": {"a": [1]},
    }
    assert type(there_and_back(filled_default)) is dict


def test_numpy_scalars_come_back_as_numpy_scalars():
    for value in (np.float32(0.1), np.int64(-3), np.bool_(True), np.float64("nan"), np.uint32(7)):
        got = there_and_back([value])[0]
        assert type(got) is type(value)
        assert got.tobytes() == value.tobytes()


def test_arrays_that_are_read_only_reversed_or_of_the_other_byte_order_come_back_equal():
    fixed = np.arange(4)
    fixed.flags.writeable = False
    for array in (fixed, np.arange(6)[::-2], np.arange(3, dtype=">i4")):
        assert there_and_back({"x": array})["x"].tolist() == array.tolist()


def test_conjugates_transposes_and_expanded_tensors_come_back_as_values():
    z = torch.tensor([1 + 2j, 3 - 1j])
    for tensor in (z.conj(), z.conj().imag, torch.arange(6).reshape(2, 3).T, torch.ones(1).expand(4)):
        got = there_and_back({"x": tensor})["x"]
        assert torch.equal(got, tensor)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"foo": [0, 1, 2, lambda: 0]}, r"^schedule\.foo\[3\] is a function; .*leave it out of state_dict"),
        ({"a": {"b": ({1, 2},)}}, r"^schedule\.a\.b\[0\] is a set"),
        ({"p": collections.namedtuple("Point", "x y")(1, 2)}, r"^schedule\.p is a Point"),
        ({"e": enum.IntEnum("Phase", "WARM COLD").WARM}, r"^schedule\.e is a Phase"),
        ({"g": torch.Generator()}, r"^schedule\.g is a Generator"),
        ({"t": torch.eye(2).to_sparse()}, r"^schedule\.t is a Tensor \(torch\.sparse_coo"),
        ({"t": torch.zeros(2, device="meta")}, r"^schedule\.t is a Tensor .* on meta"),
        ({"t": torch.nn.LazyLinear(2).weight}, r"^schedule\.t is a UninitializedParameter"),
        ({"n": np.array(["a", "b"])}, r"^schedule\.n is a numpy ndarray of dtype <U1"),
        ({"n": np.array([{}], dtype=object)}, r"^schedule\.n is a numpy ndarray of dtype object"),
        ({"d": {(1, 2): 3}}, r"^schedule\.d has the key \(1, 2\)"),
        ({"d": {True: 3}}, r"^schedule\.d has the key True"),
    ],
)
def test_what_cannot_be_held_is_refused_by_its_place(state, message):
    with pytest.raises(CheckpointError, match=message):
        flatten(state, "schedule")


def test_a_state_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="holds itself"):
        flatten(loop, "user")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor", "is": "gone"}, {"$": "pickle", "is": "gASVCg=="}, {"$": "dtype", "is": "load"}, {"$": "float"},
        {"$": "dict", "is": [1, 2]}, {"$": "tuple", "is": 3}, {"$": "bytes", "is": "?"},
    ],
)  # fmt: skip
def test_json_that_flatten_does_not_make_is_refused(value):
    with pytest.raises(CheckpointError, match="state cannot be read"):
        unflatten({"a": value}, {})


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, 3, mode="exp_range", gamma=0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "swa": lambda o: SWALR(o, 0.01, 4),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [1, 2])], [3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_restored_schedule_gives_the_rates_of_the_uninterrupted_one(same, name):
    def build():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULES[name](optimizer)

    def rates(optimizer, schedule, steps):
        for _ in range(steps):
            optimizer.step()
            schedule.step(*([1.0] if name == "plateau" else []))
            yield optimizer.param_groups[0]["lr"]

    optimizer, schedule = build()
    list(rates(optimizer, schedule, 4))
    saved = there_and_back({"o": optimizer.state_dict(), "s": schedule.state_dict()})
    assert same(saved["s"], schedule.state_dict())
    again, restored = build()
    restored.load_state_dict(saved["s"])
    again.load_state_dict(saved["o"])
    assert list(rates(again, restored, 6)) == list(rates(optimizer, schedule, 6))


def test_c25_generators_of_python_numpy_and_torch_continue():
    np.random.seed(0)
    random.seed(0)
    own, new = torch.Generator().manual_seed(3), np.random.default_rng(5)
    assert round(np.random.rand(), 6) == 0.548814
    state = there_and_back(
        {
            "numpy": np.random.get_state(),
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "own": own.get_state(),
            "new": new.bit_generator.state,
        }
    )
    expected = (np.random.rand(), random.random(), torch.rand(2).tolist(), torch.rand(2, generator=own), new.random())
    assert round(expected[0], 6) == 0.715189
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    own.set_state(state["own"])
    new.bit_generator.state = state["new"]
    assert np.random.rand() == expected[0]
    assert random.random() == expected[1]
    assert torch.rand(2).tolist() == expected[2]
    assert torch.equal(torch.rand(2, generator=own), expected[3])
    assert new.random() == expected[4]
