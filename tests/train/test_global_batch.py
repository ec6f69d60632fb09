"""In-batch negatives over the global batch are those of one process, on any grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import quiet_run

PAIRS = torch.randn(22, 2, 6, generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    """Two views to one embedding each, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.layers(pairs), dim=-1)


def info_nce(rows: torch.Tensor) -> torch.Tensor:
    """Each first view against all second views."""
    logits = rows[:, 0] @ rows[:, 1].T / 0.1
    return F.cross_entropy(logits, torch.arange(len(rows)))


def one_process(batch_size: int) -> tuple[list[float], list[float]]:
    """The plain loop with the whole batch in one forward."""
    torch.manual_seed(1)
    net = Encoder(0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for batch in PAIRS.split(batch_size):
        optimizer.zero_grad()
        loss = info_nce(net(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def trained(form: str, batch_size: int, micro_batch_size: int | None, dropout: float, settings: dict) -> Any:
    with quiet_run(**settings) as run:
        torch.manual_seed(1)
        net = Encoder(dropout)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        losses = []
        loader = run.loader(PAIRS, batch_size=batch_size, micro_batch_size=micro_batch_size, drop_last=form == "gather")
        for window in loader:
            if form == "gather":
                for (pairs,) in window:
                    window.backward(info_nce(run.gather(model(pairs))))
            else:
                window.global_batch(lambda batch: model(batch[0]), info_nce)
            window.step()
            losses.append(window.loss)
        return losses, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_the_two_pass_form_equals_one_process_on_any_grid(ranks: int, micro_batch_size: int) -> None:
    losses, weights = one_process(8)
    for got_losses, got_weights in run_ranks(trained, ranks, "two-pass", 8, micro_batch_size, 0.0, {}):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        assert got_weights == pytest.approx(weights, rel=1e-4, abs=1e-6)


def test_the_two_pass_form_is_bitwise_the_same_on_any_ranks_with_dropout() -> None:
    exact = {"exchange": "exact", "precision": "bf16"}
    found = [run_ranks(trained, ranks, "two-pass", 8, 2, 0.3, exact)[0] for ranks in (1, 2, 3, 4)]
    assert found.count(found[0]) == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_gathered_embeddings_equal_one_process(ranks: int) -> None:
    losses, weights = one_process(11)
    for got_losses, got_weights in run_ranks(trained, ranks, "gather", 11, None, 0.0, {}):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        assert got_weights == pytest.approx(weights, rel=1e-4, abs=1e-6)


def test_gather_is_refused_where_a_rank_has_several_micro_batches() -> None:
    with pytest.raises(RanksFailed, match=r"run\.gather in a window where the ranks have \[2, 2\] micro-batches"):
        run_ranks(trained, 2, "gather", 8, 2, 0.0, {})


def weighted() -> None:
    with quiet_run() as run:
        net = Encoder(0.0)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        for window in run.loader(PAIRS, batch_size=8):
            for (pairs,) in window:
                window.backward(info_nce(run.gather(model(pairs))), weight=len(pairs))


def test_a_weight_after_gather_is_refused() -> None:
    with pytest.raises(samestep.WindowError, match=r"got a weight after run\.gather"):
        weighted()
