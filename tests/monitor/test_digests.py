"""Digests of tensors: every bit, its place, its dtype and shape count; strides, devices and chunks do not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.monitor import digests
from samestep.monitor.digests import Digests, parameter_digests, start, whole

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
]
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROW, BLOCK = digests._ROW, digests._BLOCK


def of(tensor: torch.Tensor) -> str:
    return parameter_digests({"x": tensor})["x"]


def some_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return data.remainder(2).bool() if dtype == torch.bool else data.view(dtype)


def flipped(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    data = tensor.clone().view(torch.uint8)
    data[byte] ^= 1 << bit
    return data.view(tensor.dtype)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 3 * ROW), st.data())
def test_any_one_flipped_bit_changes_the_digest(dtype: torch.dtype, numel: int, data: Any) -> None:
    tensor = some_bits(numel, dtype)
    byte = data.draw(st.integers(0, numel * dtype.itemsize - 1))
    bit = data.draw(st.integers(0, 0 if dtype == torch.bool else 7))
    assert of(flipped(tensor, byte, bit)) != of(tensor)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([d for d in DTYPES if d.itemsize in BYTES and d != torch.bool]), st.integers(2, 3 * ROW), st.data()
)
def test_any_two_swapped_elements_change_the_digest(dtype: torch.dtype, numel: int, data: Any) -> None:
    bits = some_bits(numel, dtype).view(BYTES[dtype.itemsize])
    i, j = data.draw(st.lists(st.integers(0, numel - 1), min_size=2, max_size=2, unique=True))
    bits[j] = bits[i] ^ 1
    swapped = bits.clone()
    swapped[i], swapped[j] = bits[j], bits[i]
    assert of(swapped.view(dtype)) != of(bits.view(dtype))


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 2 * ROW), st.data())
def test_two_flipped_signs_do_not_cancel(numel: int, data: Any) -> None:
    tensor = torch.randn(numel)
    i, j = data.draw(st.lists(st.integers(0, numel - 1), min_size=2, max_size=2, unique=True))
    changed = tensor.clone()
    changed[[i, j]] *= -1
    assert of(changed) != of(tensor)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2 * ROW + 5))
def test_equal_bits_have_equal_digests(dtype: torch.dtype, numel: int) -> None:
    tensor = some_bits(numel, dtype)
    assert of(tensor.clone()) == of(tensor)


def test_ten_thousand_tensors_have_ten_thousand_digests() -> None:
    named = {str(i): torch.full((1,), i, dtype=torch.int32) for i in range(5000)}
    named |= {f"z{i}": torch.zeros(i) for i in range(5000)}
    assert len(set(parameter_digests(named).values())) == 10000


def test_the_sum_is_the_one_that_the_module_describes() -> None:
    words = torch.randint(-(2**31), 2**31, (3 * ROW + 17,), dtype=torch.int32)
    mix = digests._mix
    expected = 0
    for i, word in enumerate(words.tolist()):
        row = i // ROW
        keys = [mix(1, i % ROW) | 1, mix(2, row % BLOCK) | 1, mix(3, row // BLOCK) | 1]
        expected += word * keys[0] * keys[1] * keys[2]
    assert int(digests._sum(words)) & digests._MASK == expected & digests._MASK


def test_how_the_work_is_cut_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(ROW * 70 + 3)
    found = set()
    for rows in (1, 8, 64, BLOCK):
        monkeypatch.setitem(digests._ROWS_AT_ONCE, "cpu", rows)
        found.add(of(tensor))
    assert len(found) == 1


def test_the_keys_have_been_the_same_since_the_first_version() -> None:
    assert of(torch.arange(6, dtype=torch.float32).view(2, 3)) == "f652376a8850574c"


def test_the_order_of_elements_counts_and_their_strides_do_not() -> None:
    tensor = torch.randn(8, 3, 5, 5)
    assert of(tensor.to(memory_format=torch.channels_last)) == of(tensor)
    assert of(tensor.transpose(0, 1)) == of(tensor.transpose(0, 1).contiguous())
    assert of(tensor.transpose(2, 3)) != of(tensor)
    assert of(torch.randn(40)[1::3].fill_(2.0)) == of(torch.full((13,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_view_that_begins_between_two_words_is_read(dtype: torch.dtype) -> None:
    base = some_bits(101, dtype)
    assert of(base[1:]) == of(base[1:].clone())


def test_an_expanded_or_conjugated_tensor_is_what_it_shows() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    assert of(z.conj()) == of(z.conj().resolve_conj()) != of(z)
    assert of(torch.ones(1).expand(7)) == of(torch.ones(7))


def test_dtype_and_shape_are_part_of_the_digest() -> None:
    zeros = torch.zeros(6)
    forms = [zeros, zeros.view(2, 3), zeros.view(3, 2), zeros.to(torch.int32), torch.zeros(5), torch.tensor(0.0)]
    forms += [
        torch.empty(0),
        torch.empty(0, 3),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.bfloat16),
    ]
    assert len({of(form) for form in forms}) == len(forms)


def test_minus_zero_and_two_nans_are_different_bits() -> None:
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    nans = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)]
    assert of(nans[0]) != of(nans[1])
    assert of(nans[0]) == of(nans[0].clone())


def test_the_whole_names_every_tensor_in_any_order() -> None:
    a, b = torch.randn(3), torch.randn(3)
    first = whole(parameter_digests({"a": a, "b": b}))
    assert whole(parameter_digests({"b": b, "a": a})) == first
    assert whole(parameter_digests({"a": b, "b": a})) != first
    assert whole(parameter_digests({"a": a})) != first
    assert len(first) == 16


def test_parameters_are_read_without_a_graph_and_left_as_they_are() -> None:
    net = torch.nn.Linear(3, 2)
    before = [param.detach().clone() for param in net.parameters()]
    found = parameter_digests(net.named_parameters())
    assert list(found) == ["weight", "bias"]
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert all(param.grad is None for param in net.parameters())


def test_a_tensor_without_bits_and_a_name_used_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="meta"):
        parameter_digests({"x": torch.empty(3, device="meta")})
    with pytest.raises(ConfigError, match="sparse"):
        parameter_digests({"x": torch.eye(3).to_sparse()})
    with pytest.raises(ConfigError, match="one name"):
        parameter_digests([("x", torch.ones(1)), ("x", torch.ones(1))])
    assert parameter_digests({}) == {}


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_an_interval_that_is_no_number_of_windows_is_refused(every: Any) -> None:
    with pytest.raises(ConfigError, match="digests every"):
        Digests(every, dict, print)


def test_a_run_writes_a_line_every_k_windows_and_one_for_a_step_only_once() -> None:
    tensor, lines = torch.zeros(3), []
    taken = Digests(2, lambda: {"w": tensor}, lambda kind, **fields: lines.append((kind, fields)))
    for step in (0, 1, 2, 2, 3, 4):
        tensor.fill_(step)
        taken.after_window(step)
    assert [(kind, fields["step"]) for kind, fields in lines] == [("digest", 0), ("digest", 2), ("digest", 4)]
    for _, fields in lines:
        assert fields["tensors"] == parameter_digests({"w": torch.full((3,), float(fields["step"]))})
        assert fields["all"] == whole(fields["tensors"])


def test_digests_cost_less_than_twenty_times_a_read_of_memory() -> None:
    tensor = torch.randn(1 << 22)
    of(tensor)
    assert best(lambda: of(tensor)) < 20 * best(tensor.sum) + 0.01


def best(work: Any) -> float:
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@pytest.mark.gpu
def test_a_gpu_gives_the_cpus_digest_and_does_not_wait_for_it() -> None:
    named = {str(dtype): some_bits(3 * ROW + 5, dtype) for dtype in DTYPES}
    named["large"] = torch.randn(ROW * BLOCK + ROW + 1)
    there = {name: tensor.cuda() for name, tensor in named.items()}
    start(there).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reading = start(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading.read() == parameter_digests(named)
