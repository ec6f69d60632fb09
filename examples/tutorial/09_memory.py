"""Step 9: memory: what a step allocates, what is reserved, and the peak; on a CPU what the process holds.

Figures are in bytes as torch and the system give them; what is unknown (GPU figures on a CPU) is shown as unknown.

    python examples/tutorial/09_memory.py
    samestep launch -n 2 examples/tutorial/09_memory.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samestep


def line(name: str) -> str:
    """The report as one line, in MiB."""
    report = samestep.memory_report()
    shown = [
        f"{key} " + ("unknown" if value is None else f"{value / 2**20:.1f} MiB")
        for key, value in report.items()
        if key != "device"
    ]
    return f"{name} on {report['device']}: " + ", ".join(shown)


def main() -> None:
    """One epoch with a line before, within and after it."""
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    with samestep.Run(precision="bf16", progress=False) as run:
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)  # the peak from here on
        net = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 10))
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True))
        windows = run.loader(data, batch_size=256, micro_batch_size=64, shuffle=True)
        run.print(line("before the first step"))
        for _ in run.epochs(1):
            for window in windows:
                for x, y in window:
                    loss = F.cross_entropy(model(x), y)
                    if window.number == 1 and window.current == window.share[0]:
                        run.print(line("after a forward, graph alive"))
                    window.backward(loss, weight=len(y))
                window.step()
        run.print(line("after the epoch"))


if __name__ == "__main__":
    main()
