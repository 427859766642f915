"""The table behind "auto": what it answers, and how it refuses a bad file."""

import json
import os
import re
from importlib.resources import files

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.algorithms import COLLECTIVES
from ringcoll.choose.table import PLATFORMS, VARIABLE, Table, TableRow, choices, default_table
from ringcoll.io.strict_json import DTYPES

TABLE = Table(
    (
        TableRow("psum", "cpu", "recursive_doubling", ranks=(2, 9), bytes=(None, 4096)),
        TableRow("psum", "cpu", "ring", bytes=(4096, 2**20), dtypes=("bf", "float8"), why="narrow"),
        TableRow("psum", "*", "halving_doubling", ranks=(3, None)),
        TableRow("psum", "*", "bruck", ranks=(3, None)),
        TableRow("psum", "*", "ring", bytes=(2**30, None)),
    ),
    measured_on="paper",
)
SHIPPED = Table.from_json(files("ringcoll.choose").joinpath("table.json").read_text("utf-8"))


def test_a_name_becomes_the_one_that_is_listed():
    row = TableRow("all_gather", "cpu", "halving_doubling")
    assert row == TableRow("all_gather", "cpu", "recursive_doubling")
    assert Table((row,)).pick("all_gather", "cpu", 8, 0, "float32", "0.12") == "recursive_doubling"


@pytest.mark.parametrize(
    ("call", "algorithm"),
    [
        (("psum", "cpu", 8, 4095, "float32"), "recursive_doubling"),
        (("psum", "cpu", 2, 0, "float32"), "recursive_doubling"),
        (("psum", "cpu", 8, 4096, "bfloat16"), "ring"),  # the end of bounds is not in them
        (("psum", "cpu", 9, 4096, "float8_e5m2"), "ring"),
        (("psum", "cpu", 8, 4096, "int16"), "halving_doubling"),
        (("psum", "cpu", 8, 4096, "float16"), "halving_doubling"),
        (("psum", "cpu", 16, 4095, "float32"), "halving_doubling"),
        (("psum", "gpu", 8, 4095, "float32"), "halving_doubling"),
        (("psum", "tpu", 9, 4095, "float32"), "bruck"),  # there is no doubling of 9 ranks
        (("psum", "tpu", 2, 2**30, "float32"), "ring"),
        (("psum", "tpu", 2, 2**30 - 1, "float32"), "lax"),
        (("psum_scatter", "cpu", 8, 4095, "float32"), "lax"),
    ],
)
def test_the_first_row_that_covers_a_call_decides(call, algorithm):
    assert TABLE.pick(*call, "0.12.0") == algorithm


def test_a_row_may_say_lax():
    table = Table((TableRow("psum", "*", "lax", ranks=(2, 3)), TableRow("psum", "*", "ring")))
    assert table.pick("psum", "cpu", 2, 8, "float32", "0.12.0") == "lax"
    assert table.pick("psum", "cpu", 3, 8, "float32", "0.12.0") == "ring"


def test_a_row_may_be_of_some_versions_of_jax():
    table = Table(
        (
            TableRow("psum", "*", "bruck", jax=("0.9.1", "0.10.2")),
            TableRow("psum", "*", "ring", jax=("0.12", None)),
        )
    )
    picked = {
        version: table.pick("psum", "cpu", 8, 8, "float32", version)
        for version in ("0.9", "0.9.1", "0.10.1", "0.10.2", "0.11.9", "0.12.0.1", "0.12.1.dev5")
    }
    later = Table((TableRow("psum", "*", "ring", jax=("0.12.0", None)),))
    assert later.pick("psum", "cpu", 8, 8, "float32", "0.12") == "ring"
    assert list(picked.values()) == ["lax", "bruck", "bruck", "lax", "lax", "ring", "ring"]


BY_HOSTS = Table(
    (
        TableRow("psum", "cpu", "recursive_doubling", hosts=(2, 4), ranks_a_host=(1, 2)),
        TableRow("psum", "cpu", "ring", hosts=(2, None)),
        TableRow("psum", "cpu", "bruck", ranks_a_host=(4, 8)),
    )
)


@pytest.mark.parametrize(
    ("ranks", "hosts", "algorithm"),
    [
        (2, {"hosts": 2}, "recursive_doubling"),
        (3, {"hosts": 3}, "recursive_doubling"),
        (4, {"hosts": 4}, "ring"),
        (4, {"hosts": 2}, "ring"),  # two on each
        (4, {"hosts": 2, "ranks_a_host": 1}, "recursive_doubling"),
        (3, {"hosts": 2}, "ring"),  # two on one of them
        (4, {"hosts": 3, "ranks_a_host": 2}, "ring"),
        (4, {"hosts": 1}, "bruck"),
        (4, {}, "bruck"),  # on one host, if nothing is said
        (8, {}, "lax"),
        (8, {"hosts": 1, "ranks_a_host": 4}, "bruck"),
    ],
)
def test_a_row_may_be_of_some_hosts(ranks, hosts, algorithm):
    assert BY_HOSTS.pick("psum", "cpu", ranks, 8, "float32", "0.12.0", **hosts) == algorithm


def test_the_shipped_table_knows_one_host_from_several():
    """Measurements within a process say nothing about a network, nor the other way round."""
    assert {(row.platform, *row.hosts) for row in SHIPPED.rows} == {("cpu", 1, 2), ("cpu", 2, None)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("hosts", [2, 3, 4, 64])
def test_sums_of_lax_between_hosts(hosts, dtype):
    for nbytes in (1, 2**12, 2**17, 2**20, 2**24):
        call = "psum_scatter", "cpu", hosts, nbytes, dtype
        assert SHIPPED.pick(*call, "0.10.2", hosts=hosts) != "lax"
    assert SHIPPED.pick(*call[:3], 1, dtype, "0.12.0", hosts=hosts) == "lax"


def test_an_unknown_collective_is_no_silent_lax():
    with pytest.raises(ValueError, match="no collective 'allreduce'; choose from all_gather, "):
        TABLE.pick("allreduce", "cpu", 8, 4096, "float32", "0.12.0")


words = st.text(
    'a "\\\n\u00e9\u2028\U0001f600'
)  # for all of Unicode, hypothesis makes large tables
bounds = st.tuples(st.none() | st.integers(0, 99), st.none() | st.integers(100, 2**40))
rows = st.sampled_from([c for c in COLLECTIVES if c not in ("pmean", "pmax", "pmin")]).flatmap(
    lambda collective: st.builds(
        TableRow,
        st.just(collective),
        st.sampled_from(PLATFORMS),
        st.sampled_from(choices(collective)),
        ranks=bounds,
        hosts=bounds,
        ranks_a_host=bounds,
        bytes=bounds,
        dtypes=st.lists(st.sampled_from(["bfloat16", "float8"])).map(tuple),
        why=words,
    )
)


@given(st.builds(Table, st.lists(rows, max_size=3).map(tuple), words))
def test_a_table_is_the_same_when_loaded_again(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("table") / "table.json"
    table.save(path)
    again = Table.load(path)
    assert again == table
    assert hash(again) == hash(table)


def test_a_saved_table_has_a_row_a_line_and_no_defaults(tmp_path):
    TABLE.save(tmp_path / "table.json")
    lines = (tmp_path / "table.json").read_text().splitlines()
    assert len(lines) == 2 + len(TABLE.rows)
    assert json.loads(lines[-2]) == {
        "collective": "psum",
        "platform": "*",
        "algorithm": "ring",
        "bytes": [2**30, None],
    }


GOOD = {"collective": "psum", "platform": "cpu", "algorithm": "ring"}
BAD_ROWS = [
    ({"collective": "allreduce"}, "no collective 'allreduce'; choose from all_gather, "),
    ({"collective": "pmax"}, "collective: 'pmax' runs by the rows of 'psum'"),
    ({"collective": ["psum"]}, "collective: ['psum'] is not a string"),
    ({"algorithm": "rign"}, "algorithm: there is no 'rign'; choose from ring, "),
    ({"collective": "all_gather", "algorithm": "one_shot"}, "algorithm: there is no 'one_shot';"),
    ({"platform": "cuda"}, "platform: there is no 'cuda'; choose from cpu, gpu, tpu, *"),
    ({"size": 3}, "field: there is no 'size'; choose from collective, platform, algorithm, ranks,"),
    ({"ranks": 8}, "ranks: 8 is not a pair; write [first, end], null if open"),
    ({"hosts": [2, 2]}, "hosts: 2 to 2 is an empty range; the end is not included"),
    ({"ranks_a_host": ["1", 2]}, "ranks_a_host: '1' is neither null nor a whole number from 0"),
    ({"bytes": [1e6, None]}, "bytes: 1000000.0 is neither null nor a whole number from 0"),
    ({"bytes": [True, 4]}, "bytes: True is neither null nor a whole number from 0"),
    ({"jax": ["0.12x", None]}, "jax: '0.12x' is neither null nor a version such as '0.12'"),
    ({"jax": ["0.12", "0.12.0"]}, "jax: 0.12 to 0.12.0 is an empty range; the end is not included"),
    ({"dtypes": "bfloat16"}, "dtypes: 'bfloat16' is not a list of names"),
    ({"why": 3}, "why: 3 is not a string"),
    ({"dtypes": ["blfoat16"]}, "dtypes: 'blfoat16' matches no dtype of JAX; choose from bool, "),
    ({"dtypes": ["float23"]}, "dtypes: 'float23' matches no dtype of JAX"),
    ({"jax": ["1" * 60_000, None]}, f"jax: '{'1' * 119}... (60002 characters) is neither null nor"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
def test_a_bad_row_is_named_with_field_and_value(tmp_path, change, message):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"rows": [GOOD, GOOD | change]}))
    with pytest.raises(ValueError, match="row 2") as error:
        Table.load(path)
    assert str(error.value).startswith(f"{path}: row 2: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rows": [["psum", "cpu", "ring"]]}', "row 1: the row is ['psum', 'cpu', 'ring'], not"),
        ('{"rows": [{"collective": "psum", "platform": "cpu"}]}', "row 1: algorithm: is missing"),
        ('{"rows": {}}', "rows: {} is not a list of rows"),
        ('{"measured_on": "paper"}', "rows: None is not a list of rows"),
        ('{"rows": [], "measured_on": 3}', "measured_on: 3 is not a string"),
        ('{"rows": [], "row": []}', "field: there is no 'row'; choose from rows, measured_on"),
        ("[]", "the table is [], not an object of fields"),
        ('{"rows": [}', "Expecting value: line 1 column 11"),
        ('{"rows": [], "rows": []}', "field: 'rows' is given twice"),
        ('{"rows": [{"ranks": [NaN, 3]}]}', "NaN is not a number in JSON"),
        ('{"rows":' * 200_000, "lists and objects are nested too deeply"),
        ('{"rows": [' + "9" * 9999 + "]}", "Exceeds the limit"),
    ],
)
def test_a_bad_table_says_what_is_wrong(text, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below)
        Table.from_json(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe{}", "'utf-8' codec can't decode byte 0xff in position 0"),
        (b'\xef\xbb\xbf{"rows": []}', "Unexpected UTF-8 BOM"),
        (b"", "Expecting value: line 1 column 1"),
        (None, "is not a regular file"),  # a pipe, of which nobody writes the other end
    ],
)
def test_a_file_that_is_not_text(tmp_path, content, message):
    path = tmp_path / "mine.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        Table.load(path)


def test_dtypes_are_those_of_jax():
    known = {
        jnp.dtype(kind).name for kind in vars(jnp).values() if isinstance(kind, type(jnp.int8))
    }
    assert {"bool", "bfloat16", "float8_e4m3fn", "int4", "complex128"} <= known <= set(DTYPES)


@pytest.fixture
def fresh_default():
    default_table.cache_clear()
    yield
    default_table.cache_clear()


@pytest.mark.usefixtures("fresh_default")
def test_the_default_table_comes_with_the_package(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    table = default_table()
    assert table.rows
    assert table.measured_on
    assert default_table() is table


@pytest.mark.usefixtures("fresh_default")
def test_the_environment_names_another_table(monkeypatch, tmp_path):
    TABLE.save(tmp_path / "mine.json")
    monkeypatch.setenv("RINGCOLL_TABLE", str(tmp_path / "mine.json"))
    assert default_table() == TABLE
    default_table.cache_clear()
    monkeypatch.setenv("RINGCOLL_TABLE", str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=r"RINGCOLL_TABLE: No such .*none\.json"):
        default_table()
    (tmp_path / "bad.json").write_text("[]")
    monkeypatch.setenv("RINGCOLL_TABLE", str(tmp_path / "bad.json"))
    with pytest.raises(ValueError, match=r"^RINGCOLL_TABLE: .*bad\.json: the table is \[\]"):
        default_table()
