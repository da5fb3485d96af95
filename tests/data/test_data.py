"""Token files, bytes and batches: exact, resumable, and refused with one sentence when they cannot be right."""

import json

import numpy as np
import pytest

from pipejax import data


@pytest.fixture
def numbers(tmp_path):
    """A file of 1000 tokens, each its own index."""
    data.write_tokens(tmp_path / "numbers.bin", [np.arange(600), np.arange(600, 1000)], vocab_size=1000)
    return data.TokenFile(tmp_path / "numbers.bin")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_come_back(tmp_path, vocab_size, dtype):
    count = data.write_tokens(tmp_path / "t.bin", [np.array([1, 2]), np.array([vocab_size - 1])], vocab_size=vocab_size)
    file = data.TokenFile(tmp_path / "t.bin")
    assert (count, file.vocab_size, file.tokens.dtype) == (3, vocab_size, dtype)
    assert file.tokens.tolist() == [1, 2, vocab_size - 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.json"]


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(data.DataError, match="outside the vocabulary of 5"):
        data.write_tokens(tmp_path / "t.bin", [np.array([5])], vocab_size=5)
    assert not list(tmp_path.iterdir())


def test_texts_of_one_length_are_told_apart(tmp_path):
    files = []
    for name, tokens in (("a", [1, 2]), ("b", [2, 1]), ("c", [1, 2])):
        data.write_tokens(tmp_path / f"{name}.bin", [np.array([token]) for token in tokens], vocab_size=3)
        files.append(data.TokenFile(tmp_path / f"{name}.bin"))
    assert files[0].crc32 != files[1].crc32
    assert files[0].crc32 == files[2].crc32


def test_damaged_files_are_named(tmp_path, numbers):
    with pytest.raises(data.DataError, match=r"no token file .*missing\.bin"):
        data.TokenFile(tmp_path / "missing.bin")
    with numbers.path.open("r+b") as file:
        file.truncate(1999)
    with pytest.raises(data.DataError, match=r"numbers\.bin holds 1999 bytes where .* 2000: it is cut short"):
        data.TokenFile(numbers.path)
    numbers.path.with_suffix(".json").write_text("{}")
    with pytest.raises(data.DataError, match=r"numbers\.json, which should describe numbers\.bin, cannot be read"):
        data.TokenFile(numbers.path)
    numbers.path.with_suffix(".json").write_text(
        json.dumps({"dtype": "int8", "vocab_size": 9, "tokens": 1, "crc32": 0})
    )
    with pytest.raises(data.DataError, match="dtype 'int8'"):
        data.TokenFile(numbers.path)


def test_text_goes_there_and_back(tmp_path):
    (tmp_path / "b.txt").write_text("zweite")
    (tmp_path / "a.txt").write_text("größe")
    (tmp_path / "c.md").write_text("no")
    file = data.tokenize_folder(tmp_path, tmp_path / "t.bin", pattern="*.txt")
    assert data.decode(file.tokens) == "größe\ufffdzweite\ufffd"
    assert data.decode(data.encode("größe")) == "größe"


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(data.DataError, match=r"holds no text that matches '\*\.txt'"):
        data.tokenize_folder(tmp_path, tmp_path / "t.bin", pattern="*.txt")


def test_targets_are_one_ahead_and_every_window_comes_once_an_epoch(numbers):
    loader = data.Loader(numbers, batch_size=7, length=9, seed=3)
    assert loader.windows == 111
    assert loader.batches_per_epoch == 15
    starts = []
    for step in range(loader.batches_per_epoch):
        batch = loader.batch(step)
        np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
        assert batch["tokens"].shape == (7, 9)
        starts += batch["tokens"][:, 0].tolist()
    assert len(set(starts)) == len(starts) == 105
    assert {start % 9 for start in starts} == {0}


def test_a_batch_depends_on_seed_and_step_alone(numbers):
    one, two = (data.Loader(numbers, batch_size=4, length=10, seed=1) for _ in range(2))
    list(map(one.batch, range(60)))
    for step in (0, 24, 25, 59):
        np.testing.assert_array_equal(one.batch(step)["tokens"], two.batch(step)["tokens"])
    other = data.Loader(numbers, batch_size=4, length=10, seed=2)
    assert not np.array_equal(one.batch(0)["tokens"], other.batch(0)["tokens"])
    first, second = (np.concatenate([one.batch(e * 24 + i)["tokens"] for i in range(24)]) for e in range(2))
    assert not np.array_equal(first, second)


def test_shards_make_up_the_batch(numbers):
    whole = data.Loader(numbers, batch_size=6, length=10, seed=1).batch(5)["tokens"]
    parts = [
        data.Loader(numbers, batch_size=6, length=10, seed=1, shard=i, shards=3).batch(5)["tokens"] for i in range(3)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_too_little_text_is_refused(numbers):
    with pytest.raises(data.DataError, match="1000 tokens, which make 9 windows of 100, and a batch takes 10"):
        data.Loader(numbers, batch_size=10, length=100, seed=0)
    with pytest.raises(data.DataError, match="a batch of 4 windows of 0 tokens holds nothing"):
        data.Loader(numbers, batch_size=4, length=0, seed=0)
    with pytest.raises(data.DataError, match="4 processes do not divide a batch of 6"):
        data.Loader(numbers, batch_size=6, length=10, seed=0, shards=4)
