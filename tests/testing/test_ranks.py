"""run_ranks: results in order, failures with every traceback, no hang, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep.errors import ConfigError
from samestep.testing import RanksFailed, free_port, run_ranks


def place() -> dict[str, str | None]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA")
    return {name: os.environ.get(name) for name in names}


def test_ranks_have_torchruns_environment_and_answer_in_order() -> None:
    answers = run_ranks(place, 2, env={"EXTRA": "1"})
    assert [answer["RANK"] for answer in answers] == ["0", "1"]
    assert answers[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "EXTRA": "1",
    }
    assert "RANK" not in os.environ


def test_ranks_see_the_callers_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(place, 1)  # the server that ranks are forked from runs, with the environment of before
    monkeypatch.setenv("EXTRA", "set later")
    assert run_ranks(place, 1)[0]["EXTRA"] == "set later"


def reduce_and_differentiate(scale: float) -> tuple[torch.Tensor, int]:
    dist.init_process_group("gloo")
    x = torch.full((3,), scale * (dist.get_rank() + 1), requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    dist.all_reduce(x.grad)
    dist.destroy_process_group()
    return x.grad, torch.get_num_threads()


def test_ranks_talk_through_gloo_and_return_tensors() -> None:
    for gradient, threads in run_ranks(reduce_and_differentiate, 2, 10.0):
        assert gradient.tolist() == [60.0] * 3
        assert threads == 1


def process() -> tuple[int, bool]:
    return os.getpid(), os.getpid() == os.getpgid(0)


def test_one_rank_runs_in_a_process_of_its_own_too() -> None:
    ((pid, leads),) = run_ranks(process, 1)
    assert pid != os.getpid()
    assert leads


def test_a_rank_starts_in_a_fraction_of_a_second() -> None:
    run_ranks(process, 1)  # starts the server
    start = time.monotonic()
    run_ranks(process, 2)
    assert time.monotonic() - start < 1.0  # 0.06 s on an idle machine; importing torch alone would take longer


def fail_differently() -> None:
    if os.environ["RANK"] == "0":
        raise ConfigError("got a spoon", "a fork is needed", "pass a fork")
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("one over none")


def test_every_failing_ranks_traceback_is_in_the_message() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_differently, 3)
    message = str(caught.value)
    assert message.startswith("2 of 3 ranks failed")
    assert "--- rank 0 raised:\nTraceback" in message
    assert "in fail_differently" in message
    assert "ZeroDivisionError: one over none" in message
    assert sorted(caught.value.errors) == [0, 1]
    error = caught.value.errors[0]
    assert isinstance(error, ConfigError)
    assert error.fix == "pass a fork"


class UnpicklableError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_unpicklable() -> None:
    raise UnpicklableError(1, 2)


def test_an_exception_that_cannot_be_sent_is_still_reported() -> None:
    with pytest.raises(RanksFailed, match="UnpicklableError: 1 and 2") as caught:
        run_ranks(raise_unpicklable, 1)
    assert caught.value.errors == {}


def return_a_lambda() -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="the result cannot be pickled"):
        run_ranks(return_a_lambda, 1)


def die() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RanksFailed, match="rank 1 died by signal SIGKILL") as caught:
        run_ranks(die, 2)
    assert list(caught.value.reports) == [1]


def leave() -> None:
    os._exit(3)


def test_a_rank_that_leaves_is_named_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="rank 0 died with exit code 3"):
        run_ranks(leave, 1)


def sleep_with_a_child(file: str) -> None:
    if os.environ["RANK"] == "0":
        return
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(f"{os.getpid()} {child.pid}")
    wait_for_nothing()


def wait_for_nothing() -> None:
    time.sleep(600)


def test_the_time_limit_names_the_ranks_that_had_not_ended_and_ends_what_they_started(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 had not ended in time; its stack") as caught:
        run_ranks(sleep_with_a_child, 2, str(tmp_path / "pids"), timeout_s=1.5)
    assert time.monotonic() - start < 8
    assert list(caught.value.reports) == [1]
    assert "in wait_for_nothing" in caught.value.reports[1]
    for pid in (tmp_path / "pids").read_text().split():
        assert not _alive(int(pid))


def _alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but that nobody has asked after (a zombie) does not."""
    for _ in range(40):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.05)
    return True


def wait_in_a_collective() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_waits_inside_torch_shows_its_stack() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(wait_in_a_collective, 2, timeout_s=2.0)
    assert "in all_reduce" in caught.value.reports[0]


def leave_a_thread() -> None:
    threading.Thread(target=wait_for_nothing).start()


def test_a_rank_whose_process_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.testing.ranks._EXIT_S", 1.0)
    with pytest.raises(RanksFailed, match="rank 0 returned, but its process had not ended") as caught:
        run_ranks(leave_a_thread, 1)
    assert "in wait_for_nothing" in str(caught.value)


def warn() -> None:
    warnings.warn("look out", UserWarning)


def test_ranks_have_the_callers_warning_filters() -> None:
    with pytest.raises(RanksFailed, match="UserWarning: look out"):
        run_ranks(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(warn, 1)


def load() -> list[int]:
    loader = torch.utils.data.DataLoader(range(4), num_workers=2)  # type: ignore[arg-type]
    return [int(x) for x in loader]


def test_a_rank_may_have_loader_workers() -> None:
    assert run_ranks(load, 1) == [[0, 1, 2, 3]]


def test_a_free_port_does_not_follow_the_seed() -> None:
    ports = set()
    for _ in range(5):
        torch.manual_seed(0)
        ports.add(free_port())
    assert len(ports) > 1
