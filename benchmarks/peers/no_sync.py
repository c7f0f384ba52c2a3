"""Where PyTorch's DistributedDataParallel decides whether it averages gradients.

    python -m venv ENV
    ENV/bin/python -m pip install torch==2.13.0 numpy \
        --extra-index-url https://download.pytorch.org/whl/cpu
    ENV/bin/python benchmarks/peers/no_sync.py

Two processes, each with one parameter whose gradients are 1 and 2. The forward pass
runs outside of `no_sync`, as in `train.py` of Bhavkumar21/CurvaDion, or inside;
`backward` runs inside in both cases. Prints both gradients, by process.
"""

import contextlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

PROCESSES = 2


def gradient(model: torch.nn.parallel.DistributedDataParallel, inside: bool) -> float:
    """The parameter's gradient in this process, whose input is 1 + its number."""
    model.zero_grad()
    x = torch.tensor([[1.0 + dist.get_rank()]])
    with model.no_sync() if inside else contextlib.nullcontext():
        loss = model(x).sum()
    with model.no_sync():
        loss.backward()
    return model.module.weight.grad.item()


def process(rank: int, meeting: str) -> None:
    """One of the processes. The first prints a line for each case."""
    address = f"file://{meeting}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=PROCESSES
    )
    layer = torch.nn.Linear(1, 1, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    for inside in (False, True):
        found: list[float | None] = [None] * PROCESSES
        dist.all_gather_object(found, gradient(model, inside))
        if rank == 0:
            print("inside " if inside else "outside", *found)
    dist.destroy_process_group()


def main() -> None:
    """Run the program."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        torch.multiprocessing.spawn(process, (meeting,), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
