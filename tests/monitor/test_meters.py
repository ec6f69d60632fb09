"""Means and rates mean what they say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import quiet_run

TERMS = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 50)), max_size=20)


@given(TERMS)
def test_a_mean_is_weighted_and_takes_numbers_and_tensors_alike(terms: list[tuple[float, int]]) -> None:
    plain, tensors = samestep.Mean(), samestep.Mean()
    for value, weight in terms:
        plain.add(value, weight)
        tensors.add(torch.tensor(value, dtype=torch.float64), torch.tensor(weight))
    assert plain.sums() == pytest.approx(tensors.sums())
    assert plain.sums()[1] == sum(weight for _, weight in terms)


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("nan"))])
@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_term_of_weight_zero_is_left_out_whatever_its_value(value: object, weight: object) -> None:
    mean = samestep.Mean()
    mean.add(2.0, 3)
    mean.add(value, weight)  # type: ignore[arg-type]
    assert mean.sums() == (6.0, 3.0)


def test_a_mean_keeps_no_graph_alive() -> None:
    mean = samestep.Mean()
    mean.add(torch.ones((), requires_grad=True) * 2)
    assert mean.sums() == (2.0, 1.0)
    assert not mean._total.requires_grad  # type: ignore[union-attr]


def many_small_terms() -> float:
    with quiet_run() as run:
        mean = samestep.Mean()
        for _ in range(1000):
            mean.add(torch.tensor(0.1), 1)
        mean.add(1e8 if run.is_main else -1e8)
        return run.mean(mean)


def test_sums_are_fp64_on_any_number_of_ranks() -> None:
    value = torch.tensor(0.1).double().item()
    assert run_ranks(many_small_terms, 2) == [pytest.approx(2000 * value / 2002, rel=1e-7)] * 2


def only_one_has_terms() -> tuple[float, float, float]:
    with quiet_run() as run:
        mean = samestep.Mean()
        if run.is_main:
            mean.add(4.0, 2)
        return run.mean(mean), run.mean(samestep.Mean()), run.mean(torch.tensor(float(run.rank)), weight=run.rank)


def test_a_rank_without_terms_does_not_count_and_nothing_at_all_is_nan() -> None:
    for some, none, weighted in run_ranks(only_one_has_terms, 3):
        assert some == 4.0
        assert math.isnan(none)
        assert weighted == pytest.approx((1 + 2 * 2) / 3)


def test_throughput_needs_a_start_and_knows_nothing_before_the_first_stop() -> None:
    meter = samestep.Throughput()
    assert math.isnan(meter.per_second)
    with pytest.raises(samestep.ConfigError, match=r"stop\(\) before start\(\)"):
        meter.stop(1)


def test_figures_that_a_cpu_does_not_have_are_none() -> None:
    report = samestep.memory_report("cpu")
    assert report["allocated"] is report["peak_reserved"] is None
    assert 0 < report["process"] <= report["process_peak"]
