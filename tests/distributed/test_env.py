import pytest

from samestep.distributed.env import Ranks, read_environment
from samestep.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "812345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "3,2",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}


def test_no_variables_means_alone() -> None:
    ranks = read_environment({})
    assert ranks == Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0)
    assert ranks.is_main


def test_torchruns_variables_are_read() -> None:
    ranks = read_environment(TORCHRUN)
    assert ranks == Ranks(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)


def test_main_is_global_rank_zero_and_not_local_rank_zero() -> None:
    ranks = read_environment({**TORCHRUN, "RANK": "4", "LOCAL_RANK": "0"})
    assert not ranks.is_main


def test_local_variables_may_be_missing() -> None:
    environ = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert read_environment(environ) == Ranks(rank=5, local_rank=5, world_size=8, local_world_size=8, node_rank=0)


def test_one_rank_needs_no_meeting_place() -> None:
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"WORLD_SIZE": None}, "got RANK='5' without WORLD_SIZE"),
        ({"RANK": None}, "got WORLD_SIZE='8' without RANK"),
        ({"RANK": "8"}, "got RANK=8; RANK is less than WORLD_SIZE, which is 8"),
        ({"RANK": "-1"}, "got RANK='-1'; RANK is a whole number"),
        ({"RANK": "one"}, "got RANK='one'; RANK is a whole number"),
        ({"RANK": ""}, "got RANK=''; RANK is a whole number"),
        ({"WORLD_SIZE": "0"}, "got WORLD_SIZE=0; WORLD_SIZE is 1 or more"),
        ({"WORLD_SIZE": "8.0"}, "got WORLD_SIZE='8.0'; WORLD_SIZE is a whole number"),
        ({"LOCAL_RANK": "4"}, "got LOCAL_RANK=4; LOCAL_RANK is less than LOCAL_WORLD_SIZE, which is 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "got LOCAL_WORLD_SIZE=9 with WORLD_SIZE=8"),
        ({"MASTER_ADDR": None}, "got WORLD_SIZE=8 without MASTER_ADDR"),
        ({"MASTER_PORT": None}, "got WORLD_SIZE=8 without MASTER_PORT"),
        ({"MASTER_PORT": "70000"}, "got MASTER_PORT=70000"),
    ],
)
def test_half_set_or_contradicting_variables_are_named(change: dict[str, str | None], said: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        read_environment(environ)
    assert said in str(caught.value)
    assert caught.value.fix


def test_slurms_variables_are_read_and_the_meeting_place_is_added() -> None:
    environ = dict(SLURM)
    ranks = read_environment(environ)
    assert ranks == Ranks(rank=4, local_rank=1, world_size=5, local_world_size=2, node_rank=1)
    assert environ["MASTER_ADDR"] == "gpu007"
    assert 15000 <= int(environ["MASTER_PORT"]) < 32000


def test_all_tasks_of_a_step_find_one_port_and_steps_find_different_ones() -> None:
    ports = []
    for change in ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, {}, {"SLURM_STEP_ID": "1"}):
        environ = {**SLURM, **change}
        read_environment(environ)
        ports.append(environ["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]


def test_a_meeting_place_set_by_the_user_stays_under_slurm() -> None:
    environ = {**SLURM, "MASTER_ADDR": "login1", "MASTER_PORT": "4000"}
    read_environment(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("login1", "4000")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-010,012],login1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]-node[04-08].cluster", "rack1-node04.cluster"),
        ("a-b-1.example.org", "a-b-1.example.org"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    environ = {**SLURM, "SLURM_JOB_NODELIST": nodes}
    read_environment(environ)
    assert environ["MASTER_ADDR"] == first


def test_the_steps_own_node_list_comes_before_the_jobs() -> None:
    environ = {**SLURM, "SLURM_STEP_NODELIST": "gpu[012-013]"}
    read_environment(environ)
    assert environ["MASTER_ADDR"] == "gpu012"


def test_a_node_list_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"got SLURM_JOB_NODELIST='gpu\[a-'.*set MASTER_ADDR"):
        read_environment({**SLURM, "SLURM_JOB_NODELIST": "gpu[a-"})


@pytest.mark.parametrize("counts", ["2(x2),1", "3,2", "2(x3)"])
def test_ranks_of_a_slurm_node_come_from_the_run_lengths(counts: str) -> None:
    assert read_environment({**SLURM, "SLURM_TASKS_PER_NODE": counts}).local_world_size == 2


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_STEP_ID": None},  # older sbatch: its script has no step
        {"SLURM_STEP_ID": "4294967291"},  # newer sbatch: the script is a step with a number of its own
        {"SLURM_STEP_ID": "4294967290"},  # salloc's interactive shell
    ],
)
def test_a_slurm_allocation_without_a_running_step_means_alone(change: dict[str, str | None]) -> None:
    environ = {name: value for name, value in {**SLURM, **change}.items() if value is not None}
    assert read_environment(environ).world_size == 1
    assert "MASTER_ADDR" not in environ


def test_torchruns_variables_come_before_slurms() -> None:
    assert read_environment({**SLURM, **TORCHRUN}).world_size == 8


def test_a_slurm_rank_beyond_the_tasks_is_named() -> None:
    with pytest.raises(ConfigError, match="got SLURM_PROCID=5; SLURM_PROCID is less than SLURM_NTASKS, which is 5"):
        read_environment({**SLURM, "SLURM_PROCID": "5"})
