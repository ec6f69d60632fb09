"""One optimizer step: what may be called when, and that a refusal leaves everything sane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run


class Trial:
    """A run with one weight, two windows of two micro-batches with the values 1 2 | 3 4, lr 0.1."""

    def __init__(self, **settings: Any) -> None:
        self.run = quiet_run(**settings)

    def __enter__(self) -> Trial:
        self.run.__enter__()
        self.net = Weight()
        self.model, self.optimizer = self.run.prepare(self.net, torch.optim.SGD(self.net.parameters(), lr=0.1))
        self.train = self.run.loader(torch.tensor([1.0, 2.0, 3.0, 4.0]), batch_size=2, micro_batch_size=1)
        return self

    def __exit__(self, *error: Any) -> None:
        self.run.__exit__(*error)

    def backward(self, window: Any, x: torch.Tensor, **rest: Any) -> None:
        window.backward(self.model(x).mean(), **rest)


@pytest.fixture
def trial() -> Iterator[Trial]:
    with Trial() as trial:
        yield trial


def finish_properly(trial: Trial) -> None:
    """After a refusal in the first window, a fresh pass trains as if nothing had been: 1 - 0.1 * (1.5 + 3.5)."""
    for window in trial.train:
        for (x,) in window:
            trial.backward(window, x)
        window.step()
    assert trial.net.w.item() == pytest.approx(0.5)
    assert (trial.run.step, trial.run.updates, trial.run.skips) == (2, 2, 0)


def refused(trial: Trial, misuse: Callable[[Any, Any], None], match: str, kind: Any = samestep.WindowError) -> None:
    """`misuse(window, x)` in the first micro-batch of the first window is refused; the loop can start again after it."""
    with pytest.raises(kind, match=match):
        for window in trial.train:
            for (x,) in window:
                misuse(window, x)
    assert trial.net.w.item() == 1.0
    finish_properly(trial)


def test_step_without_backward_is_refused(trial: Trial) -> None:
    with pytest.raises(samestep.WindowError, match=r"step\(\) without window\.backward"):
        for window in trial.train:
            for (x,) in window:
                trial.model(x)
            window.step()
    finish_properly(trial)


def test_step_before_the_loop_is_refused(trial: Trial) -> None:
    with pytest.raises(samestep.WindowError, match="before the loop over the window"):
        next(iter(trial.train)).step()
    finish_properly(trial)


def test_step_twice_is_refused_and_the_first_counts(trial: Trial) -> None:
    for window in trial.train:
        for (x,) in window:
            trial.backward(window, x)
        window.step()
        with pytest.raises(samestep.WindowError, match="second time"):
            window.step()
    assert trial.net.w.item() == pytest.approx(0.5)


def test_backward_twice_in_a_micro_batch_is_refused(trial: Trial) -> None:
    def misuse(window: Any, x: torch.Tensor) -> None:
        trial.backward(window, x)
        trial.backward(window, x)

    refused(trial, misuse, "a second backward in one micro-batch")


def test_backward_after_the_loop_is_refused(trial: Trial) -> None:
    with pytest.raises(samestep.WindowError, match="outside a micro-batch"):
        for window in trial.train:
            for (x,) in window:
                loss = trial.model(x).mean()
            window.backward(loss)
    finish_properly(trial)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model, x: model(torch.ones(3)), r"shape \(3,\)"),
        (lambda model, x: model(torch.ones(1, 1)), r"shape \(1, 1\)"),
        (lambda model, x: model(torch.ones(0)), r"shape \(0,\)"),
        (lambda model, x: model(x).mean().item(), "type float"),
        (lambda model, x: None, "type NoneType"),
        (lambda model, x: model(x).mean().detach(), "without a gradient"),
        (lambda model, x: torch.ones(()), "without a gradient"),
    ],
)
def test_a_loss_that_is_not_one_number_with_a_gradient_is_refused(trial: Trial, make: Any, match: str) -> None:
    refused(trial, lambda window, x: window.backward(make(trial.model, x)), match)


@pytest.mark.parametrize("weight", [float("nan"), -1, -0.5, float("inf"), "2", [1.0], torch.tensor(float("nan")), 1j])
def test_a_weight_that_is_not_a_finite_number_is_refused_with_its_place(trial: Trial, weight: Any) -> None:
    refused(
        trial,
        lambda window, x: trial.backward(window, x, weight=weight),
        "weight=.*micro-batch 0 of window 0, epoch 0",
        samestep.NonFiniteError,
    )


def test_a_weight_of_several_numbers_is_refused(trial: Trial) -> None:
    refused(trial, lambda window, x: trial.backward(window, x, weight=torch.ones(2)), r"a weight of shape \(2,\)")


@pytest.mark.parametrize("kind", [int, float, bool, np.int64, np.float32, torch.tensor, lambda n: torch.tensor([n])])
def test_a_weight_may_be_any_kind_of_number(trial: Trial, kind: Any) -> None:
    for window in trial.train:
        for (x,) in window:
            trial.backward(window, x, weight=kind(1))
        window.step()
    assert trial.net.w.item() == pytest.approx(0.5)


def test_a_reduction_is_one_of_two_and_stays(trial: Trial) -> None:
    refused(trial, lambda window, x: trial.backward(window, x, reduction="max"), "it is 'mean' or 'sum'")
    trial.train.set_position(0, 0)
    with pytest.raises(samestep.WindowError, match="'sum'.*began with 'mean'"):
        for window in trial.train:
            for (x,) in window:
                trial.backward(window, x, reduction="sum")


def test_iterating_twice_without_a_step_is_refused(trial: Trial) -> None:
    with pytest.raises(samestep.WindowError, match="twice without a step"):
        for window in trial.train:
            for (x,) in window:
                trial.backward(window, x)
            for _ in window:
                pass
    finish_properly(trial)


def test_iterating_after_the_step_is_refused(trial: Trial) -> None:
    window = next(iter(trial.train))
    for (x,) in window:
        trial.backward(window, x)
    window.step()
    with pytest.raises(samestep.WindowError, match="after its step"):
        list(window)


def test_going_on_without_a_step_is_refused(trial: Trial) -> None:
    with pytest.raises(samestep.WindowError, match=r"window 0 of epoch 0 had backward\(\) but no step"):
        for window in trial.train:
            for (x,) in window:
                trial.backward(window, x)
    assert trial.net.w.item() == 1.0


def test_a_step_inside_an_open_autocast_is_refused(trial: Trial) -> None:
    with pytest.raises(samestep.WindowError, match="inside an open autocast"):
        for window in trial.train:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for (x,) in window:
                    trial.backward(window, x)
                window.step()
    finish_properly(trial)


@pytest.mark.parametrize("limits", [{"clip_norm": 0}, {"clip_value": -1}, {"clip_norm": 1.0, "clip_value": 1.0}])
def test_limits_are_checked_before_anything_is_stepped(trial: Trial, limits: dict[str, float]) -> None:
    with pytest.raises(samestep.ConfigError, match="clip"):
        for window in trial.train:
            for (x,) in window:
                trial.backward(window, x)
            window.step(**limits)
    finish_properly(trial)


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "grad_norm",
        "skipped",
    ],
)
def test_outcomes_before_the_loop_are_refused(trial: Trial, name: str) -> None:
    with pytest.raises(samestep.WindowError, match=r"before window\.step"):
        getattr(next(iter(trial.train)), name)


def test_outcomes_are_known_after_the_step_only(trial: Trial) -> None:
    for window in trial.train:
        for (x,) in window:
            trial.backward(window, x)
            for name in ("loss", "grad_norm", "skipped"):
                with pytest.raises(samestep.WindowError, match=r"before window\.step"):
                    getattr(window, name)
        window.step()
        assert window.loss == pytest.approx((1.5 if window.number == 0 else 3.5) * (1.0, 0.85)[window.number])
        assert window.grad_norm == pytest.approx((1.5, 3.5)[window.number])
        assert window.skipped is False


def test_a_window_before_prepare_is_refused() -> None:
    with quiet_run() as run:
        with pytest.raises(samestep.WindowError, match="before run.prepare"):
            for window in run.loader(torch.ones(2), batch_size=2):
                list(window)


def test_a_micro_batch_of_weight_zero_is_left_out_even_if_its_loss_is_nan(trial: Trial) -> None:
    for window in trial.train:
        for (x,) in window:
            first = window.current == 0
            window.backward(trial.model(x * float("nan") if first else x).mean(), weight=0 if first else 5)
        window.step()
    assert trial.net.w.item() == pytest.approx(1 - 0.1 * (2 + 4))
    assert trial.run.skips == 0


def test_a_window_of_weight_zero_is_skipped_and_counted(trial: Trial) -> None:
    for window in trial.train:
        for (x,) in window:
            trial.backward(window, x, weight=0)
        window.step(clip_norm=1.0)
    assert trial.net.w.item() == 1.0
    assert (trial.run.step, trial.run.updates, trial.run.skips) == (2, 0, 2)


def test_a_window_that_is_left_out_is_no_update_and_the_next_gets_its_own_batches(trial: Trial) -> None:
    for window in trial.train:
        if window.number == 0:
            continue
        for (x,) in window:
            trial.backward(window, x)
        window.step()
    assert trial.net.w.item() == pytest.approx(1 - 0.35)
    assert (trial.run.step, trial.run.updates) == (2, 1)


# On several ranks: irregular loops give the numbers of one rank, or an error with a name -------------------------------


class Net(nn.Module):
    """Two layers: small buckets make several exchanges."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def irregular(how: str, exchange: str) -> tuple[list[float], list[float], tuple[int, int, int]]:
    """Three windows of 6 micro-batches of one sample; `how` says what the loop does with them."""
    losses: list[float] = []
    with quiet_run(timeout_s=20, exchange=exchange) as run:
        net = Net()
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1), bucket_cap_mb=1e-5)
        run._engine.on_record.append(lambda record: losses.append(record.loss))
        data = torch.randn(18, 2, generator=torch.Generator().manual_seed(5))
        for window in run.loader(data, batch_size=6, micro_batch_size=1):
            if how == "continue" and window.number == 1:
                continue
            for number, (x,) in zip(window.share, window, strict=False):
                last = number == 5
                out = model(x)
                if how == "no backward on the last" and last:
                    continue
                if how == "no backward on the first" and number == 0:
                    continue
                if how == "forward twice":
                    out = out + model(x * 2)
                window.backward(out.square().mean(), weight=0 if how == "weight 0 on the last" and last else 1)
                if how == "break" and number == 4:
                    break
            window.step(clip_norm=0.5)
        return [float(p.sum().detach()) for p in net.parameters()], losses, (run.step, run.updates, run.skips)


HOWS = ["plain", "continue", "break", "forward twice"]
HOWS += ["weight 0 on the last", "no backward on the last", "no backward on the first"]


@pytest.mark.parametrize("exchange", ["fast", "exact"])
@pytest.mark.parametrize("how", HOWS)
def test_an_irregular_loop_gives_the_same_on_any_number_of_ranks(how: str, exchange: str) -> None:
    ((weights, losses, counts),) = run_ranks(irregular, 1, how, exchange)
    for ranks in (2, 3):
        for other in run_ranks(irregular, ranks, how, exchange):
            tight = {"rel": 0, "abs": 0} if exchange == "exact" else {"rel": 1e-4, "abs": 1e-5}
            assert other[0] == pytest.approx(weights, **tight)
            assert other[1] == pytest.approx(losses, rel=1e-5)
            assert other[2] == counts


def left_out_on_one(which: int) -> None:
    with quiet_run(timeout_s=5) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.arange(6.0), batch_size=2, micro_batch_size=1):
            if window.number == which and run.rank == 1:
                continue
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        run.mean(0.0)


def test_a_window_left_out_on_one_rank_is_named_on_both() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(left_out_on_one, 2, 1)
    for error in failed.value.errors.values():
        assert isinstance(error, samestep.RankError)
        assert "rank 0 in window 1 of epoch 0, rank 1 in window 2 of epoch 0" in str(error)


def test_the_last_window_left_out_on_one_rank_ends_both_within_the_time_limit() -> None:
    with pytest.raises(RanksFailed):
        run_ranks(left_out_on_one, 2, 2, timeout_s=30)


def raises_on(rank: int, world: int, where: str) -> None:
    with quiet_run(timeout_s=60) as run:
        net = Net()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.ones(world * 4, 2), batch_size=world):
            for (x,) in window:
                loss = model(x).mean()
                if run.rank == rank and window.number == 1 and where == "between":
                    raise KeyError("label_7")
                window.backward(loss)
            if run.rank == rank and window.number == 1 and where == "before step":
                raise KeyError("label_7")
            window.step()


@pytest.mark.parametrize("where", ["between", "before step"])
@pytest.mark.parametrize(
    ("rank", "world"),
    [
        pytest.param(
            *(0, 2),
            marks=pytest.mark.xfail(reason="main hosts the store, which is gone when the others ask it", strict=True),
        ),
        (1, 2),
        (2, 3),
    ],
)
def test_one_ranks_exception_ends_the_others_in_seconds_with_its_name(rank: int, world: int, where: str) -> None:
    import time

    start = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run_ranks(raises_on, world, rank, world, where)
    assert time.monotonic() - start < 15
    for number, error in failed.value.errors.items():
        if number == rank:
            assert isinstance(error, KeyError)
        else:
            assert isinstance(error, samestep.RankError), error
            assert f"rank {rank} failed first: KeyError: 'label_7'" in str(error)


# Several optimizers --------------------------------------------------------------------------------------------------


def gan(precision: str, order: str = "dg") -> tuple[list[float], list[Any], int]:
    scales: list[Any] = []
    with quiet_run(precision=precision, init_scale=2.0**10, growth_interval=2, timeout_s=20) as run:
        torch.manual_seed(2)
        g = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2))
        d = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        opt_g, opt_d = torch.optim.Adam(g.parameters(), lr=0.05), torch.optim.SGD(d.parameters(), lr=0.05)
        net_g, net_d, opt_g, opt_d = run.prepare(g, d, opt_g, opt_d)
        run._engine.on_record.append(lambda record: scales.append(record.scale))
        data = torch.randn(14, 2, generator=torch.Generator().manual_seed(5))
        for window in run.loader(data, batch_size=4, micro_batch_size=1, shuffle=True):
            for who in order:
                for (real,) in window.phase(opt_d if who == "d" else opt_g):
                    fake = net_g(torch.randn(len(real), 2))
                    if who == "d":
                        loss = net_d(real).mean() - net_d(fake.detach()).mean()
                    else:
                        loss = net_d(fake).mean()
                    window.backward(loss)
                window.step(clip_norm=1.0)
        return [p.detach().double().sum().item() for net in (g, d) for p in net.parameters()], scales, run.updates


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gan_with_accumulation_is_the_same_on_any_number_of_ranks(precision: str) -> None:
    ((weights, scales, updates),) = run_ranks(gan, 1, precision)
    assert updates == 4
    if precision == "fp16":
        assert scales == [1024.0, 2048.0, 2048.0, 4096.0], "one update of the scale a window, not a phase"
    for ranks in (2, 3):
        for other in run_ranks(gan, ranks, precision):
            assert other[0] == pytest.approx(weights, rel=1e-3, abs=1e-4)
            assert other[1:] == (scales, updates)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_may_step_only_one_of_the_optimizers(ranks: int) -> None:
    for _, _, updates in run_ranks(gan, ranks, "fp32", "d"):
        assert updates == 4


def test_an_optimizer_may_have_several_phases_in_a_window() -> None:
    gan("fp32", "ddg")


def test_a_phase_of_an_unknown_optimizer_is_refused(trial: Trial) -> None:
    other = torch.optim.SGD(trial.net.parameters(), lr=0.1)
    with pytest.raises(samestep.WindowError, match="was not prepared"):
        next(iter(trial.train)).phase(other)
    finish_properly(trial)


# The loss scale ------------------------------------------------------------------------------------------------------


def test_with_accumulation_the_fp16_scale_settles_where_a_loop_that_divides_by_m_has_it() -> None:
    data, lin = torch.ones(24, 1), nn.Linear(1, 1)
    with quiet_run(precision="fp16", init_scale=2.0**14, growth_interval=100) as run:
        model, optimizer = run.prepare(lin, torch.optim.SGD(lin.parameters(), lr=0.0))
        ours = []
        for window in run.loader(data, batch_size=8, micro_batch_size=2):
            for (x,) in window:
                window.backward(16 * model(x).float().mean())
            window.step()
            ours.append(run.loss_scale)
    plain, scaler = nn.Linear(1, 1), torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)
    optimizer, theirs = torch.optim.SGD(plain.parameters(), lr=0.0), []
    for rows in data.split(8):
        optimizer.zero_grad()
        for x in rows.split(2):
            with torch.autocast("cpu", torch.float16):
                loss = 16 * plain(x).float().mean() / 4
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs.append(scaler.get_scale())
    assert ours == theirs == [2.0**13, 2.0**13, 2.0**13]


def test_the_repeated_phases_of_one_optimizer_have_random_numbers_of_their_own() -> None:
    seen = []
    with quiet_run() as run:
        nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
        *models, first, second = run.prepare(*nets, *(torch.optim.SGD(net.parameters(), lr=0.1) for net in nets))
        for window in run.loader(torch.ones(2, 1), batch_size=2):
            for model, optimizer in ((models[0], first), (models[0], first), (models[1], second)):
                for (x,) in window.phase(optimizer):
                    seen.append(torch.rand(()).item())
                    window.backward(model(x).mean())
                window.step()
    assert len(set(seen)) == 3
