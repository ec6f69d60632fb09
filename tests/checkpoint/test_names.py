import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from samestep.checkpoint.names import canonical, match
from samestep.checkpoint.storage import Checkpoint, Store
from samestep.errors import CheckpointError

WRAPS = ["plain", "ddp", "compiled", "compiled_ddp", "ddp_compiled"]
TORCH_NAMES = ["weight", "module.weight", "_orig_mod.weight", "_orig_mod.module.weight", "module._orig_mod.weight"]


def zeros(*names: str, shape: tuple[int, ...] = (2,)) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name in names}


def numbered(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), float(number)) for number, name in enumerate(names)}


def numbers(found: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: int(tensor[0]) for name, tensor in found.items()}


@pytest.fixture(scope="module")
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(kind: str, weight: float) -> torch.nn.Module:
    model: torch.nn.Module = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, weight)
    for wrapper in reversed(kind.split("_")):
        if wrapper == "ddp":
            model = DistributedDataParallel(model)
        elif wrapper == "compiled":
            model = torch.compile(model, backend="eager")  # the names are those of every backend
    return model


@pytest.mark.usefixtures("_alone")
def test_torchs_own_names_are_those_of_the_case():
    assert [next(iter(wrapped(kind, 0).state_dict())) for kind in WRAPS] == TORCH_NAMES


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("target", WRAPS)
@pytest.mark.parametrize("source", WRAPS)
def test_c26_a_model_saved_from_any_wrapper_loads_into_any_other(tmp_path, source, target):
    path = Store(tmp_path).save(1, {"model": wrapped(source, 5.0).state_dict()}, {})
    saved = Checkpoint.open(path).load()["model"]
    assert [canonical(name) for name in saved] == ["weight", "bias"]
    model = wrapped(target, 0.0)
    model.load_state_dict(match(saved, model.state_dict()), strict=True)
    assert next(model.parameters()).item() == 5.0


@pytest.mark.parametrize("saved", TORCH_NAMES)
@pytest.mark.parametrize("expected", TORCH_NAMES)
def test_every_one_of_torchs_names_means_every_other(saved, expected):
    assert list(match(zeros(saved), zeros(expected))) == [expected]


OWN = ("weight", "module.weight", "module.module.weight", "stem._orig_mod.weight")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_a_model_whose_own_attributes_are_called_module_is_not_damaged(prefix):
    saved = numbered(*(prefix + name for name in OWN))
    right = {name: number for number, name in enumerate(OWN)}
    assert numbers(match(saved, zeros(*OWN))) == right
    back = match(numbered(*OWN), zeros(*saved))
    assert numbers(back) == {prefix + name: number for name, number in right.items()}


def test_a_model_with_only_one_attribute_called_module_is_not_damaged():
    assert list(match(zeros("module.weight", "module.bias"), zeros("module.weight", "module.bias"))) == [
        "module.weight",
        "module.bias",
    ]
    assert list(match(zeros("module.module.weight"), zeros("module.weight"))) == ["module.weight"]


def test_wrappers_around_parts_of_a_model_are_understood():
    saved = numbered("stem.weight", "blocks.0._orig_mod.weight", "head.module.weight")
    own = ["stem.weight", "blocks.0.weight", "head.weight"]
    assert numbers(match(saved, zeros(*own))) == {name: number for number, name in enumerate(own)}


def test_names_that_stripping_would_make_equal_are_refused_and_not_guessed():
    with pytest.raises(CheckpointError, match=r"0 of 1 matched; 1 missing: weight; 2 unexpected"):
        match(zeros("a.module.weight", "a._orig_mod.weight"), zeros("weight"))


def test_tensors_are_handed_over_as_they_are():
    saved = {"module.w": torch.ones(2, dtype=torch.bfloat16)}
    assert match(saved, zeros("w"))["w"] is saved["module.w"]


def test_foreign_names_are_refused_with_the_count():
    with pytest.raises(CheckpointError, match=r"0 of 2 matched; 2 missing: weight, bias; 2 unexpected: net\.w, net\.b"):
        match(zeros("net.w", "net.b"), zeros("weight", "bias"))


def test_partial_takes_what_matches_but_not_nothing_and_not_another_shape():
    expected = zeros("body.weight", "head.weight")
    assert list(match(zeros("module.body.weight", "module.old.weight"), expected, partial=True)) == ["body.weight"]
    with pytest.raises(CheckpointError, match="0 of 2 matched"):
        match(zeros("x", "y"), expected, partial=True)
    with pytest.raises(CheckpointError, match=r"1 of another shape: head\.weight \(\(3,\) in the file, \(2,\) in the"):
        match({**zeros("body.weight"), **zeros("head.weight", shape=(3,))}, expected, partial=True)


def test_long_lists_are_cut_after_ten_and_counted():
    with pytest.raises(CheckpointError) as caught:
        match(zeros("x"), zeros(*(f"layer{number}" for number in range(25))))
    assert "0 of 25 matched; 25 missing: layer0, " in str(caught.value)
    assert "layer9 and 15 more; 1 unexpected: x" in str(caught.value)
    assert "layer10" not in str(caught.value)


def test_an_obvious_rename_is_suggested_and_works():
    saved = {"module.fc.w": torch.zeros(3, 2), "module.fc.b": torch.zeros(3), "module.norm": torch.zeros(7)}
    expected = {"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3), "norm": torch.zeros(7)}
    with pytest.raises(CheckpointError) as caught:
        match(saved, expected)
    rename = {"module.fc.w": "fc.weight", "module.fc.b": "fc.bias"}
    assert f"rename={rename}" in str(caught.value)
    assert list(match(saved, expected, rename=rename)) == list(expected)


def test_a_rename_that_two_tensors_could_mean_is_not_suggested():
    with pytest.raises(CheckpointError) as caught:
        match(zeros("a", "b"), zeros("c", "d"))
    assert "rename" not in str(caught.value)


def test_a_rename_of_an_absent_or_a_taken_name_is_refused():
    with pytest.raises(CheckpointError, match="rename has typo, which the file does not hold"):
        match(zeros("a"), zeros("b"), rename={"typo": "b"})
    with pytest.raises(CheckpointError, match="two tensors the name b"):
        match(zeros("a", "b"), zeros("b"), rename={"a": "b"})


def test_a_modules_extra_state_is_handed_over_too():
    saved, expected = {**zeros("w"), "_extra_state": {"scale": 2}}, {**zeros("w"), "_extra_state": {"scale": 1}}
    assert match(saved, expected)["_extra_state"] == {"scale": 2}


def test_an_empty_model_takes_an_empty_file():
    assert match({}, {}) == {}
    with pytest.raises(CheckpointError, match="0 of 1 matched"):
        match({}, zeros("w"), partial=True)


def test_matching_changes_neither_side():
    saved, expected = zeros("module.a", "module.b"), zeros("a", "b")
    before = copy.copy(saved), copy.copy(expected)
    match(saved, expected)
    assert (list(saved), list(expected)) == (list(before[0]), list(before[1]))


def test_patterns_name_what_is_left_and_all_else_is_strict():
    expected = zeros("body.weight", "head.weight", "head.bias")
    saved = {**numbered("module.body.weight"), **zeros("module.head.weight", shape=(9,))}
    assert list(match(saved, expected, partial="head.*")) == ["body.weight"]
    assert list(match(saved, expected, partial=["head.weight", "*.bias"])) == ["body.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing: head\.bias"):
        match(saved, expected, partial="head.weight")
    with pytest.raises(CheckpointError, match=r"1 unexpected: module\.old"):
        match({**saved, **zeros("module.old")}, expected, partial="head.*")
    assert list(match({**saved, **zeros("module.old")}, expected, partial=["head.*", "old"])) == ["body.weight"]


def test_a_pattern_that_means_nothing_is_refused():
    with pytest.raises(CheckpointError, match=r"partial has 'haed\.\*', which no name of the model"):
        match(zeros("body.w"), zeros("body.w", "head.w"), partial="haed.*")


def test_beginnings_of_names_are_suggested_and_work():
    saved, expected = zeros("model.a.w", "model.b.w", "loss.w"), zeros("a.w", "b.w")
    with pytest.raises(CheckpointError) as caught:
        match(saved, expected)
    assert "pass rename={'model.': ''}" in str(caught.value)
    assert list(match(saved, expected, rename={"model.": ""}, partial="loss.*")) == ["a.w", "b.w"]
    assert numbers(match(numbered("module.model.a.w"), zeros("a.w"), rename={"module.model.": ""})) == {"a.w": 0}
    with pytest.raises(CheckpointError) as caught:
        match(zeros("a.w", "b.w"), zeros("net.a.w", "net.b.w"))
    assert "pass rename={'': 'net.'}" in str(caught.value)
    assert list(match(zeros("a.w", "b.w"), zeros("net.a.w", "net.b.w"), rename={"": "net."})) == ["net.a.w", "net.b.w"]


def test_the_longest_beginning_and_a_whole_name_go_first():
    saved = numbered("a.b.w", "a.w", "a.v")
    rename = {"a.": "x.", "a.b.": "y.", "a.v": "z"}
    assert numbers(match(saved, zeros("y.w", "x.w", "z"), rename=rename)) == {"y.w": 0, "x.w": 1, "z": 2}
    with pytest.raises(CheckpointError, match=r"rename has q\., which the file does not hold"):
        match(saved, zeros("w"), rename={"q.": ""})


def test_a_tied_weight_that_is_stored_once_fills_all_its_names():
    shared = torch.zeros(2)
    expected = {"embed.weight": shared, "head.weight": shared, "other": torch.zeros(2)}
    for kept in ("embed.weight", "head.weight"):
        found = match(numbered(kept, "other"), expected)
        assert numbers(found) == {"embed.weight": 0, "head.weight": 0, "other": 1}
    with pytest.raises(CheckpointError, match="1 missing: other"):
        match(numbered("embed.weight"), expected)


name = st.sampled_from(["a", "b", "module", "_orig_mod", "w", "head"])
names = st.lists(st.lists(name, min_size=1, max_size=4).map(".".join), min_size=1, max_size=6, unique=True)


@given(own=names, wrap=st.sampled_from(["", "module.", "_orig_mod.", "_forward_module.", "module._orig_mod."]))
def test_any_models_own_names_load_bare_or_wrapped(own, wrap):
    expected = zeros(*own)
    saved = {wrap + one: torch.full((2,), float(number)) for number, one in enumerate(own)}
    assert numbers(match(saved, expected)) == {one: number for number, one in enumerate(own)}
