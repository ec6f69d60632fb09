"""launch(): refusals before any process, one machine as several, exit codes, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from samestep.distributed.launcher import launch
from samestep.errors import ConfigError
from samestep.testing import free_port


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


MARK = """
    import os, pathlib, sys
    pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.environ['LOCAL_RANK']} of {os.environ['WORLD_SIZE']}")
"""


def marks(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nproc": 0}, "got nproc=0"),
        ({"nproc": -2}, "got nproc=-2"),
        ({"nproc": 100_000}, "got nproc=100000"),
        ({"nproc": "two"}, "got nproc=two"),
        ({"nproc": 1, "max_restarts": -1}, "max_restarts=-1"),
        ({"nproc": 1, "nnodes": "2:1"}, "got nnodes='2:1'"),
        ({"nproc": 1, "nnodes": "some"}, "got nnodes='some'"),
        ({"nproc": 1, "nnodes": "2"}, "got rdzv_endpoint=None with nnodes=2"),
        ({"nproc": 1, "nnodes": "2", "rdzv_endpoint": "host"}, "got rdzv_endpoint='host'"),
        ({"nproc": 1, "nnodes": "2", "rdzv_endpoint": "host:29500"}, "without an id"),
        ({"nproc": 1, "node_rank": 1}, "got node_rank=1; there is one machine"),
        (
            {"nproc": 1, "nnodes": "1:2", "node_rank": 1, "rdzv_endpoint": "host:1", "rdzv_id": "a"},
            "got node_rank=1 with nnodes=1:2",
        ),
    ],
)
def test_settings_that_cannot_be_obeyed_are_refused_before_any_process(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError) as caught:
        launch([script(tmp_path, MARK), str(out)], **settings)
    assert said in str(caught.value)
    assert caught.value.fix
    assert marks(out) == {}


@pytest.mark.parametrize("command", [[], [""], ["missing.py"]])
def test_a_missing_script_is_refused(command: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"got no script|no file 'missing.py'"):
        launch(command, nproc=1)


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no module .nowhere_to_be_found\.train."):
        launch(["nowhere_to_be_found.train"], nproc=1, module=True)


def test_launch_leaves_the_callers_process_as_it_was(tmp_path: Path) -> None:
    variables = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    out = tmp_path / "out"
    out.mkdir()
    assert launch([script(tmp_path, MARK), str(out)], nproc=2) == 0
    assert marks(out) == {"0": "0 of 2", "1": "1 of 2"}
    assert dict(os.environ) == variables
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_the_cores_can_be_the_number_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert launch([script(tmp_path, MARK), str(out)], nproc="cpu") == 0
    assert len(marks(out)) == len(os.sched_getaffinity(0))


def test_failed_ranks_are_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        again = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("start", again, flush=True)
        sys.exit(0 if again == "1" else 4)
        """,
    )
    assert launch([path], nproc=1, max_restarts=1) == 0
    assert capfd.readouterr().out.split() == ["start", "0", "start", "1"]


NODE = "import sys; from samestep.distributed.launcher import launch; sys.exit(launch(sys.argv[4:], nproc=1, {}))"


@pytest.mark.parametrize("numbered", [True, False])
def test_two_machines_meet_at_one_endpoint(tmp_path: Path, numbered: bool) -> None:
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(x)
        print("sum", int(x), flush=True)
        dist.destroy_process_group()
        """,
    )
    settings = "nnodes=2, rdzv_endpoint=sys.argv[1], rdzv_id=sys.argv[2]"
    if numbered:
        settings += ", node_rank=int(sys.argv[3])"
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE.format(settings), endpoint, "job", str(node), path],
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        assert [node.communicate(timeout=60)[0] for node in nodes] == ["sum 3\n"] * 2
        assert [node.returncode for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
