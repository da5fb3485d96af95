"""Rows of the results are made once for the same source."""

import pytest

from benchmarks import cached


def test_a_row_is_made_once_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make():
        made.append(None)
        return ["cell"], ["sentence"]

    assert [tuple(cached.row("a", make)) for _ in range(2)] == [(["cell"], ["sentence"])] * 2
    assert len(made) == 1
    cached.row("b", make)
    assert len(made) == 2
    monkeypatch.setattr(cached, "_state", lambda: "other source")
    cached.row("a", make)
    assert len(made) == 3


def test_a_damaged_row_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached.row("a", lambda: (["cell"], []))
    (file,) = (tmp_path / "pipejax" / "bench").iterdir()
    file.write_text("[")
    assert cached.row("a", lambda: (["again"], [])) == (["again"], [])


def test_what_fails_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached.row("a", fail)
    assert cached.row("a", lambda: (["cell"], [])) == (["cell"], [])
