import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.checkpoint.manifest import Manifest
from samestep.errors import CheckpointError

MANIFEST = Manifest(
    step=12,
    created="2026-01-02T03:04:05+00:00",
    versions={"samestep": "0.1.0", "torch": "2.13.0"},
    meta={"position": {"epoch": 1}, "lr": 0.1},
    state={"engine": {"scale": 65536.0}, "x": {"$": "float", "is": "nan"}},
    aliases={"head.weight": "embed.weight"},
    files={"tensors.safetensors": {"bytes": 3, "sha256": "0" * 64}},
)
TEXT = MANIFEST.to_text()


def changed(**fields: object) -> str:
    """A well-formed text with other fields, its digest right."""
    return dataclasses.replace(MANIFEST, **fields).to_text()


def test_a_manifest_comes_back():
    assert Manifest.from_text(TEXT, "m") == MANIFEST


@settings(deadline=None, max_examples=500)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_changes_nothing(at, bit):
    damaged = TEXT[:at] + chr(ord(TEXT[at]) ^ (1 << bit)) + TEXT[at + 1 :]
    try:
        assert Manifest.from_text(damaged, "runs/m.json") == MANIFEST
    except CheckpointError as e:
        assert "runs/m.json" in str(e)


@settings(deadline=None)
@given(st.integers(0, len(TEXT) - 1))
def test_a_truncated_manifest_is_refused_by_file(size):
    with pytest.raises(CheckpointError, match=r"^runs/m\.json"):
        Manifest.from_text(TEXT[:size], "runs/m.json")


def test_a_newer_schema_is_refused_before_anything_else_is_read():
    text = json.dumps({"schema": 2, "shards": []})
    with pytest.raises(CheckpointError, match=r"m has schema 2; .* reads schema 1; update samestep"):
        Manifest.from_text(text, "m")


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"schema": "1"}', '{"schema": true}', "[" * 100_000, ""])
def test_json_that_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError, match=r"^m "):
        Manifest.from_text(text, "m")


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1}, {"step": 1.0}, {"step": True}, {"meta": []}, {"created": None}, {"aliases": {"a": 1}},
        {"files": {"../../etc/passwd": {"bytes": 3, "sha256": "0" * 64}}}, {"files": {"a": {"bytes": 3}}},
        {"files": {"a": {"bytes": 3, "sha256": "xyz"}}}, {"files": {"a": {"bytes": "3", "sha256": "0" * 64}}},
    ],
)  # fmt: skip
def test_a_field_that_is_not_as_it_should_be_is_refused_though_the_digest_is_right(fields):
    with pytest.raises(CheckpointError, match=r"^m: "):
        Manifest.from_text(changed(**fields), "m")


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": {1, 2}}, {"a": object()}])
def test_meta_that_is_not_json_is_refused(meta):
    with pytest.raises(CheckpointError, match="meta is not JSON"):
        changed(meta=meta)
