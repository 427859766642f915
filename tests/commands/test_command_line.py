"""Arguments of commands: sizes, names and functions are read, or refused in a line; Ctrl-C."""

import json
import re
import signal

import pytest
from support import mostly_exhaustive

from benchmarks.__main__ import main as benchmarks
from benchmarks.collectives import sweep, tune
from ringcoll.__main__ import COMMANDS, main
from ringcoll.algorithms import ring
from ringcoll.choose.table import Table, default_table
from ringcoll.commands.arguments import MOST_RANKS, size


@pytest.mark.parametrize("text", ["64M", "64m", "64MB", "64mb", "64MiB", "64mib", "65536K"])
def test_megabytes_are_powers_of_two_however_they_are_written(text):
    assert size(text) == 2**26
    assert (size("512B"), size("1GB"), size("3KiB")) == (512, 2**30, 3072)


@pytest.mark.parametrize(
    "text", ["64MBB", "64iB", "iB", "B", "1TB", "-1MB", "2000000000GiB", "9" * 99]
)
def test_a_bad_size_is_refused(capsys, text):
    with pytest.raises(SystemExit, match="2"):
        main(["cost", "psum", f"--bytes={text}"])
    assert f"{text!r} is not a size; write 512, 1K, 64M or 1G" in capsys.readouterr().err


def test_collectives_may_have_hyphens(capsys):
    for command in ("cost", "draw"):
        printed = []
        for name in ("reduce-scatter", "reduce_scatter"):
            assert main([command, name, "-n", "4", "--algorithm", "ring"]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]


@pytest.mark.parametrize(
    "collective", mostly_exhaustive(["all_reduce", "all_to_all", "tour"], "all_to_all".__eq__)
)
def test_a_collective_is_enough_to_draw_and_to_price(capsys, collective):
    for command in ("draw", "cost"):
        assert main([command, collective]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 5
        assert max(map(len, lines)) <= 100


def test_the_list_of_commands_has_a_working_example_of_each(capsys, monkeypatch):
    assert main([]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    typed = []
    for name, command in COMMANDS.items():
        monkeypatch.setattr(command, "run", lambda args, name=name: typed.append(name) or 0)
    assert {main(re.split(" {2,}", line.strip())[0].split()) for line in lines} == {0}
    assert typed == [line.split()[0] for line in lines]
    assert {*typed} == {*COMMANDS}


@pytest.mark.parametrize(
    "arguments",
    [
        "cost psum -n 1000000",
        "cost psum -n 1024x1024",
        "draw psum --algorithm torus -n 100x100x100 --svg a.svg",
        f"draw psum --function {__name__}:too_many -n {10**15}",
    ],
)
def test_too_many_ranks_are_refused_with_the_bound(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert f"a schedule of more than {MOST_RANKS} ranks takes" in capsys.readouterr().err


def too_many(n):
    raise AssertionError("a schedule was built")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('of\\n my own')", "Error: of my own ({folder}/mine.py, line 1)"),
        ("import sys\n\nsys.exit(3)", "SystemExit: 3 ({folder}/mine.py, line 3)"),
        ("import none_such", "No module named 'none_such' ({folder}/mine.py, line 1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_cause(
    tmp_path, monkeypatch, capsys, source, message
):
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for command in ("draw psum -n 4", "cost psum", "overlap"):
        with pytest.raises(SystemExit, match="2"):
            main([*command.split(), "--function", "mine:f"])
        line = capsys.readouterr().err.splitlines()[-1]
        assert "argument --function: 'mine:f': importing 'mine' failed: " in line
        assert message.format(folder=tmp_path) in line


@pytest.mark.parametrize("text", ["", ":", "none_such:f", ".:f", "math.none:f", "math:f", "math"])
def test_a_bad_function_name_is_refused(capsys, text):
    with pytest.raises(SystemExit, match="2"):
        main(["draw", "psum", "-n", "4", "--function", text])
    line = capsys.readouterr().err.splitlines()[-1]
    is_found = text in ("math:f", "math")
    assert f"{text!r}{' is not a module:function;' if is_found else ': importing '}" in line


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-f 1", "-f 1: sizes would not grow"),
        ("matmul --shape 7x7", "argument --shape: '7x7' is not of 3 sizes"),
        ("matmul --shape 7x7x7", "error: --shape 7x7x7: IndivisibleError: "),
        ("failures --ways x", "argument --ways: no 'x'; choose from today, checked, deadline"),
    ],
)
def test_benchmarks_refuse_in_a_line_before_they_measure(capsys, monkeypatch, command, message):
    monkeypatch.setattr(sweep, "check", stopped)
    with pytest.raises(SystemExit) as ended:
        benchmarks(command.split())
    line = capsys.readouterr().err.splitlines()[-1:] or [ended.value.code]
    assert message in line[0]


def test_a_bad_environment_variable_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setenv("RINGCOLL_TABLE", "rign")
    default_table.cache_clear()
    with pytest.raises(SystemExit):
        benchmarks(["-c", "0"])
    default_table.cache_clear()
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(word in line for word in ("error: ", "RINGCOLL_TABLE", "rign"))


# -- Ctrl-C --


def stopped(*_, **__):
    """Do what Ctrl-C does, also under a shell that ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def given(n):
    stopped()
    return ring(n)


def test_ctrl_c_prints_one_line(capsys):
    command = ["draw", "psum", "-n", "4", "--function", f"{__name__}:given"]
    assert main(command) == 130
    assert tuple(capsys.readouterr()) == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("module", "command", "name"),
    mostly_exhaustive(
        [(sweep, ["-c", "0", "--json"], "measure"), (tune, ["tune", "--table"], "_measured")],
        lambda module, *_: module is sweep,
    ),
)
def test_measurements_until_ctrl_c_are_written(
    module, command, name, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "found"
    path.write_text("old")
    flags = [*command, str(path), "-b", "1K", "-e", "8K", "-g", "2", "-n", "3", "-d", "float32"]
    flags += ["--collective", "psum_scatter"]
    measured = getattr(module, name)
    monkeypatch.setattr(module, name, stopped)
    assert benchmarks(flags) == 130
    assert path.read_text() == "old"  # nothing was measured

    def first_only(*args, **options):
        monkeypatch.setattr(module, name, stopped)
        return measured(*args, **options)

    monkeypatch.setattr(module, name, first_only)
    assert benchmarks(flags) == 130
    assert capsys.readouterr().err == "interrupted\n" * 2
    if module is tune:
        assert Table.load(path).measured_on.endswith(", 1 of 2 points")
    else:
        rows = json.loads(path.read_text())["rows"]
        assert {row["collective"] for row in rows} == {"psum_scatter"}
