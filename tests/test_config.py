"""Settings are obeyed or refused, never changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.config import RunConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", "fp64"),
        ("precision", None),
        ("exchange", "ring"),
        ("resume", True),
        ("nonfinite", "ignore"),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("seed", "0"),
        ("seed", True),
        ("max_skips", 0),
        ("max_skips", None),
        ("save_every", 0),
        ("save_every", 2.0),
        ("keep_last", 0),
        ("growth_interval", -3),
        ("micro_batches", True),
        ("micro_batches", "4"),
        ("num_threads", 0),
        ("log_every", -1),
        ("log_every", None),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
    ],
)
def test_a_value_that_cannot_be_obeyed_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(samestep.ConfigError, match=name):
        samestep.Run(**{name: value})


@pytest.mark.parametrize(
    ("given", "meant"),
    [("precison", "precision"), ("keep", "keep_last"), ("savevery", "save_every"), ("seeds", "seed")],
)
def test_an_unknown_setting_is_refused_with_a_suggestion(given: str, meant: str) -> None:
    with pytest.raises(samestep.ConfigError, match=f"unknown setting {given!r}.*{meant}"):
        samestep.Run(**{given: 1})


def test_a_mistyped_choice_gets_a_suggestion() -> None:
    with pytest.raises(samestep.ConfigError, match="did you mean 'bf16'"):
        samestep.Run(precision="bf61")


def test_nothing_like_it_still_lists_what_there_is() -> None:
    with pytest.raises(samestep.ConfigError, match="the settings of a run are directory, precision"):
        samestep.Run(zzzzzz=1)


def test_resume_must_needs_a_directory() -> None:
    with pytest.raises(samestep.ConfigError, match="without a directory"):
        samestep.Run(resume="must")


def test_settings_are_json_and_frozen() -> None:
    config = RunConfig(directory=Path("a/b"), keep_last=None, log_every=0)
    assert json.loads(json.dumps(config.to_json()))["directory"] == "a/b"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


def test_every_setting_has_a_docstring_of_its_own() -> None:
    import ast
    import inspect

    (klass,) = ast.parse(inspect.getsource(RunConfig)).body
    assert isinstance(klass, ast.ClassDef)
    for field, after in zip(klass.body, klass.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(field)


def test_directories_may_be_text_or_paths() -> None:
    assert samestep.Run("x").config.directory == samestep.Run(Path("x")).config.directory == Path("x")
