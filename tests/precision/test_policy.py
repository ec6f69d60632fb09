"""Precision as one argument: obeyed or refused."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import samestep
from samestep.precision.policy import PRECISIONS, choose_policy, to_fp32
from tests.cases.helpers import quiet_run

CPU = torch.device("cpu")


def test_auto_on_a_cpu_is_fp32_and_says_why() -> None:
    policy = choose_policy("auto", CPU)
    assert (policy.name, policy.dtype, policy.scales_loss) == ("fp32", None, False)
    assert "auto" in policy.reason


@pytest.mark.parametrize(
    ("name", "dtype", "scales"), [("fp32", None, False), ("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)]
)
def test_a_precision_names_autocast_dtype_and_scale(name: str, dtype: Any, scales: bool) -> None:
    policy = choose_policy(name, CPU)
    assert (policy.dtype, policy.scales_loss, policy.reason) == (dtype, scales, "asked for")
    with policy.autocast():
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        with policy.fp32():
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["fp64", "FP16", "", "mixed", "fp8"])
def test_an_unknown_precision_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(samestep.ConfigError, match=", ".join(PRECISIONS)):
        choose_policy(name, CPU)


def test_tf32_is_refused_on_a_cpu_and_not_replaced() -> None:
    with pytest.raises(samestep.ConfigError, match=r"tf32.*NVIDIA"):
        choose_policy("tf32", CPU)
    with pytest.raises(samestep.ConfigError, match="tf32"), quiet_run(precision="tf32"):
        pass


class Pair(NamedTuple):
    """Two outputs."""

    a: Any
    b: Any


def test_outputs_in_any_container_come_back_in_fp32_and_integers_stay() -> None:
    half = torch.ones(2, dtype=torch.float16)
    out = to_fp32(collections.OrderedDict(x=[half, (half.bfloat16(), Pair(half, 3))], n=torch.ones(1).long(), s="s"))
    assert type(out) is collections.OrderedDict
    pair = out["x"][1][1]
    assert isinstance(pair, Pair)
    assert {out["x"][0].dtype, out["x"][1][0].dtype, pair.a.dtype} == {torch.float32}
    assert (out["n"].dtype, out["s"], pair.b) == (torch.int64, "s", 3)
    double = torch.ones(1, dtype=torch.float64)
    assert to_fp32(double) is double


@pytest.mark.parametrize(
    ("name", "inside"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_prepared_model_computes_in_its_dtype_keeps_fp32_parameters_and_returns_fp32(name: str, inside: Any) -> None:
    seen: list[Any] = []
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with quiet_run(precision=name) as run:
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert model(torch.ones(2, 3)).dtype == torch.float32
        for window in run.loader(torch.ones(4, 3), batch_size=4, micro_batch_size=2):
            for (x,) in window:
                out = model(x)
                assert out.dtype == torch.float32
                window.backward(out.sum())
            window.step()
    assert set(seen) == {inside}
    assert {param.dtype for param in net.parameters()} == {torch.float32}
