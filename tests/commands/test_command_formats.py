"""`python -m ringcoll export` and `import`: MSCCL files are written, read and proved."""

import pytest
from msccl_files import CHAIN

from ringcoll.__main__ import main

pytestmark = pytest.mark.quick


def refused(capsys, command, *words):
    with pytest.raises(SystemExit, match="2"):
        main([str(word) for word in command])
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(part in line for part in words), line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("all-reduce --algorithm torus -n 2x3", "'all_reduce_torus', Simple: psum of "),
        ("all_to_all --algorithm bruck -n 4", "all_to_all of 4 chunks on 4 ranks"),
        ("all_gather --function ringcoll.algorithms:two_ended -n 5", "on 5 ranks"),
    ],
)
def test_what_is_exported_is_imported(tmp_path, capsys, command, says):
    file = tmp_path / "a.xml"
    assert main(["export", *command.split(), "-o", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["export", *command.split()]) == 0
    assert capsys.readouterr().out == file.read_text()
    assert main(["import", str(file)]) == 0
    printed = capsys.readouterr().out
    assert says in printed
    assert "proved in place and out of place: every rank gets every chunk" in printed


def test_a_wrong_program_is_refused_in_a_line(tmp_path, capsys):
    file = tmp_path / "chain.xml"
    file.write_text(CHAIN.replace('"rrs"', '"rcs"'))
    refused(capsys, ["import", file], f"{file}: rank 0 does not get chunk 0")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("export psum --algorithm rign -n 4", "psum: no algorithm 'rign'"),
        ("export psum --algorithm ring -n 1024", "1024 ranks: a file has a program for at most"),
        ("export psum --algorithm ring -n 4 -o no/a.xml", "--output no/a.xml: "),
        ("export tour --algorithm ring -n 4", "tour: MSCCL has no such collective"),
        ("import none.xml", "No such file or directory: 'none.xml'"),
        ("import README.md", "README.md: it is not XML"),
    ],
)
def test_an_impossible_command_is_refused_in_a_line(capsys, command, message):
    refused(capsys, command.split(), message)
