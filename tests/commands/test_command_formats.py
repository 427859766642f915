"""`python -m ringcoll export` and `import`: files are written, read, proved, priced and drawn."""

import json

import pytest
from msccl_files import CHAIN

from ringcoll.__main__ import main
from ringcoll.collectives.table import Table, TableRow

pytestmark = pytest.mark.quick


def refused(capsys, command, *words):
    with pytest.raises(SystemExit, match="2"):
        main([str(word) for word in command])
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(part in line for part in words), line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("all-reduce --algorithm torus -n 2x3", "every rank does the same: the schedule is drawn"),
        ("all_to_all --algorithm bruck -n 4", "B = 1M on h100, modelled as a switch: "),
        (
            "all_gather --function ringcoll.algorithms:two_ended -n 5",
            "2 rounds, 4 messages, 0.8 of",
        ),
    ],
)
def test_what_is_exported_is_imported(tmp_path, capsys, command, says):
    file, picture = tmp_path / "a.xml", tmp_path / "a.svg"
    assert main(["export", *command.split(), "--format", "msccl", "-o", str(file)]) == 0
    assert capsys.readouterr().out == ""
    options = ["--bytes", "1M", "--device", "h100"]
    assert main(["import", str(file), *options, "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert says in printed
    assert "proved in place and out of place: every rank gets every chunk" in printed
    assert picture.read_text().startswith("<svg")
    assert main(["import", str(file), "--json", "--place", "in"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["proved"], found["same_on_every_rank"]) == (["in place"], True)
    assert found["seconds"] > 0


def test_a_program_of_ranks_that_differ_is_drawn_rank_by_rank(tmp_path, capsys):
    file, picture = tmp_path / "chain.xml", tmp_path / "chain.svg"
    file.write_text(CHAIN)
    assert main(["import", str(file), "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "the ranks do not all do the same: each rank was checked by itself" in printed
    assert "  rank 1 to 0: chunk 0 of ranks 1, 2\n" in printed
    assert "round 4 of 4" in picture.read_text()
    plan = tmp_path / "chain.json"
    assert main(["export", "--program", str(file), "--format", "mscclpp", "-o", str(plan)]) == 0
    assert json.loads(plan.read_text())["inplace"] is True
    file.write_text(CHAIN.replace('"rrs"', '"rcs"'))
    refused(capsys, ["import", file], f"{file}, line 4: rank 0 does not get chunk 0")
    refused(
        capsys, ["export", "--program", file, "--format", "mscclpp"], "rank 0 does not get chunk 0"
    )


def test_traces_are_a_file_for_each_rank(tmp_path):
    prefix = str(tmp_path / "a")
    command = ["export", "psum", "--algorithm", "ring", "-n", "3", "--format", "chakra"]
    assert main([*command, "-o", prefix]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{rank}.et" for rank in range(3)]


def test_tables_go_to_the_tuner_and_back(tmp_path, capsys):
    file, table = tmp_path / "tuner.conf", tmp_path / "table.json"
    row = TableRow("psum", "gpu", "ring", (8, 9), bytes=(None, 65536), why="NCCL: ring, simple")
    Table((row, TableRow("all_to_all", "gpu", "bruck"))).save(table)
    command = ["export", "--table", str(table), "--format", "nccl-tuner", "-o", str(file)]
    assert main(command) == 0
    assert (
        "row 2 (all_to_all, bruck): left out: NCCL tunes no all_to_all" in capsys.readouterr().err
    )
    assert main(["import", str(file), "--json"]) == 0
    assert Table.from_json(capsys.readouterr().out).rows == (row,)
    assert main(["import", str(file)]) == 0
    assert "psum        ring       8 to 8  0 to any  0 to 65535" in capsys.readouterr().out


def test_a_tuner_file_that_is_no_text_is_refused_by_its_line(tmp_path, capsys):
    file = tmp_path / "tuner.conf"
    file.write_bytes(b"# one\nallreduce,\xff")
    refused(capsys, ["import", str(file)], f"{file}, line 2: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("export psum --format msccl --algorithm ring", "give COLLECTIVE and -n with --algorithm"),
        ("export --format msccl --algorithm ring -n 4", "give COLLECTIVE and -n with --algorithm"),
        ("export psum --format msccl --program a.xml", "give COLLECTIVE and -n with --algorithm"),
        ("export psum --format nccl-tuner --algorithm ring -n 4", "nccl-tuner needs --table"),
        ("export --format msccl --table a.json", "nccl-tuner needs --table"),
        ("export psum --format chakra --algorithm ring -n 4", "a file for each rank: give -o"),
        ("export psum --format msccl --algorithm rign -n 4", "psum: no algorithm 'rign'"),
        ("export psum --format msccl --algorithm ring -n 1024", "1024 ranks: a file has a program"),
        ("export psum --format msccl --algorithm ring -n 4 -o no/a.xml", "--output no/a.xml: "),
        ("export --format msccl --program none.xml", "No such file or directory: 'none.xml'"),
        ("import none.xml", "No such file or directory: 'none.xml'"),
        ("import README.md", "README.md, line 3: 2 columns; there are colltype"),
        ("import README.md --svg a.svg", "--svg: README.md is no MSCCL XML"),
        ("import a.xml --device v5e", "no 'v5e'; choose from a100"),
    ],
)
def test_a_command_that_cannot_be_is_refused_in_a_line(capsys, command, message):
    refused(capsys, command.split(), message)
