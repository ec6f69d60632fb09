"""The shape of the package: imports point one way, sizes are kept, the public names are those that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import samestep

SOURCE = Path(samestep.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# What each folder (or module at the top) may import of the others. errors is open to all.
ALLOWED = {
    "errors": set(),
    "rng": set(),
    "config": {"rng"},
    "data": {"rng"},
    "precision": set(),
    "optim": {"precision"},
    "distributed": set(),
    "checkpoint": {"samestep"},
    "monitor": {"distributed", "samestep"},
    "tasks": set(),
    "train": {"checkpoint", "config", "data", "distributed", "monitor", "optim", "precision", "rng", "tasks"},
    "testing": {"verify"},
    "verify": {"config", "data", "distributed", "monitor", "rng", "samestep", "tasks", "testing", "train"},
}
LIMIT_MODULE, LIMIT_FUNCTION = 420, 62
LONGER = {"train/window.py": 460}  # one optimizer step, from top to bottom in one file


def place(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "samestep":
                found.add(parts[1] if len(parts) > 1 else "samestep")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    here = place(path)
    if here in ("cli", "__init__", "__main__"):
        return
    beyond = imported(path) - ALLOWED[here] - {here, "errors"}
    assert not beyond, f"{here} imports {beyond}"


def test_only_the_distributed_folder_and_the_plain_loop_call_torch_distributed() -> None:
    callers = {str(path.relative_to(SOURCE)) for path in FILES if "torch.distributed" in imports_of_torch(path)}
    outside = {name for name in callers if not name.startswith("distributed/")}
    assert outside <= {"checkpoint/dcp.py", "train/plain.py", "cli/doctor.py", "testing/ranks.py", *verify_files()}


def verify_files() -> set[str]:
    return {str(path.relative_to(SOURCE)) for path in FILES if place(path) == "verify"}


def imports_of_torch(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_and_functions_keep_their_size(path: Path) -> None:
    text = path.read_text()
    limit = LONGER.get(str(path.relative_to(SOURCE)), LIMIT_MODULE)
    assert len(text.splitlines()) <= limit
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
            assert (node.end_lineno or 0) - start <= LIMIT_FUNCTION, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_unpickles_evaluates_or_runs_a_shell(path: Path) -> None:
    text = path.read_text()
    if path.name == "ranks.py":
        text = text.replace("pickle.loads(", "")  # results of the test's own child processes, over a pipe
    for pattern in (
        r"\bpickle\.loads?\(",
        r"(?<![.\w])eval\(",
        r"(?<![.\w])exec\(",
        r"shell=True",
        r"weights_only=False",
    ):
        assert not re.search(pattern, text), pattern
    assert "local_rank == 0" not in text


def test_the_public_names_are_sorted_few_and_real() -> None:
    names = [name for name in samestep.__all__ if not name.startswith("__")]
    assert names == sorted(names)
    assert len(names) <= 30
    for name in names:
        assert getattr(samestep, name) is not None
        assert (getattr(samestep, name).__doc__ or "").strip(), f"{name} has no docstring"


def test_importing_and_helping_load_no_torch_and_are_quick() -> None:
    code = "import sys, samestep, samestep.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for verb in ([], ["train"], ["launch"], ["doctor"]):
        best = min(timed_help(verb) for _ in range(3))
        assert best < 3.0, "far above 0.3 s: something heavy is imported"


def timed_help(verb: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "samestep", *verb, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert not re.search(r"\|\s+torch$", done.stderr, re.MULTILINE), "--help imports torch"
    return time.perf_counter() - start


def test_the_package_ships_its_types() -> None:
    assert (SOURCE / "py.typed").exists()
