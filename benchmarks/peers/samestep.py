"""Samestep's adapter for the peers' harness: copied beside the other adapters by `benchmarks/peers.py`."""

from __future__ import annotations

import torch
from common import Job, rank, world

import samestep

IMPORT = "import samestep"


def train(job: Job):
    """Ready batches through `train_one_epoch`, datasets through `samestep.Run`."""
    if job.batches is not None and job.accum == 1 and not job.ddp and not job.make_sched and not job.weight_fn:
        optimizer = job.make_opt(job.model.parameters())
        for epoch in range(job.epochs):
            loss = samestep.train_one_epoch(
                job.model,
                job.batches,
                optimizer,
                job.loss_fn,
                "cpu",
                precision=job.precision,
                clip_norm=job.clip,
                log_every=0,
            )
            job.on_epoch_end(epoch)
        return {"model": job.model, "loss": loss}
    return _run(job)


def _run(job: Job):
    data = job.dataset if job.dataset is not None else _joined(job.batches)
    size = len(job.batches[0][1]) if job.batches is not None else job.batch_size
    with samestep.Run(precision=job.precision, progress=False, nonfinite="skip") as run:
        optimizer = job.make_opt(job.model.parameters())
        schedule = job.make_sched(optimizer) if job.make_sched else None
        things = [job.model, optimizer] + ([schedule] if schedule is not None else [])
        model, *_ = run.prepare(*things)
        loader = run.loader(
            data,
            batch_size=size * job.accum * run.world_size,
            micro_batch_size=size,
            shuffle=job.shuffle and job.batches is None,
            num_workers=job.num_workers,
        )
        mean = samestep.Mean()
        for epoch in run.epochs(job.epochs):
            mean = samestep.Mean()
            for window in loader:
                for x, y in window:
                    weight = job.weight_fn(y) if job.weight_fn else len(y)
                    loss = job.loss_fn(model(x), y)
                    window.backward(loss, weight=weight)
                    mean.add(loss, weight)
                window.step(clip_norm=job.clip)
            job.on_epoch_end(epoch)
        own = mean.sums()
        return {"model": job.model, "loss": run.mean(mean), "loss_gathered": run.mean(mean), "sums": own}


def _joined(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def order(spec, state_path, resume):
    """`run.loader` continues in the middle of the epoch by itself."""
    with samestep.Run(f"{state_path}.run", progress=False, resume="must" if resume else "never", seed=spec.seed) as run:
        net = torch.nn.Linear(1, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        loader = run.loader(
            spec.dataset(),
            batch_size=spec.batch_size * (run.world_size if spec.ddp else 1),
            micro_batch_size=spec.batch_size,
            shuffle=True,
            num_workers=spec.num_workers,
        )
        for _ in run.epochs(1):
            for window in loader:
                for ids in window:
                    spec.saw(ids)
                    window.backward(model(torch.zeros(1, 1)).sum())
                window.step()
                if not resume and window.number + 1 == spec.save_at:
                    run.save()


def count_eval(dataset, batch_size):
    """Each sample once, whatever the sizes."""
    with samestep.Run(progress=False) as run:
        loader = run.loader(dataset, batch_size=batch_size * run.world_size)
        count = sum(len(batch) for batch in run.evaluate(loader))
        return {"run.evaluate": int(run.mean(count) * world())}


def save(path, model, opt):
    """A whole checkpoint: written, synced, verified, renamed."""
    from pathlib import Path

    from samestep.checkpoint.storage import Store

    Store(Path(f"{path}.ckpts"), keep_last=1).save(rank(), {"model": model.state_dict(), "opt": opt.state_dict()}, {})


def load(path, model, opt):
    """The newest whole checkpoint."""
    from pathlib import Path

    from samestep.checkpoint.storage import Store

    state = Store(Path(f"{path}.ckpts"), keep_last=1).newest(print).load("cpu")
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
