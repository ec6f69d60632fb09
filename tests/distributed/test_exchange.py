"""The exchange: whatever shares, buckets and used parameters, the gradients of one process, and no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import quiet_run

TINY = 1e-6  # MiB: a bucket a parameter


class Mlp(nn.Module):
    """Three layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.embed = nn.Embedding(8, 3, sparse=kind == "sparse")
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.never = nn.Linear(3, 3) if kind == "unused" else None
        if kind == "frozen":
            self.b.requires_grad_(False)
        if kind == "tied":
            self.b.weight = self.a.weight
        if kind == "all but one frozen":
            self.requires_grad_(False)
            self.b.bias.requires_grad_(True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(self.embed(rows)))
        if self.kind != "unused" or int(rows[0]) % 2:
            x = torch.tanh(self.b(x))
        return self.out(x)


def optimizers(kind: str, net: nn.Module) -> Any:
    trained = [param for param in net.parameters() if param.requires_grad]
    if kind == "sparse":
        return torch.optim.SGD(trained, lr=0.1)
    return torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1)


def train(kind: str, sizes: list[int], bucket: float | None, exchange: str, epochs: int = 1) -> dict[str, Any]:
    """Windows with these numbers of micro-batches of one sample, of at most 3; a second epoch has the same."""
    with quiet_run(exchange=exchange, timeout_s=20) as run:
        net = Mlp(kind)
        optimizer = optimizers(kind, net)
        model, _ = run.prepare(net, optimizer, bucket_cap_mb=bucket, find_unused_parameters=kind == "unused")
        loader = run.loader(torch.arange(8), batch_sampler=Sizes(sizes), micro_batches=3)
        for _ in run.epochs(epochs):
            for window in loader:
                for (rows,) in window:
                    window.backward(model(rows).square().mean())
                window.step(clip_norm=1.0)
        names = [name for name, param in net.named_parameters() if param.grad is None]
        return {"none": names, "weights": {name: value.tolist() for name, value in net.state_dict().items()}}


class Sizes:
    """Batches of one sample; since windows take three in a row, only the last window of an epoch can be short."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        return iter([[i % 8] for i in range(sum(self.sizes))])

    def __len__(self) -> int:
        return sum(self.sizes)


def compare(kind: str, sizes: list[int], bucket: float | None, exchange: str, epochs: int = 1) -> None:
    (alone,) = run_ranks(train, 1, kind, sizes, bucket, exchange, epochs)
    for ranks in (2, 3):
        for other in run_ranks(train, ranks, kind, sizes, bucket, exchange, epochs):
            assert other["none"] == alone["none"]
            for name, value in other["weights"].items():
                theirs, mine = torch.tensor(value), torch.tensor(alone["weights"][name])
                if exchange == "exact":
                    assert torch.equal(theirs, mine), (ranks, name)
                else:
                    torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-5, msg=f"{ranks} {name}")


@pytest.mark.parametrize("exchange", ["fast", "exact"])
@pytest.mark.parametrize("bucket", [None, TINY])
@pytest.mark.parametrize(
    ("sizes", "epochs"),
    [([1], 3), ([2], 2), ([3, 1], 2), ([3, 2], 1), ([3, 3, 3, 1], 1)],
    ids=["from the first", "one of three", "in the second", "in the second, one of three", "in the last"],
)
def test_an_empty_share_at_any_position(sizes: list[int], epochs: int, bucket: float | None, exchange: str) -> None:
    compare("plain", sizes, bucket, exchange, epochs)


@pytest.mark.parametrize("exchange", ["fast", "exact"])
@pytest.mark.parametrize("bucket", [None, TINY])
@pytest.mark.parametrize("kind", ["unused", "frozen", "tied", "all but one frozen"])
def test_unused_frozen_and_tied_parameters_with_empty_shares(kind: str, bucket: float | None, exchange: str) -> None:
    compare(kind, [3, 1], bucket, exchange, 2)


@pytest.mark.parametrize("bucket", [None, TINY])
def test_a_sparse_embedding_with_empty_shares(bucket: float | None) -> None:
    compare("sparse", [3, 1], bucket, "fast", 2)


@pytest.mark.parametrize("exchange", ["fast", "exact"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_parameter_that_no_rank_used_keeps_grad_none_and_its_value(ranks: int, exchange: str) -> None:
    torch.manual_seed(1)
    fresh = Mlp("unused")
    for result in run_ranks(train, ranks, "unused", [3, 1], TINY, exchange, 2):
        assert result["none"][-2:] == ["never.weight", "never.bias"]
        assert torch.equal(torch.tensor(result["weights"]["never.weight"]), fresh.never.weight)


def static(samples: int, batch_size: int = 6) -> list[float]:
    with quiet_run(timeout_s=20) as run:
        net = Mlp("plain")
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), static_graph=True)
        for window in run.loader(torch.arange(samples) % 8, batch_size=batch_size, micro_batch_size=1):
            for (rows,) in window:
                window.backward(model(rows).square().mean())
            window.step()
        return net.a.weight.detach().flatten().tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_static_graph_gives_the_same_numbers(ranks: int) -> None:
    (alone,) = run_ranks(static, 1, 18, ranks)
    for other in run_ranks(static, ranks, 18, ranks):
        assert other == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_static_graph_with_accumulation_is_refused_by_name() -> None:
    with pytest.raises(RanksFailed, match=r"static_graph=True, 6 micro-batches a window and 2 ranks"):
        run_ranks(static, 2, 18)


def test_static_graph_is_refused_where_a_share_can_be_empty() -> None:
    with pytest.raises(RanksFailed, match=r"static_graph=True and a window of 1 micro-batch\(es\) for 2 ranks"):
        run_ranks(static, 2, 13, 2)


class Branch(nn.Module):
    """A layer that a parity decides about."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if int(x) % 2 else self.b(x)


def unused_and_not_said() -> None:
    with quiet_run(timeout_s=20) as run:
        net = Branch()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.arange(8.0)[:, None], batch_size=2, micro_batch_size=1):
            for (x,) in window:
                window.backward(model(x[0]).mean())
            window.step()


def test_an_unused_parameter_that_nobody_announced_is_explained() -> None:
    with pytest.raises(RanksFailed, match=r"find_unused_parameters=True") as failed:
        run_ranks(unused_and_not_said, 2)
    assert all(isinstance(error, samestep.SamestepError) for error in failed.value.errors.values())


def frozen_wholly() -> float:
    with quiet_run(timeout_s=20) as run:
        trunk, head = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1)
        model, tail, _ = run.prepare(trunk, head, torch.optim.SGD(head.parameters(), lr=0.1))
        for window in run.loader(torch.ones(6, 2), batch_size=4, micro_batch_size=1):
            for (x,) in window:
                window.backward(tail(model(x)).mean())
            window.step()
        return head.bias.item()


def test_a_model_without_anything_to_train_beside_one_that_has() -> None:
    results = run_ranks(frozen_wholly, 1) + run_ranks(frozen_wholly, 2)
    assert len(set(results)) == 1
