"""One exception tree: what was got, the rule, what to change."""

from __future__ import annotations

import pickle

import pytest

import samestep
from samestep import errors

BUILTIN = {
    "ConfigError": ValueError,
    "DataError": ValueError,
    "WindowError": RuntimeError,
    "ModelError": RuntimeError,
    "NonFiniteError": ArithmeticError,
    "CheckpointError": RuntimeError,
    "RunDirError": OSError,
    "RankError": RuntimeError,
}


def test_every_exception_is_public_and_in_the_tree() -> None:
    assert {*BUILTIN, "SamestepError"} == set(errors.__all__)
    for name in errors.__all__:
        assert getattr(samestep, name) is getattr(errors, name)


@pytest.mark.parametrize("name", BUILTIN)
def test_an_exception_is_also_the_builtin_that_loops_already_catch(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.SamestepError)
    assert issubclass(kind, BUILTIN[name])


@pytest.mark.parametrize("name", errors.__all__)
def test_the_message_has_all_three_parts_and_survives_a_process_boundary(name: str) -> None:
    error = getattr(errors, name)("got x=3", "x is even", "pass 2")
    assert str(error) == "got x=3; x is even; pass 2"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.got, again.rule, again.fix) == (
        type(error),
        str(error),
        "got x=3",
        "x is even",
        "pass 2",
    )


@pytest.mark.parametrize("name", errors.__all__)
def test_parts_that_are_left_out_leave_no_trace(name: str) -> None:
    assert str(getattr(errors, name)("only this")) == "only this"
