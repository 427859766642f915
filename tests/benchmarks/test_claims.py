"""Claims of programs: pages show the claimed figures, and the command fails if one is off."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from benchmarks.__main__ import main
from benchmarks.compiled import check_claims, pages, recorded_claims
from benchmarks.compiled.recorded_claims import Claim, ClaimedProgram

MATMUL = {
    "topology": "v5e:4x2",
    "form": "all_gather_matmul",
    "direction": "forward",
    "shape": "8192x8192x28672",
    "algorithm": "auto",
}
COMPILED = ClaimedProgram.of("overlap", MATMUL)
TOTAL, MIB = 2500.0, 2**20
#: A small table.
TABLE = "an all-reduce with a narrow wire"


def claimed(total=TOTAL, exposed=2.0, temporaries=64 * MIB):
    return Claim(COMPILED, jax.__version__, "libtpu 1", total, exposed, temporaries)


@pytest.mark.parametrize("page", sorted({table.page for table in pages.tables()}))
def test_tables_show_what_is_claimed(page):
    text, missing = pages.page_text(page, pages.tables(), recorded_claims.load())
    assert not missing
    assert text == (pages.ROOT / page).read_text(encoding="utf-8"), "claims --write"


def test_every_claim_is_shown():
    """Nobody should have to keep a figure true that no page shows."""
    shown = set(pages.programs(pages.tables()))
    assert [one.which.command for one in recorded_claims.load() if one.which not in shown] == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (claimed(), []),
        (claimed(total=1.021 * TOTAL), ["time"]),
        (claimed(total=0.979 * TOTAL), ["time"]),
        (claimed(exposed=2.9), []),
        (claimed(exposed=3.1), ["exposure"]),
        (claimed(temporaries=65 * MIB), []),
        (claimed(temporaries=67 * MIB), ["temporaries"]),
        (claimed(total=2 * TOTAL, exposed=50.0), ["time", "exposure"]),
    ],
)
def test_figures_beyond_the_tolerance_are_named(now, words):
    assert claimed().off(now) == words


@pytest.mark.parametrize(("off", "status"), [(1.0, 0), (1.019, 0), (1.03, 1)])
def test_the_command_is_red_where_a_claim_is_off(monkeypatch, capsys, off, status):
    known = {one.which: one for one in recorded_claims.load()}
    monkeypatch.setattr(check_claims, "here", lambda claims: known)  # of whatever version
    compute = lambda which, cache: replace(known[which], total_us=off * known[which].total_us)  # noqa: E731
    monkeypatch.setattr(recorded_claims, "find", compute)
    assert main(["claims", "--table", TABLE]) == status
    printed = capsys.readouterr().out
    assert "--dtype bfloat16 --topology v6e:4x2" in printed
    assert f"{off - 1:+.1%}" in printed


PLAIN = next(one for one in pages.headline(pages.tables()) if "plain" in one.command)


def digest_after(monkeypatch, which=PLAIN, **changes):
    """The digest of a program, if these modules have other files."""
    recorded_claims.digest.cache_clear()
    recorded_claims._timing.cache_clear()
    for name, file in changes.items():
        monkeypatch.setattr(getattr(recorded_claims, name), "__file__", file)
    return recorded_claims.digest(which)


def test_a_digest_is_of_the_program_and_of_the_code_that_times_it(monkeypatch, tmp_path):
    pytest.importorskip("libtpu")
    first = digest_after(monkeypatch)
    code = Path(recorded_claims.slices.__file__).read_text(encoding="utf-8")
    same, other = tmp_path / "same.py", tmp_path / "other.py"
    same.write_text(code.replace('"""Slices of TPUs', '"""Other words') + "\n# a comment\n")
    other.write_text(code.replace("{2: 16, 3: 4}", "{2: 16, 3: 8}"))
    assert digest_after(monkeypatch, slices=str(same)) == first
    assert digest_after(monkeypatch, slices=str(other)) != first
    monkeypatch.undo()
    shape = {**dict(PLAIN.flags), "shape": "8192x8192x14336"}
    assert recorded_claims.digest(ClaimedProgram.of(PLAIN.run, shape)) != digest_after(monkeypatch)


def test_only_changed_programs_are_computed_again(monkeypatch, capsys):
    every = [replace(one, digest="d") for one in recorded_claims.load()]
    asked = set(pages.headline(pages.tables()))
    changed = next(one for one in every if one.which in asked)
    found = []

    def find(which, cache):
        found.append(which)
        return next(one for one in every if one.which == which)

    monkeypatch.setattr(recorded_claims, "find", find)
    monkeypatch.setattr(recorded_claims, "load", lambda: every)
    monkeypatch.setattr(
        check_claims, "here", lambda of: {one.which: one for one in of if one.jax == changed.jax}
    )
    monkeypatch.setattr(recorded_claims, "digest", lambda which: "d")
    assert main(["claims", "--changed"]) == 0
    assert found == []
    every[every.index(changed)] = replace(changed, digest="e")
    assert main(["claims", "--changed"]) == 0
    assert found == [changed.which]
    assert f"{len(asked) - 1} of {len(asked)} programs have not changed" in capsys.readouterr().out


def test_update_saves_claims_and_writes_the_page(monkeypatch, tmp_path, capsys):
    (tmp_path / "page.md").write_text("Before.\n<!-- table t -->\n<!-- end -->\nAfter.\n")
    table = pages.PageTable(
        name="t",
        page="page.md",
        run="collectives",
        jax=jax.__version__,
        cell="{total} us, {exposed} %",
        columns=[
            {"title": "ring", "algorithm": "ring"},
            {"title": "both", "algorithm": ["ring", "torus"]},
        ],
        rows=[{"title": "64M", "bytes": "64M"}],
        where={"collective": "psum"},
        bold="row",
    )

    def find(which, cache):
        total = {"ring": 2110.0, "torus": 566.0}[dict(which.flags)["algorithm"]]
        return Claim(which, jax.__version__, recorded_claims.compiler(), total, 1.0, MIB)

    monkeypatch.setattr(recorded_claims, "find", find)
    monkeypatch.setattr(recorded_claims, "compiler", lambda: "libtpu 1")
    monkeypatch.setattr(pages, "tables", lambda: [table])
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    file = tmp_path / "claims.json"
    load, save = recorded_claims.load, recorded_claims.save
    monkeypatch.setattr(recorded_claims, "load", lambda: load(file))
    monkeypatch.setattr(recorded_claims, "save", lambda found: save(found, file))
    monkeypatch.setattr(recorded_claims, "digest", lambda which: "d")
    assert main(["claims", "--table", "t", "--update"]) == 0
    assert {one.digest for one in load(file)} == {"d"}
    assert (tmp_path / "page.md").read_text() == (
        "Before.\n<!-- table t -->\n|  | ring | both |\n| --- | --- | --- |\n"
        "| 64M | 2110 us, 1 % | **566** us, 1 % |\n\n"
        f"*Compiled*, jax {jax.__version__}, libtpu 1; by the compiler's estimates:\n"
        '`python -m benchmarks claims --table "t"`.\n<!-- end -->\nAfter.\n'
    )
    assert "written: page.md" in capsys.readouterr().out
    assert main(["claims", "--table", "t"]) == 0


def test_a_program_without_any_claim_is_red(monkeypatch, capsys):
    known = {one.which: one for one in recorded_claims.load()}
    (table,) = [one for one in pages.tables() if one.name == TABLE]
    first, *others = dict.fromkeys(table.programs())
    monkeypatch.setattr(check_claims, "here", lambda claims: {one.which: one for one in claims})
    monkeypatch.setattr(recorded_claims, "load", lambda: [known[which] for which in others])
    monkeypatch.setattr(recorded_claims, "find", lambda which, cache: known[which])
    assert main(["claims", "--table", TABLE]) == 1
    printed = capsys.readouterr().out
    assert "1 of these have no claim for any version" in printed
    assert first.command not in printed
