"""Files are written whole or not at all; bad paths are refused before the work."""

import errno
import os
import stat
import threading

import pytest

from benchmarks.__main__ import main as benchmarks
from ringcoll.__main__ import main
from ringcoll.choose.table import Table, TableRow
from ringcoll.io import files

pytestmark = pytest.mark.quick


def test_a_file_is_replaced_and_a_link_stays_and_so_does_its_mode(tmp_path):
    path, link = tmp_path / "there", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path.name)
    with path.open() as reader:
        files.check(link)
        files.write(link, "new")
        assert reader.read() == "old"  # to the end
    assert link.is_symlink()
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    files.check(tmp_path / "new")
    assert {one.name for one in tmp_path.iterdir()} == {"there", "link"}
    files.write(tmp_path / "new", b"bytes")
    assert (tmp_path / "new").read_bytes() == b"bytes"
    longest = tmp_path / ("a" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    files.check(longest)
    files.write(longest, "new")
    assert longest.read_text() == "new"


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


TABLE = Table((TableRow("psum", "cpu", "ring"),))


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/table.json'"):
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


#: Every option of a command that names what it writes.
WRITES = [
    (main, "draw psum --algorithm ring -n 2", "svg"),
    (main, "draw psum --algorithm ring -n 2", "animate"),
    (main, "overlap --example ring_matmul", "draw"),
    (main, "overlap --example ring_matmul", "text"),
    *[(benchmarks, of, "json") for of in ("", "matmul", "overlap", "context", "wire")],
    (benchmarks, "tune", "table"),
]


@pytest.mark.parametrize(("command", "arguments", "name"), WRITES)
def test_commands_refuse_before_the_work(command, arguments, name, tmp_path, capsys):
    (tmp_path / "file").write_text("old")
    place = tmp_path / "file" / "below"
    with pytest.raises(SystemExit, match="2"):
        command([*arguments.split(), f"--{name}", str(place)])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error: --{name} {place}: Not a directory; name a file in a folder" in printed.err
