"""The run around the loop: entering, directories, restarts, evaluation, and what the ranks must agree on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run

# Entering -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda run: run.prepare(Weight()),
        lambda run: run.loader(torch.ones(2), batch_size=1),
        lambda run: next(iter(run.epochs(1))),
        lambda run: run.save(),
        lambda run: run.register("x", nn.Linear(1, 1)),
        lambda run: run.evaluate(None),
        lambda run: run.main_first().__enter__(),
        lambda run: run.gather_results([]),
        lambda run: run.mean(1.0),
        lambda run: run.log(x=1.0),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_is_used_inside_its_with_block_only(use: Any, when: str) -> None:
    run = quiet_run()
    if when == "after":
        with run:
            pass
    with pytest.raises(samestep.ConfigError, match="outside the run"):
        use(run)


def test_a_run_is_entered_once() -> None:
    run = quiet_run()
    with run:
        with pytest.raises(samestep.ConfigError, match="entered twice"):
            run.__enter__()
    with pytest.raises(samestep.ConfigError, match="entered twice"):
        run.__enter__()


def test_a_second_run_in_the_same_process_is_as_good_as_the_first() -> None:
    weights = set()
    for _ in range(2):
        with quiet_run(seed=4) as run:
            net = nn.Linear(2, 2)
            weights.add(net.weight.sum().item())
            assert run.step == 0
    assert len(weights) == 1, "models that are built inside have the run's seed"


def test_the_loops_own_exception_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"), quiet_run():
        raise KeyError("mine")


@pytest.mark.parametrize("number", [-1, True, 2.0, "3", None])
def test_a_number_of_epochs_is_a_whole_number(number: Any) -> None:
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match="epochs"):
        list(run.epochs(number))


def settings_differ() -> None:
    from samestep.distributed.env import read_environment

    with quiet_run(max_skips=3 + read_environment().rank, timeout_s=20):
        pass


def test_settings_that_differ_between_ranks_are_refused_by_name() -> None:
    with pytest.raises(RanksFailed, match="max_skips is 4 on rank 1 and 3 on rank 0"):
        run_ranks(settings_differ, 2)


# Directories ------------------------------------------------------------------------------------------------------------


def script(
    directory: Any,
    epochs: int = 2,
    stop: int | None = None,
    *,
    length: int = 18,
    batch_size: int = 6,
    workers: int = 0,
    ema: bool = False,
    extra: bool = False,
    evaluate: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train one layer with dropout; stop (saving) after so many windows of this start."""
    out: dict[str, Any] = {"samples": [], "valid": []}
    with quiet_run(directory, **settings) as run:
        out["resumed"], out["from"] = run.resumed, run.step
        net = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        model, _, _ = run.prepare(net, optimizer, schedule)
        if ema:
            run.ema(model, 0.9)
        if extra:
            run.register("extra", nn.Linear(1, 1))
        data = torch.randn(length, 3, generator=torch.Generator().manual_seed(9)), torch.arange(length)
        train = run.loader(
            data, batch_size=batch_size, micro_batch_size=1 + batch_size // 4, shuffle=True, num_workers=workers
        )
        valid = run.loader(torch.arange(3), batch_size=2)
        done = 0
        for _ in run.epochs(epochs):
            for window in train:
                for x, rows in window:
                    out["samples"] += rows.tolist()
                    window.backward(model(x).square().mean())
                window.step(clip_norm=1.0)
                done += 1
                if done == stop:
                    run.save()
                    break
            if done == stop:
                break
            if evaluate:
                out["valid"].append(sum(len(x) for (x,) in run.evaluate(valid)))
        out["step"], out["updates"], out["epoch"] = run.step, run.updates, run.epoch
        out["weights"] = {name: value.tolist() for name, value in net.state_dict().items()}
    return out


def test_a_directory_in_use_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with quiet_run(tmp_path):
        with pytest.raises(samestep.RunDirError, match="in use by another run"), quiet_run(tmp_path):
            pass
        with pytest.raises(RanksFailed) as failed:
            run_ranks(script, 2, str(tmp_path))
        assert [type(failed.value.errors[rank]) for rank in (0, 1)] == [samestep.RunDirError] * 2
    with quiet_run(tmp_path):
        pass


def test_a_directory_that_cannot_be_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RanksFailed, match="cannot use") as failed:
        run_ranks(script, 2, str(tmp_path / "file" / "run"))
    assert {type(error) for error in failed.value.errors.values()} == {samestep.RunDirError}


def test_a_directory_is_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), quiet_run(tmp_path):
            raise KeyError


def test_must_needs_a_checkpoint_and_never_sets_the_old_aside(tmp_path: Path) -> None:
    with pytest.raises(samestep.CheckpointError, match="resume='must' and no checkpoint"):
        script(tmp_path, resume="must")
    first = script(tmp_path, 1)
    anew = script(tmp_path, 1, resume="never")
    assert (anew["resumed"], anew["weights"]) == (False, first["weights"])
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == ["checkpoints", "ledger.jsonl"]
    script(tmp_path, 1, resume="never")
    assert (tmp_path / "earlier-2").exists()
    assert script(tmp_path, 2, resume="must")["from"] == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1}, "seed=0, this run has seed=1"),
        ({"batch_size": 12}, r"grid\.batch_size was 6, is 12"),
        ({"length": 20}, r"num_samples was 18, is 20"),
        ({"ema": False}, "the checkpoint holds ema0, which this script did not prepare"),
        ({"extra": False}, "the checkpoint holds user/extra, which"),
    ],
)
def test_a_restart_that_would_not_continue_is_refused_naming_what_differs(
    tmp_path: Path, change: dict, match: str
) -> None:
    same = {"ema": True, "extra": True}
    script(tmp_path, 2, 2, **same)
    with pytest.raises(samestep.CheckpointError, match=match):
        script(tmp_path, 2, **{**same, **change})
    assert script(tmp_path, 2, **same)["step"] == 6, "and the old settings still work"


def test_a_restart_with_more_registered_than_was_saved_is_refused(tmp_path: Path) -> None:
    script(tmp_path, 2, 2)
    with pytest.raises(samestep.CheckpointError, match="holds no user/extra"):
        script(tmp_path, 2, extra=True)


@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize(("before", "after", "workers"), [(1, 1, 0), (1, 1, 2), (2, 1, 0), (1, 3, 0), (3, 2, 2)])
def test_a_restart_in_mid_epoch_continues_it(tmp_path: Path, before: int, after: int, workers: int, stop: int) -> None:
    (whole,) = run_ranks(script_of, 1, str(tmp_path / "whole"), None, 0)
    first = run_ranks(script_of, before, str(tmp_path / "parts"), stop, workers)
    second = run_ranks(script_of, after, str(tmp_path / "parts"), None, workers)
    samples = [row for part in (*first, *second) for row in part["samples"]]
    assert sorted(samples) == sorted([*range(18)] * 2)
    for out in second:
        assert (out["resumed"], out["from"], out["step"], out["updates"], out["epoch"]) == (True, stop, 6, 6, 2)
        for name, value in out["weights"].items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(whole["weights"][name]), rtol=1e-4, atol=1e-5)
        if before == after == 1:
            assert out["weights"] == whole["weights"], "bitwise on one rank"


def script_of(directory: str, stop: int | None, workers: int) -> dict[str, Any]:
    return script(directory, 2, stop, workers=workers, ema=True)


def test_a_restart_at_the_end_of_an_epoch_does_its_evaluation(tmp_path: Path) -> None:
    first = script(tmp_path, 2, 3, evaluate=True)  # stopped after the last window of epoch 0, before its evaluation
    second = script(tmp_path, 2, evaluate=True)
    assert first["valid"] == []
    assert second["valid"] == [3, 3]
    assert sorted(second["samples"]) == list(range(18))


def test_a_run_that_is_done_does_nothing_more(tmp_path: Path) -> None:
    done = script(tmp_path, 2)
    again = script(tmp_path, 2)
    assert (again["samples"], again["weights"], again["step"]) == ([], done["weights"], 6)


# Evaluation -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_early", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_leaves_every_generator_as_it_was(leave_early: bool, workers: int) -> None:
    with quiet_run() as run:
        net = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
        run.prepare(net)
        valid = run.loader([torch.ones(1)] * 5, batch_size=2, num_workers=workers)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        for _ in run.evaluate(valid):
            torch.rand(3), random.random(), np.random.rand()
            if leave_early:
                break
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
        assert torch.is_grad_enabled()
        assert net.training


def each_once(samples: int, batch_size: int) -> list[int]:
    with quiet_run() as run:
        valid = run.loader(torch.arange(samples), batch_size=batch_size, shuffle=True)
        mean = samestep.Mean()
        rows = []
        for (x,) in run.evaluate(valid):
            rows += x.tolist()
            mean.add(x.double().mean(), len(x))
        assert run.mean(mean) == pytest.approx((samples - 1) / 2)
        return rows


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("samples", "batch_size"), [(1, 1), (2, 8), (10, 4), (3, 100)])
def test_each_sample_is_evaluated_once_whatever_the_sizes(ranks: int, samples: int, batch_size: int) -> None:
    rows = run_ranks(each_once, ranks, samples, batch_size)
    assert sorted(row for part in rows for row in part) == list(range(samples))


def evaluation_within_training(evaluate: bool) -> list[float]:
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        valid = run.loader(torch.ones(5, 2), batch_size=2, micro_batch_size=1)
        train = run.loader(
            torch.randn(16, 2, generator=torch.Generator().manual_seed(1)), batch_size=8, micro_batch_size=2
        )
        for window in train:
            for (x,) in window:
                loss = model(x).square().mean()
                window.backward(loss)
            if evaluate:
                for (x,) in run.evaluate(valid):
                    model(x)
            window.step()
            if evaluate:
                for (x,) in run.evaluate(valid):
                    model(x)
                    break
        return [value for tensor in net.state_dict().values() for value in tensor.flatten().tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluating_between_and_within_windows_changes_nothing_of_training(ranks: int) -> None:
    assert run_ranks(evaluation_within_training, ranks, True) == run_ranks(evaluation_within_training, ranks, False)


# Agreements -------------------------------------------------------------------------------------------------------------


def logs(what: str) -> dict[str, float]:
    with quiet_run(timeout_s=10) as run:
        if what == "mean":
            mean = samestep.Mean()
            mean.add(float(run.rank), run.rank)
            return run.log(loss=mean, lr=0.1)
        if what == "differ":
            return run.log(loss=float(run.rank))
        return run.log(**({"loss": 1.0} if run.is_main else {}))


def test_a_mean_is_reduced_and_a_plain_number_must_agree() -> None:
    assert run_ranks(logs, 3, "mean") == [{"loss": pytest.approx(5 / 3), "lr": 0.1}] * 3
    with pytest.raises(RanksFailed, match=r"loss is [01]\.0 on rank [01] and [01]\.0 on rank [01]") as failed:
        run_ranks(logs, 2, "differ")
    assert {type(error) for error in failed.value.errors.values()} == {samestep.RankError}


def test_a_number_that_only_one_rank_logs_is_refused() -> None:
    with pytest.raises(RanksFailed, match="loss is 1.0 on rank 0 and None on rank 1"):
        run_ranks(logs, 2, "missing")


def first(directory: str) -> tuple[bool, bool]:
    with quiet_run() as run:
        with run.main_first() as is_main:
            found = (Path(directory) / "cache").exists()
            (Path(directory) / "cache").touch()
        with run.main_first():
            pass
        return is_main, found


def test_main_prepares_first_and_the_others_find_it(tmp_path: Path) -> None:
    assert run_ranks(first, 3, str(tmp_path)) == [(True, False), (False, True), (False, True)]


def main_fails() -> None:
    with quiet_run() as run, run.main_first() as is_main:
        if is_main:
            raise FileNotFoundError("tokenizer.json")


def test_mains_failed_preparation_ends_the_others_with_its_text() -> None:
    with pytest.raises(RanksFailed, match="main's preparation failed: FileNotFoundError: tokenizer.json"):
        run_ranks(main_fails, 2)


@pytest.mark.parametrize("thing", [3, "x", object()])
def test_only_what_has_a_state_is_registered(thing: Any) -> None:
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match=r"register\('it', \w+\)"):
        run.register("it", thing)


def test_a_name_is_registered_once() -> None:
    with quiet_run() as run:
        run.register("it", nn.Linear(1, 1))
        with pytest.raises(samestep.ConfigError, match="used once"):
            run.register("it", nn.Linear(1, 1))
