"""Cases C35, C36, C38-C41: numbers on the screen, and starting and ending."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path

import pytest
import torch

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run
from tests.monitor.test_sinks import points


def test_c35_throughput_is_all_samples_over_all_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.0, 4.0])
    meter = samestep.Throughput()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter.start()
    meter.stop(10)
    meter.start()
    assert meter.stop(10) == 5.0


def c35() -> int:
    with quiet_run() as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.ones(64), batch_size=64, micro_batch_size=4):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        return run.samples


@pytest.mark.parametrize("ranks", [1, 2])
def test_c35_samples_count_accumulation_and_ranks(ranks: int) -> None:
    assert run_ranks(c35, ranks) == [4 * 8 * 2] * ranks


def c36(directory: str) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        _c36(directory)
    return out.getvalue(), err.getvalue()


def _c36(directory: str) -> None:
    with samestep.Run(directory, precision="fp32", log_every=1, sinks=["tensorboard"]) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.ones(10), batch_size=2):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        run.print("hello")
        run.log(answer=42)


def test_c36_one_rank_writes_and_prints(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (out, err), other = run_ranks(c36, 2, str(tmp_path))
    assert other == ("", "")
    assert out == "hello\n"
    assert sum("window" in line for line in err.splitlines()) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "ledger.jsonl", "tensorboard"]
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "window"] == [1, 2, 3, 4, 5]
    assert [line["answer"] for line in lines if line["kind"] == "log"] == [42.0]
    (_,) = (tmp_path / "tensorboard").iterdir()
    assert [step for step, _ in points(tmp_path / "tensorboard", "loss")] == [1, 2, 3, 4, 5]


def c40(directory: str, seconds: float, fail: bool) -> float:
    start = time.monotonic()
    with quiet_run(timeout_s=2) as run:
        with run.main_first() as is_main:
            if is_main:
                time.sleep(seconds)
                with (Path(directory) / "prepared").open("a") as file:
                    file.write("line\n")
                if fail:
                    raise OSError("no space for the cache")
        assert (Path(directory) / "prepared").read_text() == "line\n"
        return time.monotonic() - start


def test_c40_the_others_wait_for_mains_preparation_beyond_the_time_out(tmp_path: Path) -> None:
    assert min(run_ranks(c40, 2, str(tmp_path), 5.0, False)) > 5


def test_c40_a_failing_preparation_ends_the_others_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"main's preparation failed: OSError: no space for the cache"):
        run_ranks(c40, 2, str(tmp_path), 0.0, True)


def c40_hang() -> None:
    with quiet_run(timeout_s=2) as run:
        if run.is_main:
            run.mean(1.0)
        time.sleep(4)


def test_c40_a_real_hang_is_still_cut_at_the_time_out() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 raised"):
        run_ranks(c40_hang, 2, timeout_s=30)
    assert time.monotonic() - start < 20
