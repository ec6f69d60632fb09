"""The built-in tasks, the names of tasks, and the main job as a user starts it."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samestep import ConfigError, Task
from samestep.cli import train
from samestep.cli.main import main
from samestep.data.fetch import as_dataset
from samestep.tasks.base import BUILT_IN, load_task


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_task_gives_a_loss_that_its_model_can_learn_from(name: str) -> None:
    task = load_task(name)
    assert isinstance(task, Task)
    train_set, valid_set = map(as_dataset, task.data())
    assert len(train_set) > len(valid_set) > 0
    model = task.model()
    batch = torch.utils.data.default_collate([train_set[i] for i in range(4)])
    loss, weight = task.loss(model, batch)
    loss.backward()
    assert loss.ndim == 0
    assert float(weight) > 0
    assert all(param.grad is not None for param in model.parameters())
    assert all(float(weight) > 0 for _, weight in task.evaluate(model, batch).values())
    optimizer = task.optimizer(model, task.learning_rate)
    assert task.schedule(optimizer, 10) is not None


def test_digits_holds_out_each_fifth_image() -> None:
    (images, labels), (held_out, _) = load_task("digits").data()
    assert (len(images), len(held_out)) == (1437, 360)
    assert images.dtype == torch.float32
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert sorted(set(labels.tolist())) == list(range(10))


def test_bytes_lm_weighs_by_its_valid_targets() -> None:
    task = load_task("bytes_lm")
    data, _ = task.data()
    rows = [data[i] for i in range(len(data))]
    counts = torch.tensor([int((targets >= 0).sum()) for _, targets in rows])
    short = int(counts.argmin())
    assert 0 < int(counts[short]) < task.length == int(counts.max()), "files end in mid row"
    inputs, targets = torch.utils.data.default_collate([rows[0], rows[short]])
    model = task.model().eval()
    loss, weight = task.loss(model, (inputs, targets))
    assert int(weight) == int(counts[0] + counts[short])
    logs = torch.log_softmax(model(inputs), -1).gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(loss, -logs[targets >= 0].mean())


def test_bytes_lm_sees_no_later_byte() -> None:
    task = load_task("bytes_lm")
    model = task.model().eval()
    tokens = torch.arange(task.length).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 40:] = 7
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 40:], after[0, 40:])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "a task is one of bytes_lm, digits, or file.py:ClassName"),
        ("nowhere.py:Task", "there is no file nowhere.py"),
        ("{here}/task.py:Other", "task.py has no 'Other'"),
        ("{here}/task.py:Half", "has no data, loss, evaluate; a task has model, data, loss and evaluate"),
        ("{here}/task.txt:Half", "is not a Python file"),
    ],
)
def test_a_name_that_is_no_task_is_refused_with_what_to_write(name: str, message: str, tmp_path: Path) -> None:
    text = "class Half:\n    def model(self): ...\n"
    (tmp_path / "task.py").write_text(text)
    (tmp_path / "task.txt").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_task(name.format(here=tmp_path))


def test_a_class_that_leaves_methods_out_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]


def test_a_function_may_make_the_task(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "from samestep.tasks.digits import Digits\n\n"
        "def small():\n    task = Digits()\n    task.epochs = 1\n    return task\n"
    )
    assert load_task(f"{tmp_path / 'made.py'}:small").epochs == 1


def test_the_help_of_train_mentions_every_flag_and_both_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    for action in parser._actions:
        assert all(option in text for option in action.option_strings)
    assert all(name in text for name in (*BUILT_IN, "file.py:Name"))


def test_the_main_job_reaches_97_percent_in_bf16_on_two_ranks(tmp_path: Path) -> None:
    """The command of `make train`."""
    command = ["train", "digits", "--nproc", "2", "--precision", "bf16", "--resume", "never", "--run-dir"]
    done = subprocess.run(
        [sys.executable, "-m", "samestep", *command, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2 on cpu, precision bf16" in done.stdout or "2 on cuda, precision bf16" in done.stdout
    found = re.search(r"accuracy\W+([\d.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.97
    assert "goal 0.97: reached" in done.stdout
    assert (tmp_path / "ledger.jsonl").exists()
