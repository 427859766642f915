"""Files are written whole or not at all; bad paths are refused before the work."""

import errno
import os
import stat
import threading

import pytest

from benchmarks.__main__ import main as benchmarks
from ringcoll.__main__ import main
from ringcoll.collectives.table import Table, TableRow
from ringcoll.io import files

pytestmark = pytest.mark.quick


def test_a_file_is_replaced_and_keeps_its_mode_and_its_link(tmp_path):
    path, link = tmp_path / "there", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path.name)
    with path.open() as reader:
        files.write(link, "new")
        assert reader.read() == "old"  # to the end
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    files.write(tmp_path / "made", b"bytes")
    usual = tmp_path / "usual"
    usual.touch()
    assert (tmp_path / "made").stat().st_mode == usual.stat().st_mode
    assert {one.name for one in tmp_path.iterdir()} == {"there", "link", "made", "usual"}


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


TABLE = Table((TableRow("psum", "cpu", "ring"),))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "table.json"
    path.write_text("old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        TABLE.save(path)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("table.json", "old")]


def test_pipes_and_standard_output_are_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    files.check(pipe)  # it does not wait for who reads
    reader.start()
    files.write(pipe, "through")
    reader.join(10)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_is_written_to(capfd):
    arguments = ["draw", "psum", "--algorithm", "ring", "-n", "2", "--svg", "/dev/stdout"]
    assert main(arguments) == 0
    assert capfd.readouterr().out.startswith("<svg")


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for place, why in (
        ("none/such.svg", "No such file or directory"),
        ("folder", "Is a directory"),
        ("file/below.svg", "Not a directory"),
    ):
        for act in (files.check, lambda path: files.write(path, "new")):
            with pytest.raises(OSError, match=why):
                act(tmp_path / place)
    assert (tmp_path / "file").read_text() == "old"
    assert list((tmp_path / "folder").iterdir()) == []
    files.check_folder(tmp_path / "new" / "newer")
    assert not (tmp_path / "new").exists()
    with pytest.raises(NotADirectoryError):
        files.check_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        files.check_folder(tmp_path / "file" / "below")


#: Every option of a command that names what it writes.
WRITES = [
    (main, "draw psum --algorithm ring -n 2", "svg"),
    (main, "draw psum --algorithm ring -n 2", "html"),
    (main, "overlap --example ring_matmul", "draw"),
    (main, "overlap --example ring_matmul", "text"),
    *[(benchmarks, of, "json") for of in ("", "matmul", "overlap", "layers", "fsdp", "wire")],
    *[(benchmarks, of, "draw") for of in ("overlap", "layers", "fsdp")],
    (benchmarks, "tune", "table"),
]


@pytest.mark.parametrize(("command", "arguments", "name"), WRITES)
def test_commands_refuse_before_the_work(command, arguments, name, tmp_path, capsys):
    ending = {"html": ".html"}.get(name, ".svg")
    (tmp_path / "file").write_text("old")
    place = tmp_path / "file" / f"below{ending}"
    with pytest.raises(SystemExit, match="2"):
        command([*arguments.split(), f"--{name}", str(place)])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error: --{name} {place}: [Errno 20] Not a directory: " in printed.err.splitlines()[-1]
    assert printed.err.endswith("; name a file in a folder that exists and can be written\n")


def test_unknown_endings_are_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["draw", "psum", "--algorithm", "ring", "-n", "2", "--svg", "a.png"])
    assert "--svg a.png: '.png' is not one of .svg" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
