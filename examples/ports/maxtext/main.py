"""MaxText's own training loop on replicas, on the text of the standard library.

python examples/ports/maxtext/main.py --optimizer local_muon --steps 200

For Python >= 3.12, with MaxText's requirements installed (README).
"""

import os
import sys
import tempfile
from pathlib import Path

PORTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PORTS))

import command  # noqa: E402
import upstream  # noqa: E402

REPLICAS, FSDP = 4, 2


def main(arguments: list[str] | None = None) -> dict:
    parser = command.parser(__doc__, "local_muon")
    parser.add_argument("--folder", type=Path, default=command.DOWNLOADS)
    options = parser.parse_args(arguments)
    ours = options.optimizer != "adamw"
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    sys.path.insert(0, str(upstream.maxtext(options.folder, patched=ours)))

    import jax
    import jax.experimental.xla_metadata

    jax.config.update("jax_num_cpu_devices", REPLICAS * FSDP)
    if not hasattr(jax.experimental.xla_metadata, "must_fuse_call"):
        # Of newer versions of JAX; its attention kernel for TPUs is not used here.
        jax.experimental.xla_metadata.must_fuse_call = lambda name: lambda f: f

    import tokens
    from maxtext.common import metric_logger
    from maxtext.configs import pyconfig
    from maxtext.input_pipeline import synthetic_data_processing
    from maxtext.trainers.pre_train import train

    length = 128
    crops = tokens.batches(32, length + 1)

    def next_batch(self):
        import numpy as np

        crop = next(crops)
        whole = np.ones((len(crop), length), np.int32)
        places = np.broadcast_to(np.arange(length + 1, dtype=np.int32), crop.shape)
        return self.data_generator(self.config, (crop, places, whole))

    synthetic_data_processing.SyntheticDataIterator.__next__ = next_batch
    written = []
    logger = metric_logger.MetricLogger
    logger.write_metrics = lambda self, metrics, *_: written.append(
        {name: float(value) for name, value in metrics["scalar"].items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run_name": "port",
            "base_output_directory": folder,
            "dataset_type": "synthetic",
            "enable_checkpointing": False,
            "enable_goodput_recording": False,
            "monitor_goodput": False,
            "hardware": "cpu",
            "skip_jax_distributed_system": True,
            "base_emb_dim": 64,
            "base_num_query_heads": 4,
            "base_num_kv_heads": 4,
            "head_dim": 16,
            "base_mlp_dim": 256,
            "base_num_decoder_layers": 2,
            "vocab_size": 260,
            "max_target_length": length,
            "per_device_batch_size": 4,
            "steps": options.steps,
            "learning_rate": options.rate or (0.02 if ours else 0.004),
            "opt_type": options.optimizer,
            "muon_weight_decay": 0.0,
            "dtype": "float32",
            # Replicas lie along MaxText's own axis for them.
            f"ici_{'diloco' if ours else 'data'}_parallelism": REPLICAS,
            "ici_fsdp_parallelism": FSDP,
        }
        base = Path(pyconfig.__file__).parent / "base.yml"
        named = [f"{name}={value}" for name, value in settings.items()]
        train.main(["train", str(base), *named])
    losses = [metrics["learning/loss"] for metrics in written]
    loss = sum(losses[-20:]) / len(losses[-20:])
    names = ("share", "syncs")
    sent = {x: written[-1][f"sync/{x}"] for x in names} if ours else {}
    return command.report(options, sent, first=losses[0], loss=loss)


if __name__ == "__main__":
    main()
