"""NanoDO's own training loop, on replicas, on the text of the standard library.

python examples/ports/nanodo/main.py --optimizer local_muon --steps 200
"""

import sys
import tempfile
from pathlib import Path

PORTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PORTS))

import command  # noqa: E402
import stand_ins  # noqa: E402
import upstream  # noqa: E402

REPLICAS, INSIDE = 4, 2


class Bytes:
    """A tokenizer as NanoDO asks for one."""

    def GetPieceSize(self):
        return 256 + 3

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def EncodeAsIds(self, text):
        return [byte + 3 for byte in text]


def main(arguments: list[str] | None = None) -> dict:
    parser = command.parser(__doc__, "curvadion", "local_muon", width=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=command.DOWNLOADS)
    options = parser.parse_args(arguments)
    ours = options.optimizer != "adamw"

    import jax

    jax.config.update("jax_num_cpu_devices", REPLICAS * INSIDE)
    sys.path.insert(0, str(upstream.nanodo(options.folder, patched=ours)))
    writer = stand_ins.install()

    import tokens
    from nanodo import data, train
    from nanodo.configs import default

    import curvadion_jax as cd

    class Source:
        """Pieces of text, in place of a TFDS data source."""

        def __init__(self, split):
            self.text = tokens.text(held_out=split == "test")

        def __len__(self):
            return len(self.text) // 1000

        def __getitem__(self, index):
            return {"text": self.text[1000 * index : 1000 * (index + 1)]}

    data.tfds.data_source = lambda name, split: Source(split)
    data.get_py_tokenizer = lambda path: Bytes()

    c = default.get_config()  # its own defaults, FSDP among them, but for size and
    c.model.update(D=options.width, H=4, L=128, N=options.layers, F=4 * options.width)
    c.model.dtype = "float32"  # length
    c.batch_size = c.eval_batch_size = 32
    c.opt.num_train_steps, c.opt.warmup_steps = options.steps, options.steps // 10
    c.opt.peak_learning_rate = options.rate or (0.02 if ours else 0.004)
    c.opt.init_learning_rate = c.opt.final_learning_rate = c.opt.peak_learning_rate / 10
    c.opt.optimizer = options.optimizer
    c.eval_every_steps, c.eval_steps = max(options.steps // 4, 1), 10
    c.checkpoint_every_steps = options.steps
    c.pygrain_worker_count = 0
    c.write_to_xm_measurements = False
    if ours:
        c.replicas, c.opt.budget = REPLICAS, 0.02
    trainers, made = [], train.Trainer
    train.Trainer = lambda **given: trainers.append(made(**given)) or trainers[0]
    with tempfile.TemporaryDirectory() as workdir:
        c.workdir = workdir
        train.train_and_evaluate(c)
    losses, state = writer.scalars["eval_loss"], trainers[0].state
    kernel = jax.tree.leaves(state.params["blocks_0"]["Mlp_0"])[0]
    spec = str(kernel.sharding.spec)
    sent = cd.metrics.read(state.opt_state) if ours else {}
    return command.report(options, sent, losses=losses, loss=losses[-1][1], spec=spec)


if __name__ == "__main__":
    main()
