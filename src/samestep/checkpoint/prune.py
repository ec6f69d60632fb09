"""Deleting old checkpoints by hand: what retention would delete, and never the newest whole one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from samestep.checkpoint.survey import Entry, entries, meta_part
from samestep.errors import CheckpointError

__all__ = ["plan_pruning", "prune"]


def plan_pruning(directory: Path, keep_last: int | None = None, *, damaged: bool = False) -> tuple[list[Entry], int]:
    """What would be deleted, oldest first, and how many whole checkpoints are kept.

    Args:
        directory: a checkpoints directory.
        keep_last: whole checkpoints to keep, the newest; None: what the newest one's run had.
        damaged: delete those that are not whole too, also where they are newer than what is kept.

    Raises:
        CheckpointError: when no checkpoint is whole: the damaged ones may be all that is left of the run.
    """
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"got keep_last={keep_last}", "the newest whole checkpoint is kept", "pass 1 or more")
    known = entries(directory)
    whole = [entry for entry in known if entry.checkpoint is not None]
    while whole and (verified := _looked_at_again(whole[-1])).fault:  # what is kept must be good to the bit
        known[known.index(whole.pop())] = verified
    if not whole:
        raise CheckpointError(
            f"no checkpoint in {directory} is whole", "pruning keeps the newest whole one", "see samestep ckpt verify"
        )
    newest = whole[-1].checkpoint
    assert newest is not None
    if keep_last is None:
        recorded = meta_part(newest, "config").get("keep_last", 3)
        keep_last = recorded if type(recorded) is int and recorded >= 1 else len(whole)  # None keeps all
    kept = whole[-keep_last:]
    doomed = [
        entry
        for entry in known
        if entry not in kept and ((damaged and entry.fault) or entry.step < kept[0].step or entry in whole)
    ]
    return doomed, len(kept)


def _looked_at_again(entry: Entry) -> Entry:
    """With its files' digests."""
    found = entries(entry.path.parent, digests=True, only=entry.step)
    return next(new for new in found if new.path == entry.path)


def prune(doomed: list[Entry]) -> list[Path]:
    """Delete checkpoints, each renamed first so that no half of one stands under its name; those that are gone."""
    gone = []
    for entry in doomed:
        aside = entry.path.with_name(f".tmp-delete-{entry.path.name}-{os.getpid()}")
        try:
            if entry.path.is_symlink():
                entry.path.unlink()
            else:
                entry.path.rename(aside)
                shutil.rmtree(aside)
        except FileNotFoundError:
            pass  # a run that retires its own was quicker
        except OSError as e:  # what is left of it has a name that the next writer clears away
            raise CheckpointError(
                f"{entry.path} could not be deleted: {e.strerror}", "", "check permissions; the others stand"
            ) from e
        gone.append(entry.path)
    return gone
