"""Why two runs differ: the likely cause of a comparison's first difference, in words, and the evidence for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.monitor.diff import Comparison

__all__ = ["changes", "evidence", "likely_cause", "looks_like_rounding"]

ROUNDING = 1e-4
"""A relative difference below this, on the same data, looks like rounding."""

_OTHER_CAUSE = ("place", "data", "samples", "weight", "skipped", "scale", "lr", "missing")


def looks_like_rounding(found: Comparison) -> bool:
    """Whether the first difference is small enough for rounding, on the same data, rate and scale."""
    if found.same or found.differs(*_OTHER_CAUSE) or _initial_weights(found):
        return False
    if found.differs("loss", "grad_norm"):
        return max(found.relative("loss"), found.relative("grad_norm")) < ROUNDING
    return found.next_gap is not None and found.next_gap < ROUNDING  # weights: the next loss tells how far they are


def likely_cause(found: Comparison) -> str:
    """What most likely made the first difference; "" when there is none."""
    if found.same:
        return ""
    if found.differs("missing"):
        return _missing(found)
    if any(found.restarts):
        return _restart(found)
    if found.differs("place", "data", "samples"):
        return _data(found)
    if found.differs("weight"):
        return (
            "the same samples have other loss weights: weight= of backward, or what counts as a term (padding, masks)"
        )
    if found.differs("skipped"):
        return _skipped(found)
    if found.differs("loss"):
        return _loss(found)
    if found.differs("grad_norm"):
        return _gradient(found)
    if found.differs("scale"):
        return "the loss scale has other settings: init_scale, growth_interval" + _because(found, "precision")
    if found.differs("lr"):
        return _rate(found)
    return _weights(found)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What two start lines say differently, as "world_size 1, then 2" would: ["world_size: 1 / 2"]."""
    left, right = _flat(before), _flat(after)
    names = [name for name in {**left, **right} if name not in ("kind", "time", "step", "config.directory")]
    return [
        f"{name}: {left.get(name, 'unknown')} / {right.get(name, 'unknown')}"
        for name in names
        if left.get(name) != right.get(name)
    ]


def evidence(found: Comparison) -> list[str]:
    """What else the two ledgers tell about the difference, a line each."""
    return list(_evidence(found))


def _evidence(found: Comparison) -> Iterator[str]:
    differing = changes(*found.starts)
    yield "the start lines differ in " + ", ".join(differing) if differing else "the start lines are the same"
    if found.current is not None and found.current[0].get("micro_batches") != found.current[1].get("micro_batches"):
        counts = " / ".join(str(line.get("micro_batches")) for line in found.current)
        yield f"micro-batches a window: {counts}"
    if found.same:
        return
    if found.last_same is not None:
        yield f"windows before it that are the same: {found.num_same}, up to step {found.last_same}"
    if found.current is not None and not all(line.get("digest") for line in found.current):
        yield "which samples the window used is not known in both ledgers"
    if found.digest_same is not None:
        yield f"the weights were last seen the same at step {found.digest_same}"
    elif not found.num_digests:
        yield "neither tensors nor weights can be named: the ledgers share no digest line"
    if found.tensors_step is not None:
        rest = f" and {len(found.tensors) - 5} more" if len(found.tensors) > 5 else ""
        yield f"tensors that differ at step {found.tensors_step}: {', '.join(found.tensors[:5])}{rest}"
    if found.largest_gap is not None and found.next_gap is not None:
        gap, step = found.largest_gap
        yield f"the loss differs by {found.next_gap:.1e} in the next window, by {gap:.1e} at most (step {step})"


# One function for each kind of difference -----------------------------------------------------------------------------


def _missing(found: Comparison) -> str:
    lost = next(d for d in found.differences if d.field == "missing")
    number = 0 if lost.a == "missing" else 1
    if found.windows[number] == found.num_same:
        at = f"after step {found.last_same}" if found.last_same is not None else "before the other's first window"
        return f"run {'AB'[number]} ends {at}: fewer epochs, stopped, or still going; up to there nothing differs"
    return f"run {'AB'[number]} has no such window: its loop left it out (no step), or lines were taken out of the file"


def _restart(found: Comparison) -> str:
    parts = []
    for name, pair in zip("AB", found.restarts, strict=True):
        if not pair:
            continue
        changed = changes(*pair)
        what = f"changed {', '.join(changed)}" if changed else "changed nothing that its start line tells"
        parts.append(f"run {name} was restarted at step {pair[1]['step']}, which {what}")
    text = "; ".join(parts)
    if looks_like_rounding(found):
        return f"{text}; the sums then round differently: with exchange='exact' a restart is bitwise the same"
    if found.differs("place", "data", "samples"):
        return f"{text}; and the windows after it hold other samples: another dataset, order or grid"
    return f"{text}; look for state that the script does not hand to run.prepare or run.register"


def _data(found: Comparison) -> str:
    if seeds := _differing(found, "seed"):
        return f"the seeds differ ({seeds}), and with them the order of the samples"
    if found.differs("samples"):
        if found.previous is None:
            return "another batch_size: the windows hold different numbers of samples"
        return "the epochs end differently: another length of the dataset, or drop_last"
    if found.differs("place"):
        return "the epochs have different numbers of windows: another length of the dataset, batch_size or drop_last"
    if found.previous is None:
        return "another order of the samples: the seed, shuffle, a sampler, weights, or the dataset's length"
    return "another order of the samples from here on: a sampler or batch_sampler that is no function of (seed, epoch)"


def _skipped(found: Comparison) -> str:
    skipped = next(d for d in found.differences if d.field == "skipped")
    text = f"run {'A' if skipped.a else 'B'} skipped this window for a gradient that was not finite, the other did not"
    if found.previous is not None and all(line.get("scale") is not None for line in found.previous):
        scales = " / ".join(f"{float(line['scale']):g}" for line in found.previous)
        return f"{text}: an overflow at the loss scale ({scales} before it), or a NaN in one run only"
    return f"{text}: an overflow in that run's precision or model" + _because(found, "precision")


def _loss(found: Comparison) -> str:
    if found.previous is None:
        return _first_loss(found)
    if looks_like_rounding(found):
        return _rounding(found)
    last = found.last_same
    if found.digest_same == last:
        return (
            f"the weights were the same after step {last}, and the samples are: the model computed something else "
            "(dropout's keys, precision, buffers such as BatchNorm's, or the samples' content)"
        )
    return (
        f"up to step {last} loss, gradient norm and rate are the same, so the update itself differs: the optimizer's "
        "other settings (momentum, weight decay, betas), clip_norm, or something that writes to weights or buffers"
    )


def _first_loss(found: Comparison) -> str:
    if seeds := _differing(found, "seed"):
        return f"the seeds differ ({seeds}): other initial weights, or other dropout"
    if _initial_weights(found):
        return f"the initial weights differ: {', '.join(found.tensors[:5])}"
    if precisions := _differing(found, "precision"):
        return f"the precisions differ ({precisions}); the samples are the same"
    if found.digest_same == 0:
        return (
            "the initial weights and the samples are the same: the model computed something else (dropout's keys, "
            "micro-batches, the samples' content, or another build of torch)"
        )
    if looks_like_rounding(found):
        return _rounding(found)
    return "the same samples, but another loss from the first window on: other initial weights, or another model"


def _rounding(found: Comparison) -> str:
    if precisions := _differing(found, "precision"):
        return f"rounding: the precisions differ ({precisions})"
    if all(_flat(start).get("exchange") == "exact" for start in found.starts):
        return "rounding, although both exchange exactly: another build of torch, kind of device, or threads a rank"
    if ranks := _differing(found, "world_size"):
        why = f"the gradients were added in another order on other ranks ({ranks})"
    else:
        why = "something was added in another order (kernels that are not deterministic, threads, machines, a restart)"
    return f"rounding: {why}; exchange='exact' keeps one order on any number of ranks"


def _gradient(found: Comparison) -> str:
    if looks_like_rounding(found):
        return _rounding(found)
    if precisions := _differing(found, "precision"):
        return f"the precisions differ ({precisions}): the loss is the same, the gradient is not"
    return (
        "the loss is the same, its gradient is not: the exchange (ranks, unused parameters, no_sync), a custom backward, "
        "or parameters frozen in one run"
    )


def _rate(found: Comparison) -> str:
    if found.previous is None:
        return "another learning rate from the first window on: its setting, or the schedule's start"
    updates = [line.get("updates") for line in found.previous]
    if updates[0] != updates[1]:
        return f"the schedules stand at different updates ({updates[0]} / {updates[1]}): skipped windows hold them"
    return "another schedule: the rates are the same up to here (warm-up, length, or decay differ)"


def _weights(found: Comparison) -> str:
    if found.step == 0:
        return f"the initial weights differ ({', '.join(found.tensors[:5])}): the model's seed, or a loaded state"
    since = f" since step {found.digest_same}" if found.digest_same is not None else ""
    if looks_like_rounding(found):
        return f"{_rounding(found)} (loss and gradient norm are the same{since})"
    return (
        f"loss, gradient norm and rate are the same{since}, the weights are not: the optimizer's other settings (momentum, "
        "weight decay, betas), clip_norm, or something that writes to weights or buffers"
    )


# Small parts ----------------------------------------------------------------------------------------------------------


def _initial_weights(found: Comparison) -> bool:
    return found.tensors_step == 0


def _differing(found: Comparison, name: str) -> str:
    """The two runs' settings of this name where both are known and differ, as "0 / 1"."""
    flat = [_flat(start) for start in found.starts]
    values = [start.get(name, start.get(f"config.{name}")) for start in flat]
    if None in values or values[0] == values[1]:
        return ""
    return f"{values[0]} / {values[1]}"


def _because(found: Comparison, name: str) -> str:
    values = _differing(found, name)
    return f" ({name}: {values})" if values else ""


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
