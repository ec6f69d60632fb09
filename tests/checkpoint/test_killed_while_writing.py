import subprocess
import sys

import pytest
import torch

from samestep.checkpoint.storage import Store

# In each child, a SIGKILL takes the place of the k-th thing the save does to the file system, for every k.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from samestep.checkpoint.storage import Store

EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
step, root = int(sys.argv[1]), Path(sys.argv[2])

def state_of(value):
    return {"model": {"weight": torch.full((300,), float(value))}, "engine": {"step": value}}

def child(directory, kill_at):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in EVENTS and str(directory) in str(args[0]):
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
    sys.addaudithook(hook)
    Store(directory, keep_last=2).save(step, state_of(111), {})

def killed(kill_at):
    directory = root / str(kill_at)
    store = Store(directory, keep_last=2)
    store.save(9, state_of(9), {})
    store.save(10, state_of(10), {})
    pid = os.fork()
    if not pid:
        child(directory, kill_at)
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    found = Store(directory).newest(lambda message: None)
    state = found.load()
    value = state["engine"]["step"]
    assert found.manifest.step in (10, step), (kill_at, found)
    assert value in (10, 111), (kill_at, value)
    assert state["model"]["weight"].tolist() == [float(value)] * 300
    assert value == 111 or died
    store.save(12, state_of(12), {})
    assert store.newest(print).load()["engine"]["step"] == 12
    left = [path.name for path in directory.iterdir() if not path.name.startswith("step-")]
    assert not left, (kill_at, left)
    assert len(store.steps()) == 2
    shutil.rmtree(directory)
    return died, value

outcomes = []
while not outcomes or outcomes[-1][0]:
    outcomes.append(killed(len(outcomes)))
values = [value for _, value in outcomes]
assert values == sorted(values), values
print(len(outcomes), values.count(10))
"""


@pytest.mark.parametrize("step", [11, 10])
def test_c27_killed_at_any_instant_a_reader_sees_the_new_checkpoint_whole_or_the_one_before(tmp_path, step):
    """Step 11 is a new checkpoint; step 10 replaces one."""
    command = [sys.executable, "-c", KILLED, str(step), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    instants, before = map(int, run.stdout.split())
    assert instants > 10
    assert before > 4


HALF = """
import os, signal, sys
from pathlib import Path
import torch
from samestep.checkpoint import writer
from samestep.checkpoint.storage import Store
whole = writer._pieces
def half(snapshot):
    yield next(whole(snapshot))[:20]
    os.kill(os.getpid(), signal.SIGKILL)
writer._pieces = half
Store(Path(sys.argv[1])).save(11, {"weight": torch.ones(9)}, {})
"""


def test_c27_killed_after_a_few_bytes_the_run_continues_from_10_and_hears_of_11(tmp_path):
    store = Store(tmp_path / "checkpoints")
    for step in (9, 10):
        store.save(step, {"weight": torch.full((9,), float(step))}, {})
    before = {file.name: file.read_bytes() for file in store.path(10).iterdir()}
    command = [sys.executable, "-c", HALF, str(store.directory)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -9
    reports: list[str] = []
    checkpoint = store.newest(reports.append)
    assert checkpoint.manifest.step == 10
    assert len(reports) == 1
    assert "step-00000011" in reports[0]
    assert "not finished" in reports[0]
    assert {file.name: file.read_bytes() for file in store.path(10).iterdir()} == before
    assert store.steps() == [9, 10]
