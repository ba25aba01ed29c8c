"""A script that knows nothing of Headrace but a folder and a signal: it fits a line by DDP."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 200
SAVE_EVERY = 50


def save(folder, model, step):
    if dist.get_rank() == 0:
        new = folder / "new.pt"
        torch.save({"model": model.state_dict(), "step": step}, new)
        new.replace(folder / "newest.pt")


def main():
    asked_to_leave = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_leave.append(True))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    folder, step = Path(os.environ["HEADRACE_CHECKPOINTS"]), 0
    if (folder / "newest.pt").exists():
        newest = torch.load(folder / "newest.pt", weights_only=True)
        model.load_state_dict(newest["model"])
        step = newest["step"]
    while step < STEPS:
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        # Ranks are told at different moments, and must leave at the same step.
        leave = torch.tensor(float(bool(asked_to_leave)))
        dist.all_reduce(leave)
        if step % SAVE_EVERY == 0 or leave:
            save(folder, model, step)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if leave:
            sys.exit(75)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
