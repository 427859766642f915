"""Arguments of commands: sizes, names and functions, read or refused in a line; files; Ctrl-C."""

import json
import re
import signal

import pytest
from support import mostly_exhaustive

from benchmarks.__main__ import main as benchmarks
from benchmarks.collectives import sweep
from ringcoll.__main__ import COMMANDS, main
from ringcoll.algorithms import ring
from ringcoll.commands.arguments import size
from ringcoll.costs.places import MOST_RANKS


@pytest.mark.parametrize("text", ["64M", "64m", "64MB", "64mb", "64MiB", "64mib", "65536K"])
def test_megabytes_are_powers_of_two_however_they_are_written(text):
    assert size(text) == 2**26
    assert (size("512B"), size("1GB"), size("3KiB")) == (512, 2**30, 3072)


@pytest.mark.parametrize(
    "collective", mostly_exhaustive(["all-reduce", "all-to-all", "tour"], "all-to-all".__eq__)
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


TOO_MANY = f"a schedule of more than {MOST_RANKS} ranks takes"
#: What follows a command, and a part of what is said of it.
REFUSED = {
    "cost": [
        ("all_gather --algorithm rign", "--algorithm rign: all_gather: no algorithm 'rign'; did"),
        ("all_gather --ranks 8 --network 2x2", "8 ranks do not fit on a slice of 4"),
        ("all_gather --ranks 8 --network torus", "network 'torus' is no slice ('4x4'), nor"),
        ("all_gather --ranks 8 --hosts 2", "v5e is on a slice; leave it out"),
        ("all_gather --ranks 2x2x2", "v5e has links along 2 axes, not (2, 2, 2)"),
        ("all_gather --algorithm lax --network switch", "the built-in of v5e runs on a slice"),
        ("all_gather --device nothing", "no machine is named 'nothing'"),
        ("all_gather --algorithm recursive_doubling --ranks 3", "a power of two, got 3 ranks"),
        ("all_gather --hosts 0", "argument --hosts: '0' is not a number above 0"),
        ("all_gather --function ringcoll.costs:DEVICES", "is a mappingproxy; name a function"),
        ("all_gather --shape 8x8x8", "--shape: all_gather does not take it; leave it out"),
        ("all_gather_matmul --bytes 1K", "--bytes: all_gather_matmul does not take it; leave it"),
        ("all_gather_matmul --shape 8x8", "'8x8' does not have three sizes; write MxKxF"),
        ("all_gather_matmul --shape 12x8x8", "--shape 12x8x8: 8 ranks do not divide it; give mult"),
        ("all_gather_matmul --device h100", '--device h100: "auto" runs the built-in there; cho'),
        ("matmul_reduce_scatter --operand 0", "--operand: matmul_reduce_scatter gathers nothing"),
        ("matmul_reduce_scatter --wire int8", "matmul_reduce_scatter has no wire; leave it out"),
        ("pmax --wire int8", "--wire int8: pmax has no wire; leave it out"),
        ("psum -n 1000000", TOO_MANY),
        ("psum -n 1024x1024", TOO_MANY),
        *(
            (f"psum --bytes={text}", f"{text!r} is not a size; write 512, 1K, 64M or 1G")
            for text in ("64MBB", "64iB", "iB", "B", "1TB", "-1MB", "0", "9" * 99)
        ),
    ],
    "draw": [
        ("psum --algorithm torus -n 100x100x100 --svg a.svg", TOO_MANY),
        (f"psum --function {__name__}:too_many -n {10**15}", TOO_MANY),
        ("all_gatter", "argument COLLECTIVE: invalid choice: 'all_gatter' (choose from"),
        ("psum --rank 4 --size 2", "error: unknown arguments: --size 2; -h lists those that it"),
        ("-n 4", "the following arguments are required: COLLECTIVE; -h explains the arguments"),
        ("psum --algorithm ring -n 16 --svg /dev/null", "31 frames in one picture: at most 24"),
        ("psum --algorithm ring -n 20 --animate film.svg", "20 ranks: at most 16"),
    ],
    "explain": [
        ("rign", "argument NAME: invalid choice: 'rign' (choose from"),
    ],
    "export": [
        ("psum --algorithm ring -n 1024", "1024 ranks: a file has a program for at most"),
        ("psum --algorithm ring -n 4 -o no/a.xml", "--output no/a.xml: "),
        ("tour --algorithm ring -n 4", "tour: MSCCL has no such collective"),
    ],
    "import": [
        ("none.xml", "No such file or directory: 'none.xml'"),
        ("README.md", "README.md: it is not XML"),
    ],
    "try": [
        ("", "one of the arguments --example --function is required"),
        ("--example ring_matmul --budget -1", "'-1' is not a number above 0"),
        ("--example ring_matmul --write no/a.json", "--write no/a.json: No such file or directory"),
        ("--example ring_matmul --topology v4:2x2x1", "the constants of this chip are not known"),
    ],
    # Before anything is compiled, and without libtpu.
    "overlap": [
        ("", "one of the arguments --example --function FILE is required"),
        ("--example none_such", "argument --example: invalid choice: 'none_such' (choose from"),
        ("--text README.md", "the text is not HLO: no line begins with 'HloModule'"),
        ("--text none.txt", "or a file or folder that exists"),
        ("--text docs", "docs: no .txt file in it begins with 'HloModule' and is_scheduled=true;"),
        ("--text docs --chip v9", "argument --chip: invalid choice: 'v9' (choose from"),
        ("--text docs --profile", "nothing is compiled; leave out --profile and --option"),
    ],
    "overlap --example ring_matmul": [
        ("--shape 512x512", "'512x512' does not have three sizes"),
        ("--shape 0x0x0", "'0x0x0' is not a shape"),
        ("--mesh x=4,x=2", "'x=4,x=2' names an axis twice; write x=4,y=2"),
        ("--text docs", "--text docs: Is a directory; name a file in a folder"),
        (
            "--options sparse_core",
            "core' is no set of options; did you mean 'sparse cores'? c",
        ),
        ("--options a=1 --options a=2", "--options a=2: a is 1 too; leave one out"),
        ("--against no.json", "'no.json' is no report that --json wrote: No su"),
        ("--topology v4:2x2x1", "v4:2x2x1: the constants of this chip are not "),
        ("--topology v5e:0x2", "'v5e:0x2' must be a kind of chip and a size, s"),
        ("--topology v5e:6", "'v5e:6' must be a power of two; name such as v5"),
        ("--topology v5e:4x4x4", "v5e has two axes; name such as v5e:4x2"),
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("command", "arguments", "complaint"),
    [(command, *row) for command, rows in REFUSED.items() for row in rows],
)
def test_bad_arguments_are_refused_in_a_line(capsys, command, arguments, complaint):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), *arguments.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m ringcoll {command.split()[0]}: error: ")
    assert complaint in line


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


# -- files of MSCCL --


@pytest.mark.quick
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


def test_measurements_until_ctrl_c_are_written(tmp_path, monkeypatch, capsys):
    path = tmp_path / "found"
    path.write_text("old")
    flags = ["-c", "0", "--json", str(path), "-b", "1K", "-e", "8K", "-g", "2", "-n", "3"]
    flags += ["-d", "float32", "--collective", "psum_scatter"]
    measured = sweep.measure
    monkeypatch.setattr(sweep, "measure", stopped)
    assert benchmarks(flags) == 130
    assert path.read_text() == "old"  # nothing was measured

    def first_only(*args, **options):
        monkeypatch.setattr(sweep, "measure", stopped)
        return measured(*args, **options)

    monkeypatch.setattr(sweep, "measure", first_only)
    assert benchmarks(flags) == 130
    assert capsys.readouterr().err == "interrupted\n" * 2
    rows = json.loads(path.read_text())["rows"]
    assert {row["collective"] for row in rows} == {"psum_scatter"}
