"""One site that trains with PyTorch, in a run of several.

    python examples/sites_torch/main.py --site rome --run out/torch/run

The same command with another name, in another terminal or on another machine, is a
further site. After a crash, the same command continues.
"""

import argparse
import hashlib
import os
import time
import zlib
from pathlib import Path

import gpt
import optax
import torch

from curvadion_jax import compressors, sites

# What all sites of the run have alike.
RUN = {
    "every": 7,
    "quorum": 2,
    "grace": 5.0,
    "outer": optax.sgd(1.0, momentum=0.4, nesterov=True),
    "compressor": compressors.quantize(2),
}


def put(params: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    """Writes what the run has changed into the model."""
    with torch.no_grad():
        for name, x in params.items():
            if new[name] is not x:
                x.copy_(new[name])


def train(name: str, url: str, steps: int, out: Path, pace: float = 0.0) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, text = gpt.GPT(), gpt.Text()
    optimizers = gpt.optimizers(model)
    kept = out / f"{name}.pt"  # The parameters are in the run.
    first = load(kept, optimizers)
    params = dict(model.named_parameters())
    with sites.Site(url, name, **RUN) as site:
        put(params, site.start(params))
        for step in range(first, steps):
            begun = time.monotonic()
            batch = torch.from_numpy(text.batch((step, zlib.crc32(name.encode()))))
            loss = model(batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            put(params, site.sync(params, tokens=batch[:, 1:].numel()))
            if (step + 1) % RUN["every"] == 0:
                save(kept, optimizers, step + 1)
            if (step + 1) % 50 == 0:
                print(
                    f"{name} {step + 1}: {loss.item():.3f} {site.metrics}", flush=True
                )
            time.sleep(max(0.0, pace - (time.monotonic() - begun)))
        put(params, site.leave(params))
    with torch.no_grad():
        loss = model(torch.from_numpy(text.held_out())).item()
    report(
        name,
        loss,
        site.metrics,
        [params[key].detach().numpy() for key in sorted(params)],
    )


def save(file: Path, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"step": step, "states": states}, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


def load(file: Path, optimizers: list[torch.optim.Optimizer]) -> int:
    """The step to continue from."""
    if not file.exists():
        return 0
    found = torch.load(file, weights_only=True)
    for optimizer, state in zip(optimizers, found["states"], strict=True):
        optimizer.load_state_dict(state)
    return found["step"]


def report(name: str, loss: float, metrics: sites.SiteMetrics, arrays: list) -> None:
    digest = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:16]
    print(f"{name}: {loss:.4f} nats per byte of held-out text")
    print(f"{name}: syncs: {metrics.counted} of {metrics.contributions} counted")
    print(
        f"{name}: after round {metrics.round} the parameters are {digest}", flush=True
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", required=True, help="name of this site")
    parser.add_argument("--run", required=True, help="folder or URL of the run")
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--out", type=Path, default=Path("out/torch"))
    parser.add_argument(
        "--pace", type=float, default=0.0, help="seconds a step, at least"
    )
    return parser.parse_args()


if __name__ == "__main__":
    flags = arguments()
    train(flags.site, flags.run, flags.steps, flags.out, flags.pace)
