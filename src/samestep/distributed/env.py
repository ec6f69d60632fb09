"""This rank's place among the ranks, as the launcher's environment tells it. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, MutableMapping

from samestep.errors import ConfigError

__all__ = ["Ranks", "read_environment"]

_TOGETHER = "a launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together"
_FIX = "start with `samestep launch`, torchrun or srun; or unset RANK and WORLD_SIZE to run alone"
_FIRST_UNREAL_STEP = 0xFFFFFFF0  # SLURM numbers its batch script, interactive shell and extern step from here upwards


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A rank's place. "Main" is global rank 0, never local rank 0."""

    rank: int
    """Global number of this rank, 0 <= rank < world_size."""
    local_rank: int
    """Number of this rank on its machine."""
    world_size: int
    """Number of ranks on all machines."""
    local_world_size: int
    """Number of ranks on this machine."""
    node_rank: int
    """Number of this machine."""

    @property
    def is_main(self) -> bool:
        """True on global rank 0."""
        return self.rank == 0


def read_environment(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The place from torchrun's variables, else from a running SLURM step's, else alone.

    SLURM tells each task its number but not where the ranks meet. So under SLURM, MASTER_ADDR (the step's first host)
    and MASTER_PORT (from the job's and the step's number) are added to `environ` where they are missing.

    Args:
        environ: the environment variables.

    Raises:
        ConfigError: for variables that are half set, no numbers, or contradict each other; it names them.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if _in_slurm_step(environ):
        return _from_slurm(environ)
    return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0)


def _from_torchrun(environ: Mapping[str, str]) -> Ranks:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environ:
            raise ConfigError(f"got {other}={environ[other]!r} without {name}", _TOGETHER, _FIX)
    world_size = _number(environ, "WORLD_SIZE", at_least=1)
    rank = _number(environ, "RANK", below=("WORLD_SIZE", world_size))
    # Launchers of one process a machine set no LOCAL_ variables; then the ranks count as being on one machine.
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size, at_least=1)
    if local_world_size > world_size:
        raise ConfigError(
            f"got LOCAL_WORLD_SIZE={local_world_size} with WORLD_SIZE={world_size}",
            "the ranks of one machine are a part of all ranks",
            _FIX,
        )
    default = rank % local_world_size
    local_rank = _number(environ, "LOCAL_RANK", default=default, below=("LOCAL_WORLD_SIZE", local_world_size))
    if world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise ConfigError(f"got WORLD_SIZE={world_size} without {name}", _TOGETHER, _FIX)
        _number(environ, "MASTER_PORT", at_least=1, below=("the number of ports", 65536))
    return Ranks(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK", default=0),
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several; sbatch's own script sees the same counts but runs once."""
    if "SLURM_PROCID" not in environ or "SLURM_NTASKS" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    running = step.isdecimal() and int(step) < _FIRST_UNREAL_STEP
    return running and _number(environ, "SLURM_NTASKS", at_least=1) > 1


def _from_slurm(environ: Mapping[str, str]) -> Ranks:
    world_size = _number(environ, "SLURM_NTASKS", at_least=1)
    rank = _number(environ, "SLURM_PROCID", below=("SLURM_NTASKS", world_size))
    node_rank = _number(environ, "SLURM_NODEID", default=0)
    local_world_size = min(_tasks_here(environ, node_rank, world_size), world_size)
    local_rank = _number(environ, "SLURM_LOCALID", below=("this node's tasks", local_world_size))
    if isinstance(environ, MutableMapping):
        if not environ.get("MASTER_ADDR"):
            environ["MASTER_ADDR"] = _first_host(environ)
        if not environ.get("MASTER_PORT"):
            environ["MASTER_PORT"] = str(_port_of_job(environ))
    return Ranks(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
    )


def _tasks_here(environ: Mapping[str, str], node_rank: int, world_size: int) -> int:
    """The entry for this node in SLURM's run-length list, e.g. "4(x2),3" is 4, 4, 3; all tasks without a list."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"got SLURM_TASKS_PER_NODE={text!r}", "it looks like 4(x2),3", "start with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node_rank] if node_rank < len(counts) else world_size


def _first_host(environ: Mapping[str, str]) -> str:
    """The first name of a host list such as "gpu[007-010,012],login1". The step's own list first: it may be shorter."""
    name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    text = environ.get(name, "")
    # Each bracket gives its first number, with its zeros; the name ends at the first comma outside brackets.
    match = re.fullmatch(r"((?:[^\[\],\s]|\[\d+[-,\d]*\])+)(?:,.*)?", text)
    if match is None:
        raise ConfigError(
            f"got {name}={text!r}", "its first host is where the ranks meet", "set MASTER_ADDR to the first node's name"
        )
    return re.sub(r"\[(\d+)[-,\d]*\]", r"\1", match[1])


def _port_of_job(environ: Mapping[str, str]) -> int:
    """A port that all tasks of a step find alike; below the range that Linux hands out to outgoing connections."""
    job = _number(environ, "SLURM_JOB_ID" if "SLURM_JOB_ID" in environ else "SLURM_JOBID")
    step = _number(environ, "SLURM_STEP_ID", default=0)
    return 15000 + (job * 7 + step) % 17000  # 7 apart, so that jobs with neighbouring numbers can have some steps each


def _number(
    environ: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    at_least: int = 0,
    below: tuple[str, int] | None = None,
) -> int:
    """The number in `name`; `below` is (what the limit is, the limit)."""
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} is not set", "the launcher sets it for each rank", _FIX)
        return default
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise ConfigError(f"got {name}={text!r}", f"{name} is a whole number, {at_least} or more", _FIX)
    value = int(text)
    if value < at_least:
        raise ConfigError(f"got {name}={value}", f"{name} is {at_least} or more", _FIX)
    if below is not None and value >= below[1]:
        raise ConfigError(f"got {name}={value}", f"{name} is less than {below[0]}, which is {below[1]}", _FIX)
    return value
