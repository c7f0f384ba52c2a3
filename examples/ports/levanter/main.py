"""One site of a Levanter run: its own `train_lm`, on the text of the standard library.

python examples/ports/levanter/main.py --site paris --run out/run

For Python >= 3.12, with Levanter installed (README).
"""

import argparse
import dataclasses
import json
import os
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import command  # noqa: E402
import upstream  # noqa: E402


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Further arguments are Levanter's own, such as --site.every 30.",
    )
    parser.add_argument("--site", metavar="NAME", required=True)
    parser.add_argument("--run", help="a folder, or a bucket's URL", required=True)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--folder", type=Path, default=command.DOWNLOADS)
    options, more = parser.parse_known_args(arguments)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    sys.path.insert(0, str(upstream.levanter(options.folder, patched=True)))

    from levanter.main import train_lm

    out = options.out / options.site
    settings = {
        "site.run": options.run,
        "site.name": options.site,
        # A site's own order of the data, and a place for its checkpoints.
        "data_seed": zlib.crc32(options.site.encode()) % 2**31,
        "trainer.id": options.site,
        "trainer.log_dir": out / "logs",
        "trainer.checkpointer.base_path": options.out / "checkpoints",
        "trainer.jax_compilation_cache_dir": options.out / "compiled",
    }
    given = [x for name, value in settings.items() for x in (f"--{name}", str(value))]
    train_lm.main(tiny(given + more, steps=options.steps, out=out))

    found = json.loads((out / "eval_results.json").read_text())
    names = ("counted", "contributions", "missed", "blocked", "round", "bytes_up")
    result = {"site": options.site, "loss": found["eval/loss"]}
    result |= {name: found[f"site/{name}"] for name in names}
    print(json.dumps(result))
    return result


def tiny(arguments, *, steps, out):
    """The config of tiny.yaml and these arguments, with text and metrics of our own."""
    import draccus
    from levanter.main import train_lm
    from levanter.tracker.json_file import JsonFileTrackerConfig

    path = str(HERE / "tiny.yaml")
    config = draccus.parse(train_lm.TrainLmConfig, config_path=path, args=arguments)
    config.data = with_text(config.data, config.model.max_Pos)
    # Levanter would ask a hub for the one that Llama has.
    tokenizer = config.data.the_tokenizer
    config.model = dataclasses.replace(config.model, tokenizer=tokenizer)
    config.trainer.num_train_steps = steps
    config.trainer.tracker = JsonFileTrackerConfig(str(out))
    out.mkdir(parents=True, exist_ok=True)
    return config


def with_text(data, Pos):
    """A Levanter data config of the text, in place of a cache of tokens."""
    import tokens
    from levanter.data.dataset import ListAsyncDataset
    from levanter.data.text import datasets

    def crops(held_out):
        ids = tokens.tokens(held_out)
        rows = ids[: len(ids) // Pos.size * Pos.size].reshape(-1, Pos.size)
        given = ListAsyncDataset([{"input_ids": row} for row in rows])
        return datasets.CausalLmDataset(given, Pos)

    splits = {"train": crops(False), "validation": crops(True)}
    text = datasets.DirectDatasetComponent(splits)
    return dataclasses.replace(
        data, components={"text": text}, train_weights={"text": 1.0}
    )


if __name__ == "__main__":
    main()
