"""Flax's lm1b example, its own training loop, on the text of the standard library.

python examples/ports/lm1b/main.py --optimizer local_muon --steps 300
"""

import sys
import tempfile
from pathlib import Path

PORTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PORTS))

import command  # noqa: E402
import stand_ins  # noqa: E402
import upstream  # noqa: E402

REPLICAS, FSDP = 4, 2


def main(arguments: list[str] | None = None) -> dict:
    parser = command.parser(__doc__, "local_muon", width=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=command.DOWNLOADS)
    options = parser.parse_args(arguments)
    ours = options.optimizer != "adamw"

    import jax

    jax.config.update("jax_num_cpu_devices", REPLICAS * FSDP)
    writer = stand_ins.install()
    stand_ins.module("input_pipeline", get_datasets=get_datasets)
    example = upstream.flax_example("lm1b", options.folder, patched=ours)
    sys.path.insert(0, str(example))

    import train
    from configs import default

    config = default.get_config()  # its own defaults but for size and length
    config.update(
        qkv_dim=options.width, emb_dim=options.width, mlp_dim=4 * options.width
    )
    config.update(num_layers=options.layers, num_heads=4, use_bfloat16=False)
    config.update(max_target_length=128, max_eval_target_length=128)
    config.update(per_device_batch_size=4, eval_per_device_batch_size=4)
    config.update(ici_data_parallelism=REPLICAS, ici_fsdp_parallelism=FSDP)
    config.update(replicas=REPLICAS)
    config.update(dcn_data_parallelism=1, restore_checkpoints=False)
    config.update(num_train_steps=options.steps, warmup_steps=options.steps // 10 + 1)
    config.update(learning_rate=options.rate or (0.02 if ours else 0.004))
    config.update(num_eval_steps=10, eval_every_steps=max(options.steps // 4, 2))
    config.update(save_checkpoints=False, max_predict_length=16, budget=0.02)
    with tempfile.TemporaryDirectory() as folder:
        train.train_and_evaluate(config, folder)
    losses = writer.scalars["eval_loss"]
    return command.report(
        options, writer.last("share", "syncs"), losses=losses, loss=losses[-1][1]
    )


def get_datasets(*, n_devices, config, vocab_path):
    """As `input_pipeline.get_datasets`, of crops of the standard library."""
    import tokens

    rows, length = config.per_device_batch_size * n_devices, config.max_target_length

    def batches(held_out):
        for crops in tokens.batches(rows, length, held_out=held_out):
            yield {"inputs": crops}

    class Repeated:
        def __iter__(self):
            return ({"inputs": Numpy(x["inputs"])} for x in batches(True))

    return batches(False), Repeated(), None, Encoder()


class Numpy:
    """An array as TensorFlow holds it."""

    def __init__(self, array):
        self.array = array

    def _numpy(self):
        return self.array

    numpy = _numpy


class Encoder:
    """Bytes, as TensorFlow Text encodes."""

    def vocab_size(self):
        import tokens

        return tokens.VOCABULARY

    def tokenize(self, text):
        import numpy as np

        return Numpy(np.array([byte + 3 for byte in text.encode()] + [2], np.int32))

    def detokenize(self, ids):
        return Numpy(bytes(max(i - 3, 0) for i in ids.tolist()))


if __name__ == "__main__":
    main()
