"""Flax's gemma example (nnx), its own training loop, on the standard library's text.

python examples/ports/gemma/main.py --optimizer local_muon --steps 300
"""

import sys
import tempfile
import types
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
    stand_ins.module("tokenizer", load_sentencepiece_processor=lambda path: None)
    example = upstream.flax_example("gemma", options.folder, patched=ours)
    sys.path.insert(0, str(example))

    import train
    from configs import tiny

    # The sampler wants a real tokenizer, and is not what is tried.
    said = types.SimpleNamespace(text="")
    train.sampler_lib.Sampler = lambda **given: lambda *text, **more: said
    config = train.TrainConfig(**vars(tiny.Config()))
    size = dict(
        num_layers=options.layers, embed_dim=options.width, hidden_dim=2 * options.width
    )
    size |= dict(num_heads=4, num_kv_heads=2, head_dim=options.width // 4)
    config = config.replace(
        transformer_params=config.transformer_params | size,
        per_device_batch_size=4,
        max_target_length=128,
        num_train_steps=options.steps,
        warmup_steps=options.steps // 10 + 1,
        learning_rate=options.rate or (0.02 if ours else 0.004),
        num_eval_steps=10,
        eval_every_steps=max(options.steps // 4, 2),
        checkpoint_every_steps=options.steps,
        use_bfloat16=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        train.train_and_evaluate(config, folder)
    losses = writer.scalars["eval_loss"]
    sent = writer.last("train_share", "train_syncs")
    sent = {name.removeprefix("train_"): value for name, value in sent.items()}
    return command.report(options, sent, losses=losses, loss=losses[-1][1])


def get_datasets(*, config, vocab_path, data_sharding):
    """As `input_pipeline.get_datasets`, of crops of the standard library."""
    import jax
    import numpy as np
    import tokens

    length = config.max_target_length
    rows = config.per_device_batch_size * jax.device_count()
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))

    def batches(held_out):
        for crops in tokens.batches(rows, length + 1, held_out=held_out):
            batch = {
                "inputs": crops[:, :-1],
                "targets": crops[:, 1:],
                "inputs_position": places,
            }
            yield jax.device_put(batch, data_sharding)

    class Repeated:
        def __iter__(self):
            return batches(True)

    encoder = types.SimpleNamespace(
        vocab_size=lambda: tokens.VOCABULARY + 1, pad_id=lambda: 0
    )
    return batches(False), Repeated(), encoder


if __name__ == "__main__":
    main()
