"""Two ledgers compared: each planted difference is found at its window, in its field, with its cause."""

from __future__ import annotations

import copy
import json
import math
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep
from samestep.errors import ConfigError, RunDirError
from samestep.monitor import causes
from samestep.monitor.diff import Comparison, compare, relative
from samestep.monitor.digests import Digests
from samestep.testing import run_ranks

DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
Line = dict[str, Any]


# Real runs ------------------------------------------------------------------------------------------------------------


def train(
    directory: Path,
    *,
    seed: int = 0,
    batch_size: int = 8,
    lr: float = 0.1,
    weight_decay: float = 0.0,
    epochs: int = 2,
    digest_every: int | None = None,
    touch: Any = None,
    shuffle: bool = True,
    init_scale: float = 1.0,
    clip_norm: float | None = None,
    **settings: Any,
) -> Path:
    """A tiny run; `touch(net, optimizer, step)` is called before each window."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    settings = {"precision": "fp32", "progress": False, "init_scale": init_scale, **settings}
    with samestep.Run(directory, seed=seed, **{"digest_every": None, **settings}) as run:
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
        if touch:
            touch(net, optimizer, -1)
        model, optimizer = run.prepare(net, optimizer)
        loader = run.loader(DATA, batch_size=batch_size, micro_batch_size=2, shuffle=shuffle)
        digests = Digests(digest_every or 10**9, model.named_parameters, run.files.event)
        for _ in run.epochs(epochs):
            for window in loader:
                if digest_every and run.step == 0:
                    digests.after_window(0)
                if touch:
                    touch(net, optimizer, run.step)
                for x, y in window:
                    window.backward(torch.nn.functional.cross_entropy(model(x), y))
                window.step(clip_norm=clip_norm)
                if digest_every:
                    digests.after_window(run.step)
    return directory


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("reference") / "run", digest_every=3)


def found_with(reference: Path, tmp_path: Path, **changed: Any) -> Comparison:
    return compare(reference, train(tmp_path / "other", **{"digest_every": 3, **changed}))


def fields(found: Comparison) -> list[str]:
    return [difference.field for difference in found.differences]


def test_the_same_run_twice_is_the_same(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path)
    assert (found.same, found.step, found.windows, found.num_same, found.num_digests) == (True, None, [10, 10], 10, 4)
    assert causes.likely_cause(found) == ""
    assert causes.evidence(found)[0] == "the start lines are the same"


def test_another_seed_is_found_in_the_first_windows_data(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path, seed=1)
    assert (found.step, found.place) == (1, "window 0 of epoch 0 (step 1)")
    assert fields(found)[0] == "data"
    assert "seed" in causes.likely_cause(found)
    assert not causes.looks_like_rounding(found)


def test_another_batch_size_is_found_in_the_first_windows_samples(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path, batch_size=10)
    assert found.step == 1
    assert "samples" in fields(found)
    assert "batch_size" in causes.likely_cause(found)


def test_another_learning_rate_is_found_before_it_shows_in_the_loss(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path, lr=0.11)
    assert (found.step, fields(found)) == (1, ["lr"])
    assert found.relative("lr") == pytest.approx(1 / 11)
    assert "learning rate" in causes.likely_cause(found)


def test_another_schedule_is_found_where_it_parts(reference: Path, tmp_path: Path) -> None:
    def decay(net: Any, optimizer: Any, step: int) -> None:
        if step == 6:
            optimizer.param_groups[0]["lr"] = 0.05

    found = found_with(reference, tmp_path, touch=decay)
    assert (found.step, fields(found)) == (7, ["lr"])
    assert "another schedule" in causes.likely_cause(found)


def test_another_precision_is_named_as_the_cause(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path, precision="bf16")
    assert (found.step, fields(found)[0]) == (1, "loss")
    assert "fp32 / bf16" in causes.likely_cause(found)


def perturb(at: int, by: float) -> Any:
    def touch(net: Any, optimizer: Any, step: int) -> None:
        if step == at:
            with torch.no_grad():
                net[2].weight[1, 3] += by

    return touch


def test_one_perturbed_initial_weight_is_named_by_the_digests(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path, touch=perturb(-1, 1e-3))
    assert (found.step, fields(found), found.tensors) == (0, ["weights"], ["2.weight"])
    assert found.place == "before the first window"
    assert "the initial weights differ (2.weight)" in causes.likely_cause(found)
    assert not causes.looks_like_rounding(found)


def test_one_perturbed_initial_weight_is_suspected_without_digests(tmp_path: Path) -> None:
    plain = train(tmp_path / "a")
    found = compare(plain, train(tmp_path / "b", touch=perturb(-1, 0.1)))
    assert (found.step, fields(found)[0]) == (1, "loss")
    assert "other initial weights" in causes.likely_cause(found)
    assert any("no digest line" in line for line in causes.evidence(found))


def test_one_weight_perturbed_on_the_way_is_found_at_its_window(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path, touch=perturb(4, 0.1))
    assert (found.step, fields(found)[0], found.last_same, found.digest_same) == (5, "loss", 4, 3)
    assert "writes to weights" in causes.likely_cause(found)
    assert found.tensors_step == 6


def test_a_tiny_perturbation_looks_like_rounding(tmp_path: Path) -> None:
    plain = train(tmp_path / "a")
    found = compare(plain, train(tmp_path / "b", touch=perturb(4, 1e-6)))
    assert found.step in (5, 6)
    assert causes.looks_like_rounding(found)
    assert "exchange='exact'" in causes.likely_cause(found)


def test_another_optimizer_setting_is_found_in_the_weights(reference: Path, tmp_path: Path) -> None:
    found = compare(train(tmp_path / "a", digest_every=1), train(tmp_path / "b", digest_every=1, weight_decay=0.1))
    assert (found.step, fields(found), found.digest_same) == (1, ["weights"], 0)
    assert "weight decay" in causes.likely_cause(found)
    assert not causes.looks_like_rounding(found)


def test_another_optimizer_setting_is_suspected_without_digests(tmp_path: Path) -> None:
    found = compare(train(tmp_path / "a"), train(tmp_path / "b", clip_norm=0.01))
    assert (found.step, fields(found)[0]) == (2, "loss")
    assert "clip_norm" in causes.likely_cause(found)


def test_a_shorter_run_differs_at_its_end_only(reference: Path, tmp_path: Path) -> None:
    found = found_with(reference, tmp_path, epochs=1)
    assert (found.step, fields(found), found.windows, found.num_same) == (6, ["missing"], [10, 5], 5)
    assert "run B ends after step 5" in causes.likely_cause(found)
    assert "run A ends after step 5" in causes.likely_cause(compare(tmp_path / "other", reference))


def test_a_skipped_window_is_found_with_its_scale(tmp_path: Path) -> None:
    def overflow(net: Any, optimizer: Any, step: int) -> None:
        if step == 3:
            hooks.append(net[2].weight.register_hook(lambda grad: grad * math.inf))
        elif step == 4:
            hooks[0].remove()

    hooks: list[Any] = []
    found = compare(
        train(tmp_path / "a", precision="fp16", init_scale=64.0),
        train(tmp_path / "b", precision="fp16", init_scale=64.0, touch=overflow),
    )
    assert found.step == 4
    assert {"grad_norm", "skipped", "scale"} <= set(fields(found))
    assert "run B skipped this window" in causes.likely_cause(found)
    assert "64 / 64" in causes.likely_cause(found)
    assert found.relative("grad_norm") == math.inf


def test_another_first_scale_is_no_difference_of_the_loss(tmp_path: Path) -> None:
    a = train(tmp_path / "a", precision="fp16", init_scale=64.0)
    found = compare(a, train(tmp_path / "b", precision="fp16", init_scale=128.0))
    assert found.step == 1
    assert "scale" in fields(found)
    assert "loss" not in fields(found)


def ranks(directory: str, exchange: str) -> None:
    train(Path(directory), exchange=exchange, epochs=4)


def test_two_ranks_by_the_exact_exchange_are_one_rank(tmp_path: Path) -> None:
    train(tmp_path / "a", exchange="exact", epochs=4)
    run_ranks(ranks, 2, str(tmp_path / "b"), "exact")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert "world_size: 1 / 2" in causes.evidence(found)[0]


def test_two_ranks_by_the_fast_exchange_differ_by_rounding_at_most(tmp_path: Path) -> None:
    train(tmp_path / "a", epochs=4)
    run_ranks(ranks, 2, str(tmp_path / "b"), "fast")
    found = compare(tmp_path / "a", tmp_path / "b")
    if not found.same:
        assert causes.looks_like_rounding(found)
        assert "other ranks (1 / 2)" in causes.likely_cause(found)
    assert compare(tmp_path / "a", tmp_path / "b", 1e-3).same


def test_a_restart_leaves_a_ledger_that_is_the_uninterrupted_one(reference: Path, tmp_path: Path) -> None:
    train(tmp_path / "other", epochs=1, digest_every=3)
    found = found_with(reference, tmp_path)
    assert found.same
    assert found.windows == [10, 10]


# Ledgers made by hand -------------------------------------------------------------------------------------------------


def start(step: int = 0, **changed: Any) -> Line:
    return {"kind": "start", "step": step, "world_size": 1, "precision": "fp32", "torch": "2.13.0", **changed}


def window(step: int, **changed: Any) -> Line:
    return {
        "kind": "window",
        "time": time.time(),
        "epoch": (step - 1) // 10,
        "window": (step - 1) % 10,
        "step": step,
        "updates": step,
        "micro_batches": 4,
        "loss": 1.0 / step,
        "weight": 8.0,
        "samples": 8,
        "digest": f"{step:013x}",
        "grad_norm": 2.0 / step,
        "lr": [0.1, 0.01],
        "scale": None,
        "skipped": False,
        "seconds": time.perf_counter(),
        "data_seconds": 0.1,
        **changed,
    }


def digest(step: int, **tensors: str) -> Line:
    return {"kind": "digest", "step": step, "tensors": tensors, "all": "".join(tensors.values())}


def write(path: Path, lines: list[Line], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def plain(num_windows: int = 20) -> list[Line]:
    return [start(), *(window(step) for step in range(1, num_windows + 1))]


def compared(tmp_path: Path, a: list[Line], b: list[Line], tolerance: float = 0.0) -> Comparison:
    return compare(write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b), tolerance)


CHANGES: dict[str, tuple[Line, str, str]] = {
    "place": ({"window": 7}, "place", "different numbers of windows"),
    "order": ({"digest": "0abc", "loss": 3.0}, "data", "no function of (seed, epoch)"),
    "short window": ({"samples": 7, "weight": 7.0, "digest": "0"}, "data", "drop_last"),
    "weights of the loss": ({"weight": 7.0, "loss": 0.21}, "weight", "weight= of backward"),
    "a slow divergence": ({"loss": 0.2 * (1 + 1e-6)}, "loss", "exchange='exact'"),
    "a jump of the loss": ({"loss": 0.3}, "loss", "weight decay"),
    "a rounded gradient": ({"grad_norm": 0.4 * (1 + 1e-7)}, "grad_norm", "exchange='exact'"),
    "another gradient": ({"grad_norm": 0.5}, "grad_norm", "no_sync"),
    "a skipped window": ({"skipped": True, "grad_norm": "inf"}, "grad_norm", "run B skipped"),
    "a scale": ({"scale": 2.0}, "scale", "growth_interval"),
    "a schedule": ({"lr": [0.1, 0.02]}, "lr", "another schedule"),
    "a NaN": ({"loss": "nan"}, "loss", "dropout"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_one_window_is_found_there_with_its_cause(tmp_path: Path, name: str) -> None:
    changed, field, words = CHANGES[name]
    b = plain()
    b[5].update(changed)
    digests = [digest(4, w="1")] if name == "a NaN" else []
    found = compared(tmp_path, plain()[:5] + digests + plain()[5:], b[:5] + digests + b[5:])
    assert (found.step, found.last_same, found.num_same, fields(found)[0]) == (5, 4, 4, field)
    assert words in causes.likely_cause(found)
    assert causes.looks_like_rounding(found) == ("exchange='exact'" in words)


def test_the_clock_the_speed_and_the_logs_are_no_difference(tmp_path: Path) -> None:
    b = [{**line, "time": 1.0, "seconds": 9.0, "data_seconds": 5.0} for line in plain()]
    b.insert(4, {"kind": "log", "step": 3, "accuracy": 0.5})
    b.append({"kind": "end", "step": 20})
    assert compared(tmp_path, plain(), b).same


def test_how_many_micro_batches_is_told_but_is_no_difference(tmp_path: Path) -> None:
    b = [{**line, "micro_batches": 2} for line in plain()]
    assert compared(tmp_path, plain(), b).same
    b[3]["loss"] = 9.0
    assert "micro-batches a window: 4 / 2" in causes.evidence(compared(tmp_path, plain(), b))


def test_an_unknown_figure_is_no_difference(tmp_path: Path) -> None:
    b = [{**line, "digest": ""} for line in plain()]
    for line in b:
        line.pop("grad_norm", None)
    found = compared(tmp_path, plain(), b)
    assert found.same
    b[3]["loss"] = 9.0
    assert any("not known" in line for line in causes.evidence(compared(tmp_path, plain(), b)))


def test_nan_equals_nan(tmp_path: Path) -> None:
    a = plain()
    a[3]["loss"] = "nan"
    assert compared(tmp_path, a, copy.deepcopy(a)).same


def test_the_tolerance_lets_small_differences_pass_and_large_ones_not(tmp_path: Path) -> None:
    b = plain()
    b[3]["loss"] *= 1 + 1e-7
    b[9]["grad_norm"] *= 1 + 1e-3
    b.insert(5, digest(4, w="2"))
    a = [*plain()[:5], digest(4, w="1"), *plain()[5:]]
    assert compared(tmp_path, a, b).step == 3
    assert compared(tmp_path, a, b, 1e-6).step == 9
    assert compared(tmp_path, a, b, 1e-2).same


@pytest.mark.parametrize("tolerance", [-1.0, 1.0, math.nan, math.inf])
def test_a_tolerance_that_is_no_fraction_is_refused(tmp_path: Path, tolerance: float) -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        compared(tmp_path, plain(), plain(), tolerance)


def test_how_the_difference_grows_is_told(tmp_path: Path) -> None:
    b = plain()
    for step in range(5, 21):
        b[step]["loss"] *= 1 + 1e-7 * 2 ** (step - 5)
    found = compared(tmp_path, plain(), b)
    assert found.next_gap == pytest.approx(2e-7, rel=1e-3)
    assert found.largest_gap == (pytest.approx(1e-7 * 2**15, rel=1e-2), 20)
    assert any("at most (step 20)" in line for line in causes.evidence(found))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_digest_line_that_comes_a_window_late_belongs_to_its_step(tmp_path: Path, late: int) -> None:
    a, b = plain(), plain()
    a.insert(5, digest(4, u="1", w="1"))
    b.insert(5 + late, digest(4, u="1", w="2"))
    found = compared(tmp_path, a, b)
    assert (found.step, fields(found), found.tensors) == (4, ["weights"], ["w"])


def test_digests_at_different_intervals_are_compared_where_they_meet(tmp_path: Path) -> None:
    a = [line for step in range(1, 21) for line in (window(step), digest(step, w=str(step)))]
    b = [line for step in range(1, 21) for line in (window(step), *([digest(step, w="x")] if step % 6 == 0 else []))]
    assert compared(tmp_path, a, b).step == 6


def test_a_tensor_that_only_one_run_has_is_named(tmp_path: Path) -> None:
    found = compared(tmp_path, [*plain(), digest(20, a="1")], [*plain(), digest(20, a="1", b="2")])
    assert found.tensors == ["b"]


def test_equal_first_weights_point_at_the_model(tmp_path: Path) -> None:
    b = plain()
    b[1]["loss"] = 2.0
    found = compared(tmp_path, [start(), digest(0, w="1"), *plain()[1:]], [start(), digest(0, w="1"), *b[1:]])
    assert "the initial weights and the samples are the same" in causes.likely_cause(found)


def test_other_first_weights_of_a_tiny_difference_are_no_rounding(tmp_path: Path) -> None:
    b = plain()
    b[1]["loss"] *= 1 + 1e-7
    found = compared(tmp_path, [start(), digest(0, w="1"), *plain()[1:]], [start(), digest(0, w="2"), *b[1:]])
    assert not causes.looks_like_rounding(found)


def test_seeds_in_the_start_lines_are_taken_as_evidence(tmp_path: Path) -> None:
    b = plain()
    b[1]["digest"] = "0"
    found = compared(tmp_path, [start(seed=0), *plain()[1:]], [start(config={"seed": 3}), *b[1:]])
    assert "the seeds differ (0 / 3)" in causes.likely_cause(found)


def test_rounding_between_exact_runs_is_not_answered_with_exact(tmp_path: Path) -> None:
    b = plain()
    b[3]["loss"] *= 1 + 1e-7
    found = compared(tmp_path, [start(exchange="exact"), *plain()[1:]], [start(exchange="exact"), *b[1:]])
    assert causes.looks_like_rounding(found)
    assert "another build of torch" in causes.likely_cause(found)


def test_a_window_that_one_loop_left_out_is_missing(tmp_path: Path) -> None:
    found = compared(tmp_path, plain(), plain()[:7] + plain()[8:])
    assert (found.step, fields(found)) == (7, ["missing"])
    assert "left it out" in causes.likely_cause(found)


def test_what_a_restart_took_back_is_not_compared(tmp_path: Path) -> None:
    taken_back = [window(step, loss=9.0) for step in range(5, 9)]
    b = [*plain()[:5], *taken_back, start(4), *plain()[5:]]
    assert compared(tmp_path, plain(), b).same


def test_a_difference_right_after_a_restart_is_the_restarts(tmp_path: Path) -> None:
    later = [window(step, loss=1.0 / step * (1 + 1e-7)) for step in range(5, 21)]
    found = compared(tmp_path, plain(), [*plain()[:5], start(4, world_size=3), *later])
    assert "run B was restarted at step 4, which changed world_size: 1 / 3" in causes.likely_cause(found)
    assert "exchange='exact'" in causes.likely_cause(found)


def test_a_restart_that_changed_nothing_visible_points_at_unsaved_state(tmp_path: Path) -> None:
    later = [window(step, loss=5.0) for step in range(5, 21)]
    found = compared(tmp_path, plain(), [*plain()[:5], start(4), *later])
    assert "run.register" in causes.likely_cause(found)


def test_a_restart_some_windows_before_is_not_blamed(tmp_path: Path) -> None:
    b = [*plain()[:5], start(4, world_size=3), *plain()[5:]]
    b[10]["loss"] = 3.0
    assert "restarted" not in causes.likely_cause(compared(tmp_path, plain(), b))


def test_a_line_that_a_kill_cut_short_is_ignored(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", plain(), json.dumps(window(21))[:50])
    assert compare(a, write(tmp_path / "b.jsonl", plain())).same


UNREADABLE = {
    "does not exist": None,
    "is empty": "",
    "is no ledger: no JSON in line 1": "hello\nworld\n",
    "no JSON in line 2": json.dumps(start()) + '\n{"kind": "win\n' + json.dumps(window(1)) + "\n",
    "no object with a kind in line 1": "[1, 2]\n",
    "holds no window": json.dumps(start()) + "\n",
    "has schema 99": json.dumps(start(schema=99)) + "\n" + json.dumps(window(1)) + "\n",
    "a window without a step": '{"kind": "window", "step": "one"}\n',
    "step 1 comes after step 2": "".join(json.dumps(window(step)) + "\n" for step in (2, 1)),
}


@pytest.mark.parametrize("words", UNREADABLE)
def test_an_unreadable_ledger_is_refused_by_name(tmp_path: Path, words: str) -> None:
    path, text = tmp_path / "bad.jsonl", UNREADABLE[words]
    if text is not None:
        path.write_text(text)
    good = write(tmp_path / "good.jsonl", plain())
    for pair in ((path, good), (good, path)):
        with pytest.raises(RunDirError, match=words) as caught:
            compare(*pair)
        assert "bad.jsonl" in str(caught.value)


def test_bytes_that_are_no_text_and_a_directory_without_a_ledger_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x80\x00\xff\n" * 3)
    for path in (tmp_path / "x", tmp_path):
        with pytest.raises(RunDirError):
            compare(path, path)


VALUES = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["nan", "inf"]))


@st.composite
def ledgers(draw: st.DrawFn) -> list[Line]:
    """Start lines, windows (some left out), and digests, in the order of a run."""
    lines, steps = [start()], draw(st.lists(st.integers(1, 60), min_size=1, max_size=30, unique=True).map(sorted))
    for step in steps:
        if draw(st.integers(0, 9)) == 0:
            lines.append(start(step - 1, world_size=draw(st.integers(1, 4))))
        values = {name: draw(VALUES) for name in ("loss", "grad_norm", "scale")}
        lines.append(window(step, **values, skipped=draw(st.booleans())))
        if draw(st.booleans()):
            lines.append(digest(step, w=draw(st.text("01", max_size=2)), v="0"))
    return lines


@settings(max_examples=60, deadline=None)
@given(ledgers())
def test_a_ledger_never_differs_from_itself(tmp_path_factory: pytest.TempPathFactory, lines: list[Line]) -> None:
    assert compared(tmp_path_factory.mktemp("x"), lines, copy.deepcopy(lines)).same


@settings(max_examples=60, deadline=None)
@given(ledgers(), ledgers())
def test_any_two_ledgers_are_compared_alike_from_both_sides(
    tmp_path_factory: pytest.TempPathFactory, a: list[Line], b: list[Line]
) -> None:
    there, back = (compared(tmp_path_factory.mktemp("x"), *pair) for pair in ((a, b), (b, a)))
    assert (there.step, fields(there), there.num_same) == (back.step, fields(back), back.num_same)
    assert causes.looks_like_rounding(there) == causes.looks_like_rounding(back)
    assert bool(causes.likely_cause(there)) == bool(there.differences)
    assert there.tensors_step == back.tensors_step


def test_relative_differences_are_of_the_larger_number() -> None:
    assert relative(1.0, 2.0) == relative(2.0, 1.0) == 0.5
    assert relative(0.0, -0.0) == 0.0
    assert (
        relative("nan", 1.0) == relative("inf", 1.0) == relative([1.0], [1.0, 2.0]) == relative(None, 1.0) == math.inf
    )
    assert relative("nan", "nan") == relative("inf", "inf") == 0.0
    assert relative([1.0, 1.0], [1.0, 4.0]) == 0.75


def test_a_hundred_thousand_windows_take_seconds_and_no_memory(tmp_path: Path) -> None:
    lines = plain(100_000)
    a, b = write(tmp_path / "a.jsonl", lines), write(tmp_path / "b.jsonl", lines)
    begin = time.perf_counter()
    assert compare(a, b).num_same == 100_000
    assert time.perf_counter() - begin < 15.0
    short = write(tmp_path / "c.jsonl", lines[:5000])
    tracemalloc.start()
    compare(short, short)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
