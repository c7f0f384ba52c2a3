"""The example's data: text, its split, and token shards."""

from pathlib import Path

import data
import numpy as np


def write_shard(file: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    file.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return file


def test_split_is_disjoint_complete_and_stable():
    names = [f"package/module{number}.py" for number in range(1000)]
    training, validation = data.split(names)
    assert not set(training) & set(validation)
    assert sorted(training + validation) == sorted(names)
    assert 30 <= len(validation) <= 70  # 5% of 1000, +- 3 standard deviations
    assert data.split(names[::-1])[1] == validation[::-1]


def test_no_held_out_file_is_trained_on(text):
    corpus = data.load(str(text))
    (training,), (validation,) = corpus.training, corpus.validation
    names = [file.name for file in text.iterdir()]
    for name in names:
        content = (text / name).read_bytes()
        where = content in training.tobytes(), content in validation.tobytes()
        assert where in {(True, False), (False, True)}
        assert where[1] == (name in data.split(names)[1])


def test_batches_depend_on_seed_and_step_alone(text):
    corpus = data.load(str(text))
    batch = corpus.training_batch((7, 3), sequences=4, length=16)
    assert batch.shape == (4, 17)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(batch, corpus.training_batch((7, 3), 4, 16))
    for other in ((7, 4), (8, 3)):
        assert (batch != corpus.training_batch(other, 4, 16)).any()
    whole = corpus.training[0].tobytes()
    assert all(row.astype(np.uint8).tobytes() in whole for row in batch)


def test_validation_batches_are_spread_over_the_held_out_text():
    pieces = [np.arange(100, dtype=np.uint16), np.arange(100, 110, dtype=np.uint16)]
    corpus = data.Corpus([], pieces, vocabulary=110, fingerprint="")
    batches = [corpus.validation_batch(i, 2, sequences=4, length=5) for i in (0, 1)]
    starts = sorted(row[0] for batch in batches for row in batch)
    # 95 + 5 places to start in, divided by 8; no crop reaches into the next piece.
    assert starts == [0, 12, 25, 37, 50, 62, 75, 87]
    assert all((np.diff(batch) == 1).all() for batch in batches)


def test_shards_are_divided_by_name(tmp_path):
    write_shard(tmp_path / "fineweb_train_000001.bin", [1] * 9)
    write_shard(tmp_path / "fineweb_train_000002.bin", [2] * 9)
    write_shard(tmp_path / "fineweb_val_000000.bin", [3] * 9)
    corpus = data.load(str(tmp_path))
    assert [piece[0] for piece in corpus.training] == [1, 2]
    assert [piece[0] for piece in corpus.validation] == [3]
    assert corpus.vocabulary == 50_304
