"""Where a job's wall time went: each second in one part, restarts included."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.monitor.goodput import PARTS, Goodput
from samestep.monitor.ledger import read_ledger
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run


def start(at: float, process: float, step: int = 0) -> list[dict[str, Any]]:
    return [
        {"kind": "start", "time": at, "step": step},
        {"kind": "environment", "time": at, "step": step, "process_start": process},
    ]


def window(step: int, at: float, seconds: float, **parts: float) -> dict[str, Any]:
    return {"kind": "window", "time": at, "step": step, "samples": 4, "seconds": seconds, "data_seconds": 0.0, **parts}


def of(lines: list[dict[str, Any]]) -> Goodput:
    goodput = Goodput()
    for line in lines:
        goodput.add(line)
    return goodput


def test_a_job_with_a_crash_is_told_second_by_second() -> None:
    found = of(
        [
            *start(105.0, 100.0),
            window(1, 110.0, 3.0, data_seconds=1.0, exchange_seconds=0.5, outside_seconds=0.0),
            window(2, 113.0, 3.0, data_seconds=0.5, outside_seconds=1.0),
            {"kind": "checkpoint", "time": 115.0, "step": 2, "seconds": 2.0},
            {"kind": "lost", "time": 150.0, "step": 2, "windows": 3, "last_time": 121.0},
            *start(150.0, 146.0, 2),
            window(3, 155.0, 4.0),
            {"kind": "evaluation", "time": 158.0, "step": 3, "seconds": 2.5},
            {"kind": "end", "time": 160.0, "step": 3},
        ]
    )
    assert found.wall == 60.0
    assert found.seconds == pytest.approx(
        {
            "startup": 7.0 + 5.0,
            "data": 1.5,
            "exchange": 0.5,
            "compute": 1.5 + 1.5 + 4.0,
            "other": 1.0 + 0.5 + 2.0,
            "checkpoint": 2.0,
            "lost": 6.0,
            "down": 25.0,
            "evaluation": 2.5,
        }
    )
    assert (found.windows, found.samples, found.starts, found.lost_windows) == (3, 12, 2, 3)
    assert found.goodput == pytest.approx(7 / 60)


TIMES = st.floats(0, 100, allow_nan=False)
LINES = st.one_of(
    st.builds(lambda at: start(at, at - 1), TIMES),
    st.builds(
        lambda at, s, d, x, o: [window(1, at, s, data_seconds=d, exchange_seconds=x, outside_seconds=o)], *[TIMES] * 5
    ),
    st.builds(
        lambda kind, at, s: [{"kind": kind, "time": at, "seconds": s}],
        st.sampled_from(["checkpoint", "evaluation"]),
        TIMES,
        TIMES,
    ),
    st.builds(lambda at, last: [{"kind": "lost", "time": at, "windows": 1, "last_time": last}], TIMES, TIMES),
    st.builds(lambda at: [{"kind": "log", "time": at}], TIMES),
)


@given(st.lists(LINES, max_size=30))
def test_whatever_the_lines_say_the_parts_add_up_to_the_wall_time(groups: list[list[dict[str, Any]]]) -> None:
    found = of([line for group in groups for line in group])
    assert sum(found.seconds.values()) == pytest.approx(found.wall, abs=1e-6)
    assert all(seconds >= -1e-9 for seconds in found.seconds.values())
    if found.wall > 0:
        assert sum(found.shares.values()) == pytest.approx(1.0)


def test_no_lines_are_no_time() -> None:
    assert (of([]).wall, of([]).goodput) == (0.0, 0.0)
    assert set(of([]).seconds) == set(PARTS)


def killed(directory: str, kill_at: int | None) -> None:
    with quiet_run(directory, save_every=4) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        train = run.loader(torch.arange(20.0), batch_size=2)
        for _ in run.epochs(1):
            for win in train:
                for (x,) in win:
                    time.sleep(0.01)
                    win.backward(model(x).mean())
                win.step()
                if run.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_job_has_lost_work_and_its_parts_fill_the_outside_clock(tmp_path: Path) -> None:
    begin = time.time()
    for kill_at in (7, None):
        try:
            run_ranks(killed, 1, str(tmp_path), kill_at)
        except RanksFailed:
            assert kill_at is not None
    wall = time.time() - begin
    found = of(read_ledger(tmp_path))
    assert (found.starts, found.lost_windows, found.windows, found.samples) == (2, 3, 10, 20)
    assert found.seconds["lost"] > 0.02
    assert found.seconds["compute"] > 0.09
    assert found.wall <= wall + 0.1
    assert sum(found.seconds.values()) == pytest.approx(found.wall)


def test_a_run_killed_before_its_first_checkpoint_has_lost_all_of_it(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(killed, 1, str(tmp_path), 2)
    run_ranks(killed, 1, str(tmp_path), None)
    found = of(read_ledger(tmp_path))
    assert (found.starts, found.lost_windows, found.windows) == (2, 2, 10)
