"""`samestep launch`, run for real: what the script sees, exit codes, ports (C38), and what is left at the end (C39)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LAUNCH = [sys.executable, "-m", "samestep", "launch"]


def script(tmp_path: Path, text: str, name: str = "script.py") -> str:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def launched(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCH, *words], capture_output=True, text=True, timeout=60, cwd=cwd)


SEEN = """
    import json, os, sys
    if os.environ["RANK"] == "0":
        main = sys.modules["__main__"]
        print(json.dumps([__name__, sys.argv[1:], sys.path[0], main.__file__, os.environ["OMP_NUM_THREADS"]]))
"""


def test_the_script_is_main_and_its_arguments_are_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = script(tmp_path, SEEN)
    words = ["--", "-n", "3", "--help", "-m", "a b", "", "${local_rank}", "$$", "$HOME", "'\"", "--x=1"]
    result = launched("-n", "2", path, *words)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == ["__main__", words, str(tmp_path), path, "1"]


def test_a_module_is_run_as_by_python_m(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    path = script(tmp_path / "pack", SEEN, "job.py")
    result = launched("-n", "2", "-m", "pack.job", "--lr", "1", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)[:4] == ["__main__", ["--lr", "1"], str(tmp_path), path]


def test_a_threads_setting_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert json.loads(launched("-n", "2", script(tmp_path, SEEN)).stdout)[4] == "3"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2", "missing.py"], "there is no file 'missing.py'"),
        (["-n", "2", "-m", "missing_module"], "there is no module 'missing_module'"),
        (["-n", "2"], "got no script"),
        (["-n", "0", __file__], "got nproc=0"),
        (["-n", "99999", __file__], "got nproc=99999"),
        (["-n", "2", "--nnodes", "1:2", __file__], "got rdzv_endpoint=None"),
    ],
)
def test_a_wrong_command_is_one_line_before_any_process(words: list[str], said: str) -> None:
    result = launched(*words)
    assert result.returncode == 1
    assert result.stderr.startswith(f"samestep: error: {said}")
    assert result.stderr.count("\n") == 1


FAILING = """
    import os, signal, sys, time
    if os.environ["RANK"] == "1":
        {how}
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("sys.exit(3)", 3, "rank 1 failed with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_others_and_gives_its_exit_code(tmp_path: Path, how: str, code: int, said: str) -> None:
    start = time.monotonic()
    result = launched("-n", "2", script(tmp_path, FAILING.format(how=how)))
    assert result.returncode == code
    assert result.stderr == f"samestep: {said}; the other ranks were ended\n"
    assert time.monotonic() - start < 20


def test_a_ranks_traceback_is_that_of_plain_python(tmp_path: Path) -> None:
    path = script(tmp_path, FAILING.format(how="raise ValueError('bad')"))
    result = launched("-n", "2", path)
    plain = subprocess.run([sys.executable, path], env={**os.environ, "RANK": "1"}, capture_output=True, text=True)
    assert result.returncode == plain.returncode == 1
    assert result.stderr == plain.stderr + "samestep: rank 1 failed with exit code 1; the other ranks were ended\n"


def test_of_two_failing_ranks_the_first_gives_the_exit_code(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            os._exit(7)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            sys.exit(1)
        """,
    )
    result = launched("-n", "2", path)
    assert result.returncode == 7
    assert result.stderr.endswith("samestep: rank 1 failed with exit code 7; the other ranks were ended\n")


def test_a_rank_that_ignores_the_request_to_end_is_killed_after_the_grace(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            time.sleep(1)
            sys.exit(3)
        time.sleep(60)
        """,
    )
    start = time.monotonic()
    assert launched("-n", "2", "--grace", "1", path).returncode == 3
    assert time.monotonic() - start < 20


# C38: two runs at once, and a run while torch's default port is taken.

SUM = """
    import sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.tensor([float(sys.argv[1])])
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        print(dist.get_world_size(), int(x), flush=True)
    dist.destroy_process_group()
"""


def test_c38_two_launches_at_once_do_not_meet(tmp_path: Path) -> None:
    path = script(tmp_path, SUM)
    runs = [
        subprocess.Popen([*LAUNCH, "-n", "2", path, number], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in ("1", "10")
    ]
    assert [run.communicate(timeout=60) for run in runs] == [("2 2\n", ""), ("2 20\n", "")]
    assert [run.returncode for run in runs] == [0, 0]


def test_c38_torchs_default_port_may_be_taken(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):  # whoever has it already serves as well
            taken.bind(("", 29500))
            taken.listen()
        result = launched("-n", "2", script(tmp_path, SUM), "1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "2 2\n", "")


# C39: whatever ends the launcher, no process is left.

ENDLESS = """
    import os, sys, time, pathlib, torch, torch.distributed as dist
    from torch.utils.data import DataLoader

    class Endless(torch.utils.data.Dataset):
        def __len__(self):
            return 1 << 40
        def __getitem__(self, i):
            pathlib.Path(sys.argv[1], str(os.getpid())).touch()
            time.sleep(0.01)
            return torch.ones(1)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        pathlib.Path(sys.argv[1], str(os.getpid())).touch()
        sampler = range(1 << 40)
        for x in DataLoader(Endless(), sampler=sampler, batch_size=2, num_workers=2, persistent_workers=True):
            dist.all_reduce(x)
            pathlib.Path(sys.argv[1], "training").touch()
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A directory in which each process leaves its number; whatever a failing test leaves alive is killed."""
    directory = tmp_path / "pids"
    directory.mkdir()
    yield directory
    for pid in alive(directory):
        os.kill(pid, signal.SIGKILL)


def alive(directory: Path) -> list[int]:
    """The recorded processes that run; a dead one that nobody has asked after (a zombie) does not."""
    running = []
    for path in directory.glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                running.append(int(path.name))
    return running


def in_mid_epoch(path: str, directory: Path) -> subprocess.Popen[str]:
    """A launch of 2 ranks with 2 loader workers each, all six at work."""
    run = subprocess.Popen([*LAUNCH, "-n", "2", path, str(directory)], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not ((directory / "training").exists() and len(list(directory.glob("[0-9]*"))) == 6):
        assert time.monotonic() < end, "the ranks did not start"
        assert run.poll() is None
        time.sleep(0.05)
    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_c39_a_signal_to_the_launcher_leaves_no_process(
    tmp_path: Path, pids: Path, number: signal.Signals, code: int
) -> None:
    path = script(tmp_path, ENDLESS)
    run = in_mid_epoch(path, pids)
    start = time.monotonic()
    run.send_signal(number)
    _, said = run.communicate(timeout=15)
    assert run.returncode == code
    assert said.endswith(f"samestep: got {number.name}; all ranks were ended\n")
    assert alive(pids) == []
    assert time.monotonic() - start < 10


def test_c39_kill_9_of_the_launcher_leaves_no_process_and_a_restart_works(tmp_path: Path, pids: Path) -> None:
    run = in_mid_epoch(script(tmp_path, ENDLESS), pids)
    start = time.monotonic()
    run.kill()
    run.communicate(timeout=15)
    assert launched("-n", "2", script(tmp_path, SUM, "sum.py"), "1").stdout == "2 2\n"
    while alive(pids) and time.monotonic() - start < 10:
        time.sleep(0.05)
    assert alive(pids) == []


def test_c39_a_killed_ranks_loader_workers_end_with_the_run(tmp_path: Path, pids: Path) -> None:
    run = in_mid_epoch(script(tmp_path, ENDLESS), pids)
    ranks = [pid for pid in alive(pids) if os.getpgid(pid) == pid]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    run.communicate(timeout=15)
    assert run.returncode == 137
    assert alive(pids) == []
