"""Case C31 and its neighbours: each sample once, results in the dataset's order, nothing of training touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import quiet_run


def c31(samples: int, batch_size: int, micro_batch_size: int | None, as_list: bool) -> Any:
    with quiet_run() as run:
        valid = run.loader(torch.arange(samples), batch_size=batch_size, micro_batch_size=micro_batch_size)
        outputs: list[Any] = []
        for (x,) in run.evaluate(valid):
            outputs.append([f"sample {i}" for i in x.tolist()] if as_list else 10 * x)
        gathered = run.gather_results(outputs)
        return gathered if as_list else gathered.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("samples", "batch", "micro"), [(7, 4, 2), (7, 2, 1), (1, 4, 1), (2, 6, 2), (64, 16, None)])
def test_c31_results_come_in_dataset_order_and_exact_length(ranks: int, samples: int, batch: int, micro: Any) -> None:
    assert run_ranks(c31, ranks, samples, batch, micro, False) == [[10 * i for i in range(samples)]] * ranks


def test_results_may_be_lists_of_text() -> None:
    assert run_ranks(c31, 2, 5, 2, 1, True) == [[f"sample {i}" for i in range(5)]] * 2


def left_early() -> None:
    with quiet_run() as run:
        valid = run.loader(torch.arange(8), batch_size=2)
        outputs = [x for (x,) in run.evaluate(valid)]
        run.gather_results(outputs[:-1])


def test_a_missing_result_is_an_error_and_not_a_shift() -> None:
    with pytest.raises(RanksFailed, match="got 3 results for 4 batches on rank"):
        run_ranks(left_early, 2)


def test_results_of_a_shuffled_loader_are_refused() -> None:
    with quiet_run() as run:
        valid = run.loader(torch.arange(8), batch_size=2, shuffle=True)
        outputs = [x for (x,) in run.evaluate(valid)]
        with pytest.raises(samestep.DataError, match="does not read in the dataset's order"):
            run.gather_results(outputs)


def untouched(leave_early: bool) -> None:
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        net[1].eval()  # frozen statistics stay frozen
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        before = {name: value.clone() for name, value in net.state_dict().items()}
        valid = run.loader(torch.randn(9, 2), batch_size=4)
        state = torch.get_rng_state()
        for (x,) in run.evaluate(valid):
            assert not torch.is_grad_enabled()
            assert not net.training
            torch.rand(3)
            model(x)
            if leave_early:
                break
        assert torch.is_grad_enabled()
        assert [module.training for module in net.modules()] == [True, True, False, True]
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        assert leave_early or torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("leave_early", [True, False])
def test_evaluating_leaves_modes_buffers_gradients_and_generators_as_they_were(leave_early: bool) -> None:
    run_ranks(untouched, 2, leave_early)


def auc(samples: int) -> float:
    torchmetrics = pytest.importorskip("torchmetrics")
    scores = torch.linspace(0, 1, samples).roll(samples // 3)
    labels = (torch.arange(samples) * 7 % 5 < 2).long()
    with quiet_run() as run:
        metric = torchmetrics.classification.BinaryAUROC()
        for score, label in run.evaluate(run.loader((scores, labels), batch_size=8, micro_batch_size=2)):
            metric.update(score, label)
        return run.log(auc=metric)["auc"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("samples", [30, 3])
def test_a_torchmetrics_auc_is_that_of_all_samples(samples: int) -> None:
    (alone,) = run_ranks(auc, 1, samples)
    assert run_ranks(auc, 2, samples) == [pytest.approx(alone)] * 2
    assert run_ranks(auc, 3, samples) == [pytest.approx(alone)] * 3
