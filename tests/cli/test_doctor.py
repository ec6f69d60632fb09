"""`samestep doctor`: it tries things, says yes, no or unknown, and fails only for what is essential."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time

import pytest

from samestep.cli import doctor


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, object]]]:
    code = doctor.run(argparse.Namespace(json=True))
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0)
    return code, {check["name"].strip(): check for check in answer["checks"]}


def test_everything_essential_works_here_in_under_15_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    code, checks = report(capsys)
    assert time.monotonic() - start < 15
    assert code == 0
    assert {check["state"] for check in checks.values()} <= {"yes", "no", "unknown"}
    for name in ("python", "torch", "samestep", "cpu", "cpu fp32", "gloo, 1 process", "gloo, 2 processes"):
        assert checks[name]["state"] == "yes"
    for name in ("cpu bf16", "cpu fp16"):
        assert "fp32 in a 512 x 512 product" in str(checks[name]["detail"])
    for name in ("cpu tf32", "cuda", "nccl", "free port on loopback", "open files", "shared memory"):
        assert name in checks or name == "cuda"


def test_lines_begin_with_the_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_all_checks", lambda: iter([doctor.Check(name="a", state="no", detail="b", fix="c")]))
    assert doctor.run(argparse.Namespace(json=False)) == 0
    assert capsys.readouterr().out.split() == ["no", "a", "b;", "c"]


def test_only_something_essential_makes_the_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = doctor.Check(name="gloo", state="no", essential=True)
    monkeypatch.setattr(doctor, "_all_checks", lambda: iter([broken]))
    assert doctor.run(argparse.Namespace(json=False)) == 1
    assert capsys.readouterr().out.endswith("broken: gloo\n")


def fail(*_: object) -> str:
    raise OSError("no route\nto host")


def test_broken_loopback_is_reported_and_not_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_sum_over", fail)
    code, checks = report(capsys)
    assert code == 1
    assert checks["gloo, 2 processes"]["detail"] == "OSError: no route to host"
    assert "GLOO_SOCKET_IFNAME" in str(checks["gloo, 2 processes"]["fix"])


def test_a_wrong_product_is_not_a_working_precision(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_sum_over", lambda *_: "")
    monkeypatch.setattr(doctor, "_scaler_step", fail)
    code, checks = report(capsys)
    assert code == 0
    assert checks["cpu fp16"]["state"] == "no"
    assert checks["cpu bf16"]["state"] == "yes"


def test_a_missing_extra_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fixes = [check.fix for check in doctor._extras()]
    assert [fix.split(" -m ")[1] for fix in fixes] == [
        "pip install 'samestep[tensorboard]'",
        "pip install 'samestep[metrics]'",
        "pip install 'samestep[examples]'",
    ]


def test_few_open_files_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 65536))
    checks = {check.name: check for check in doctor._machine()}
    assert checks["open files"].state == "no"
    assert "ulimit -n 65536" in checks["open files"].fix
