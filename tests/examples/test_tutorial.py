"""Each script of the tutorial and each example, run as it stands; what it prints is looked at."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TUTORIAL = sorted((EXAMPLES / "tutorial").glob("*.py"))


def script(name: str) -> Path:
    (path,) = EXAMPLES.rglob(f"{name}*.py")
    return path


def run_script(path: str, arguments: list[str], directory: str) -> list[str]:
    """What a rank that runs the script prints, as lines."""
    os.chdir(directory)
    sys.argv = [path, *arguments]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(path, run_name="__main__")
    return text.getvalue().splitlines()


def output(name: str, ranks: int, directory: Path, *arguments: str) -> list[str]:
    """What main prints; the other ranks must be silent."""
    printed, *others = run_ranks(run_script, ranks, str(script(name)), list(arguments), str(directory))
    assert not any(others), "only main prints"
    return printed


def number(text: str, pattern: str) -> float:
    found = re.search(pattern + r" ([-+.\de]+)", text)
    assert found, f"no {pattern!r} in {text!r}"
    return float(found[1])


def test_there_are_ten_steps_and_each_says_how_to_run_it() -> None:
    assert [path.name[:2] for path in TUTORIAL] == [f"{n:02}" for n in range(1, 11)]
    for path in [*TUTORIAL, *EXAMPLES.glob("*.py")]:
        assert str(path.relative_to(EXAMPLES.parent)) in path.read_text().split('"""')[1], f"{path} names no command"


def test_01_fp16_has_the_scale_and_the_weights_of_a_loop_by_hand(tmp_path: Path) -> None:
    scales, skipped, far, accuracy = output("01_", 1, tmp_path)
    assert number(scales, "by hand") == number(scales, "samestep") < 2.0**24
    assert number(skipped, "steps") >= 1
    assert number(far, "a weight") < 1e-4
    assert number(accuracy, "accuracy") > 0.8


def test_02_bf16_has_no_scale_and_fp32_weights(tmp_path: Path) -> None:
    fp32, bf16 = output("02_", 1, tmp_path)
    assert bf16.startswith("bf16:")
    assert "loss scale None, skipped 0, weights are torch.float32" in bf16
    assert number(bf16, "loss") == pytest.approx(number(fp32, "loss"), rel=0.05)


def test_03_train_one_epoch_returns_falling_losses_as_floats(tmp_path: Path) -> None:
    lines = output("03_", 1, tmp_path)
    losses = [number(line, "mean loss") for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert lines[-1].endswith("(float)")


@pytest.mark.parametrize("ranks", [1, 2])
def test_04_groups_are_set_up_and_gone(ranks: int, tmp_path: Path) -> None:
    run, after, by_hand = output("04_", ranks, tmp_path)
    assert run.startswith(f"run: {ranks} rank(s)")
    assert after.endswith("gone")
    assert number(by_hand, "epoch") == pytest.approx(1.48, abs=0.05)


def test_05_samples_and_augmentation_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, two = output("05_", 1, tmp_path), output("05_", 2, tmp_path)
    assert one == two
    assert sum(line.endswith("each sample once: True") for line in one) == 2


def test_06_the_loop_prints_each_hundred_steps_on_main_only(tmp_path: Path) -> None:
    one, two = output("06_", 1, tmp_path), output("06_", 2, tmp_path)
    assert [line.split(" loss")[0] for line in two] == ["step 100", "step 200", two[-1]]
    assert number(two[0], "loss") == pytest.approx(number(one[0], "loss"), rel=0.02)
    assert number(two[-1], "accuracy") > 0.9


def test_07_a_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = output("07_", 1, tmp_path, "--run-dir", "whole")
    assert "weights are the same: True" in whole[-1]
    output("07_", 1, tmp_path, "--run-dir", "cut", "--stop-at", "35")
    begin, end, foreign = output("07_", 2, tmp_path, "--run-dir", "cut")
    assert begin == "2 rank(s), continues from step 30"
    assert number(end, "weights") == pytest.approx(number(whole[1], "weights"), abs=2e-3)
    assert "epoch 2, 4 tensors" in foreign


def test_08_pieces_and_ranks_change_the_update_by_rounding_only(tmp_path: Path) -> None:
    results = [
        output("08_", ranks, tmp_path, "--micro-batch-size", size, "--precision", precision)
        for ranks, size, precision in ((1, "64", "fp32"), (2, "8", "fp32"), (2, "8", "bf16"))
    ]
    for lines in results:
        assert number(lines[0], "loss") == pytest.approx(number(results[0][0], "loss"), abs=2e-3)
        assert number(lines[-1], "weights") == pytest.approx(number(results[0][-1], "weights"), abs=2e-3)
    assert "main's have [8, 8, 8, 8]" in results[1][0]


def test_09_memory_is_a_figure_or_unknown(tmp_path: Path) -> None:
    before, during, after = output("09_", 1, tmp_path)
    assert number(after, "process_peak") >= number(before, "process") > 0
    assert re.search(r"on cpu: allocated unknown|on cuda\S*: allocated [\d.]+ MiB", during)


@pytest.mark.parametrize("ranks", [1, 2])
def test_10_throughput_counts_the_samples_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    counted, rate = output("10_", ranks, tmp_path)
    assert "1477 samples" in counted  # 1,797 less five windows of 64
    assert float(rate.split()[0]) > 0


def test_the_gan_trains_both_models_in_fp16_alike_on_two_ranks(tmp_path: Path) -> None:
    one = output("gan", 1, tmp_path, "--precision", "fp16", "--epochs", "2")
    two = output("gan", 2, tmp_path, "--precision", "fp16", "--epochs", "2")
    for ours, theirs in zip(one, two, strict=True):
        assert number(two[-1], "generator is") < number(two[-1], "blank one")
        if "critic" in ours:
            assert number(ours, "critic") == pytest.approx(number(theirs, "critic"), abs=0.02)


def test_a_stream_gives_each_sample_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, two = output("stream", 1, tmp_path), output("stream", 2, tmp_path)
    assert [line.split(",")[0] for line in two] == ["epoch 0: 1797 samples", "epoch 1: 1797 samples"]
    assert number(two[1], "loss") == pytest.approx(number(one[1], "loss"), rel=0.05)


def test_a_task_of_the_users_trains_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{script('own_task')}:MyTask", "--run-dir", str(tmp_path), "--quiet"]) == 0
    assert "goal 0.9: reached" in capsys.readouterr().out


def test_a_script_runs_under_launch_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "launch", "-n", "2", str(script("08_"))],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "2 rank(s), bf16: 29 updates" in done.stdout
