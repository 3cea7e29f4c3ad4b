"""Files are replaced whole, and a crash of the machine loses no name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syncline.errors import CannotWrite, ConfigError
from syncline.files import check_can_be_written, explained, make_folder, write_atomically


@pytest.fixture
def history(monkeypatch):
    """What is synced and renamed, in order."""
    found = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(file):
        found.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}"))))
        fsync(file)

    def note_replace(path, target):
        found.append(("rename", target))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    return found


def test_the_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path, history):
    path = tmp_path / "file"
    write_atomically(path, b"new")
    partial = tmp_path / f".file.{os.getpid()}.partial"
    assert history == [("sync", partial), ("rename", path), ("sync", tmp_path)]


def test_folders_that_are_created_are_synced_into_those_above(tmp_path, history):
    make_folder(tmp_path / "a" / "b")
    assert history == [("sync", tmp_path / "a"), ("sync", tmp_path)]
    make_folder(tmp_path / "a" / "b")
    assert len(history) == 2


def test_a_file_may_go_into_a_folder_that_the_run_makes(tmp_path):
    path = tmp_path / "run" / "run.trace"
    check_can_be_written("--trace", path, made=tmp_path / "run")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_can_be_written("--trace", path, made=tmp_path / "other")


def test_a_file_that_cannot_be_written_is_one_line_with_the_way_out(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(CannotWrite) as caught, explained(tmp_path / "file"):
        write_atomically(tmp_path / "file", b"new")
    assert str(caught.value) == (
        f"{tmp_path / 'file'}: cannot be written (is a directory). Look at the folder; what was"
        " written before stays."
    )
    assert os.listdir(tmp_path) == ["file"]
