"""The training that `benchmarks.recovery` breaks: DDP over gloo, a checkpoint now and then.

A script as many people have one. It knows nothing of Headrace: RANK, WORLD_SIZE and MASTER_ADDR
come from outside, and so does the folder in which it saves and notes each step. Told to leave by
TERM or USR2, it saves and leaves with 75.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP_S = 0.1
SAVE_EVERY_S = 3.0


def main(folder: Path, *, incarnation: str, steps: int) -> int:
    asked_to_leave: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: asked_to_leave.append(number))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    newest, step, saved_at_s = folder / "newest.pt", 0, time.monotonic()
    if newest.exists():
        kept = torch.load(newest, weights_only=True)
        model.load_state_dict(kept["model"])
        step = kept["step"]
    notes = (folder / "steps").open("a") if dist.get_rank() == 0 else None
    while step < steps:
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)
        step += 1
        is_due = time.monotonic() - saved_at_s > SAVE_EVERY_S
        votes = torch.tensor([float(bool(asked_to_leave)), float(is_due)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        leave, save = (bool(vote) for vote in votes)
        if notes is not None:
            print(incarnation, step, time.time(), file=notes, flush=True)
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if leave or save:
                torch.save({"model": model.state_dict(), "step": step}, folder / "new.pt")
                (folder / "new.pt").replace(newest)
        if leave or save:
            saved_at_s = time.monotonic()
        if leave:
            return 75
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    left_with = main(Path(sys.argv[1]), incarnation=sys.argv[2], steps=int(sys.argv[3]))
    sys.stdout.flush()
    # A process group whose peers are gone can keep the interpreter from ending.
    os._exit(left_with)
