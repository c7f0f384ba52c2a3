"""`local_muon` inside one slice: Levanter's `train_lm` on replicas of two devices.

python examples/ports/levanter/in_slice.py --replicas 2

For Python >= 3.12, with Levanter installed (README). `rows.py` has the trainer and the
optimizer; Levanter itself needs no change for them.
"""

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import command  # noqa: E402
import upstream  # noqa: E402

INSIDE = 2  # devices of a replica


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--out", type=Path, default=Path("out/in_slice"))
    parser.add_argument("--folder", type=Path, default=command.DOWNLOADS)
    options, more = parser.parse_known_args(arguments)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    sys.path.insert(0, str(upstream.levanter(options.folder, patched=True)))

    import jax

    jax.config.update("jax_num_cpu_devices", options.replicas * INSIDE)
    import main as port
    import rows
    from levanter.main import train_lm
    from levanter.models.gpt2 import Gpt2Config

    settings = {
        "trainer.id": "in_slice",
        "trainer.log_dir": options.out / "logs",
        "trainer.checkpointer.base_path": options.out / "checkpoints",
        "trainer.jax_compilation_cache_dir": options.out / "compiled",
    }
    given = [x for name, value in settings.items() for x in (f"--{name}", str(value))]
    config = port.tiny(given + more, steps=options.steps, out=options.out)
    config.site = None
    # Llama computes its rotary embeddings while it is traced, which JAX 0.10.2 cannot
    # inside a shard_map over some of the axes of the mesh in use.
    config.model = Gpt2Config(
        max_seq_len=128,
        hidden_dim=64,
        num_layers=2,
        num_heads=4,
        gradient_checkpointing=False,
        tokenizer=config.model.tokenizer,
    )
    del config.data.components["text"].datasets["validation"]  # it would see rows
    config.optimizer = rows.LocalMuonConfig(learning_rate=0.02, weight_decay=0.0)
    config.trainer.mesh = rows.mesh_config(options.replicas, INSIDE)
    train_lm.Trainer = rows.ReplicaTrainer
    train_lm.main(config)

    found = json.loads((options.out / "eval_results.json").read_text())
    result = {name: found[name] for name in ("loss", "syncs", "share")}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
