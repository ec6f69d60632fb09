"""train_one_epoch: the plain habit gives the numbers of one process that sees all batches."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight


def mean(out: torch.Tensor, _: Any) -> torch.Tensor:
    return out.mean()


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def data(samples: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(
        torch.randn(samples, 3, generator=generator), torch.randint(2, (samples,), generator=generator)
    )


def epoch(net: Any, loader: Any, optimizer: Any, criterion: Any = F.cross_entropy, **rest: Any) -> float:
    return samestep.train_one_epoch(net, loader, optimizer, criterion, "cpu", **{"precision": "fp32", **rest})


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, 1.0, 0.01])
def test_the_result_and_the_weights_are_those_of_a_hand_written_loop(accumulate: int, clip: float | None) -> None:
    (net, optimizer), (twin, reference) = make(), make()
    loader = DataLoader(data(), 4)
    for _ in range(2):
        value = epoch(net, loader, optimizer, accumulate=accumulate, clip_norm=clip)
        assert isinstance(value, float)
        batches, total = list(loader), 0.0
        for start in range(0, len(batches), accumulate):
            part = batches[start : start + accumulate]
            samples = sum(len(x) for x, _ in part)
            reference.zero_grad()
            for x, y in part:
                loss = F.cross_entropy(twin(x), y)
                (loss * len(x) / samples).backward()
                total += loss.item() * len(x)
            if clip is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), clip)
            reference.step()
        assert value == pytest.approx(total / 22, rel=1e-5)
        torch.testing.assert_close(list(net.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "name"), [({}, "bf16"), ({"use_bf16": False}, "fp16"), ({"precision": "fp32"}, "fp32")]
)
def test_bf16_is_the_default_and_fp16_has_a_scaler(how: dict[str, Any], name: str) -> None:
    seen: list[Any] = []
    net, optimizer = make()
    net[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    loss = samestep.train_one_epoch(net, DataLoader(data(), 4), optimizer, F.cross_entropy, "cpu", **how)
    assert loss == pytest.approx(0.69, abs=0.3)
    assert set(seen) == {{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]}


def test_calls_with_one_optimizer_share_a_scaler() -> None:
    net = Weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    overflow = [(torch.tensor([float("inf")]), 0)]
    scales = []
    for _ in range(3):
        with pytest.raises(samestep.DataError, match="no batch was trained on"):
            epoch(net, overflow, optimizer, mean, precision="fp16")
        scales.append(samestep.train.plain._session(net, optimizer, "cpu", "fp16").engine.scaler.state_dict()["scale"])
    assert scales == [2.0**15, 2.0**14, 2.0**13]


@pytest.mark.parametrize("loader", [[], iter(()), DataLoader(TensorDataset(torch.empty(0), torch.empty(0)), 2)])
def test_a_loader_without_batches_is_refused(loader: Any) -> None:
    net, optimizer = make()
    with pytest.raises(samestep.DataError, match="no batch was trained on"):
        epoch(net, loader, optimizer)


@pytest.mark.parametrize("batch", [torch.ones(2, 3), {"x": torch.ones(2)}, (torch.ones(2),), [1, 2, 3], None])
def test_a_batch_that_is_no_pair_is_refused(batch: Any) -> None:
    net, optimizer = make()
    with pytest.raises(samestep.DataError, match=r"takes batches of \(inputs, targets\)"):
        epoch(net, [batch], optimizer)
    assert epoch(net, DataLoader(data(), 4), optimizer) > 0, "and the next call works"


@pytest.mark.parametrize("accumulate", [0, -1, True, 1.5, "2"])
def test_accumulate_is_a_whole_number(accumulate: Any) -> None:
    net, optimizer = make()
    with pytest.raises(samestep.ConfigError, match="accumulate"):
        epoch(net, [], optimizer, accumulate=accumulate)


@pytest.mark.parametrize("loader", [None, 3])
def test_what_is_no_loader_is_refused(loader: Any) -> None:
    net, optimizer = make()
    with pytest.raises(samestep.DataError, match="as a loader"):
        epoch(net, loader, optimizer)


def test_a_nan_loss_is_an_error_that_names_its_window() -> None:
    net, optimizer = make()
    batches = [(torch.ones(2, 3), torch.tensor([0, 1])), (torch.full((2, 3), float("nan")), torch.tensor([0, 1]))]
    with pytest.raises(samestep.NonFiniteError, match="window 1 of epoch 0"):
        epoch(net, batches, optimizer)


def test_batches_of_scalars_count_one_sample_each() -> None:
    net = Weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    assert epoch(net, [(torch.tensor(1.0), 0), (torch.tensor(4.0), 0)], optimizer, mean) == 2.5


def test_a_schedule_advances_with_each_update() -> None:
    net, optimizer = make()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)
    for _ in range(2):
        epoch(net, DataLoader(data(), 11), optimizer, schedule=schedule)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


def test_progress_is_printed_each_so_many_updates(capsys: pytest.CaptureFixture[str]) -> None:
    net, optimizer = make()
    epoch(net, DataLoader(data(), 4), optimizer, log_every=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("loss")[0].strip() for line in lines] == ["epoch 0 step 2", "epoch 0 step 4", "epoch 0 step 6"]
    epoch(net, DataLoader(data(), 4), optimizer, log_every=0)
    assert capsys.readouterr().out == ""


def test_a_model_and_its_optimizer_are_not_kept_alive() -> None:
    net, optimizer = make()
    epoch(net, DataLoader(data(), 4), optimizer)
    alive = weakref.ref(optimizer), weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_the_optimizer_can_be_copied_and_saved_afterwards() -> None:
    net, optimizer = make()
    epoch(net, DataLoader(data(), 4), optimizer)
    twin = copy.deepcopy(optimizer)
    assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_the_environment_of_several_ranks_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    net, optimizer = make()
    with pytest.raises(samestep.ConfigError, match="2 ranks and there is no process group"):
        epoch(net, [], optimizer)
    monkeypatch.undo()


# In a process group ---------------------------------------------------------------------------------------------------


def in_a_group(what: Any, *args: Any) -> Any:
    dist.init_process_group("gloo")
    try:
        return what(*args)
    finally:
        dist.destroy_process_group()


def distributed_sampler(batch: int, accumulate: int, precision: str, wrapped: bool) -> list[Any]:
    net, optimizer = make()
    model = nn.parallel.DistributedDataParallel(net) if wrapped else net
    sampler = DistributedSampler(data(24), shuffle=False)
    losses = []
    for number in range(3):
        sampler.set_epoch(number)
        loader = DataLoader(data(24), batch, sampler=sampler)
        losses.append(epoch(model, loader, optimizer, accumulate=accumulate, precision=precision))
    weights = [param.detach().clone() for param in net.parameters()]
    del model
    return [losses, weights]


def interleaved(batch: int, accumulate: int, ranks: int) -> list[Any]:
    """One process with the windows that the ranks make together."""
    net, optimizer = make()
    x, y = data(24).tensors
    parts = [list(range(rank, 24, ranks)) for rank in range(ranks)]
    losses = []
    for _ in range(3):
        batches = []
        for start in range(0, len(parts[0]), batch * accumulate):
            for part in parts:
                for a in range(start, min(len(part), start + batch * accumulate), batch):
                    rows = part[a : min(a + batch, start + batch * accumulate)]
                    batches.append((x[rows], y[rows]))
        losses.append(epoch(net, batches, optimizer, accumulate=accumulate * ranks))
    return [losses, [param.detach() for param in net.parameters()]]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("ranks", "batch", "accumulate"), [(2, 2, 1), (2, 3, 2), (3, 2, 2), (3, 4, 1)])
def test_ranks_together_give_what_one_process_gives(ranks: int, batch: int, accumulate: int, wrapped: bool) -> None:
    losses, weights = interleaved(batch, accumulate, ranks)
    for mine, ours in run_ranks(in_a_group, ranks, distributed_sampler, batch, accumulate, "fp32", wrapped):
        assert mine == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(ours, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_agree_on_two_ranks(precision: str) -> None:
    first, second = run_ranks(in_a_group, 2, distributed_sampler, 3, 2, precision, False)
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def uneven(counts: list[int], accumulate: int) -> tuple[float, float]:
    net = Weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rank = dist.get_rank()
    batches = [(torch.full((rank + 1,), float(rank + 1)), 0)] * counts[rank]
    loss = epoch(net, batches, optimizer, mean, accumulate=accumulate, clip_norm=None)
    return loss, net.w.item()


@pytest.mark.parametrize("counts", [[3, 1], [0, 2], [1, 4], [2, 0, 3]])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_with_uneven_numbers_of_batches_end_together(counts: list[int], accumulate: int) -> None:
    w, total, terms = 1.0, 0.0, 0
    left = list(counts)
    while any(left):
        now = [min(n, accumulate) for n in left]
        weight = sum(n * (rank + 1) for rank, n in enumerate(now))
        slope = sum(n * (rank + 1) ** 2 for rank, n in enumerate(now)) / weight
        total, terms = total + slope * w * weight, terms + weight
        w -= 0.1 * slope
        left = [a - b for a, b in zip(left, now, strict=True)]
    for loss, weight in run_ranks(in_a_group, len(counts), uneven, counts, accumulate):
        assert loss == pytest.approx(total / terms)
        assert weight == pytest.approx(w)


def same_data(check: bool) -> float:
    net, optimizer = make()
    return epoch(net, DataLoader(data(), 4), optimizer, check_data=check)


def test_the_same_data_on_every_rank_is_refused_unless_said_to_be_meant() -> None:
    with pytest.raises(RanksFailed, match="all 2 ranks begin with the same batch.*DistributedSampler"):
        run_ranks(in_a_group, 2, same_data, True)
    assert run_ranks(in_a_group, 2, same_data, False) == pytest.approx([same_data(True)] * 2, rel=1e-5)


class Text(nn.Module):
    """Takes text: its length is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, texts: list[str]) -> torch.Tensor:
        return self.w * torch.tensor([float(len(text)) for text in texts])


def texts() -> float:
    net = Text()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    batch = (["a" * (1 + 2 * dist.get_rank())], 0)
    return epoch(net, [batch], optimizer, mean)


def test_batches_without_tensors_are_not_taken_for_the_same() -> None:
    assert run_ranks(in_a_group, 2, texts) == [2.0, 2.0]


def used_as_ddp_before() -> float:
    net, optimizer = make()
    model = nn.parallel.DistributedDataParallel(net)
    part = data(24)
    rows = range(dist.get_rank(), 24, 2)
    x, y = part.tensors[0][rows], part.tensors[1][rows]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    value = epoch(model, [(x, y)], optimizer)
    del model
    return value


def test_a_ddp_model_that_has_trained_already_goes_on() -> None:
    first, second = run_ranks(in_a_group, 2, used_as_ddp_before)
    assert first == second
