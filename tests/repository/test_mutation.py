"""`tests/mutation.py` makes the slips that it says, each alone, and only where code runs."""

from pathlib import Path

import mutation
import pytest

SLIPS = {
    "f(x, axis, to=None)": ["f(x, axis)", "f(axis, x, to=None)"],
    "x.astype(dtype)": ["x"],
    "a + b": ["a - b"],
    "a < b": ["a <= b"],
    "a and b": ["a or b", "a", "b"],
    "not a": ["a"],
    "a if b else c": ["a", "c"],
    "(a, b)": ["(b, a)"],
    "x[1]": ["x[2]"],
    "f(flag=True)": ["f()", "f(flag=False)"],
}


@pytest.mark.parametrize("code", SLIPS)
def test_each_slip_alone(code, tmp_path, monkeypatch):
    monkeypatch.setattr(mutation, "HERE", tmp_path)
    (tmp_path / "code.py").write_text(f"y = {code}", encoding="utf-8")
    made = mutation.mutants(Path("code.py"))
    assert [mutant.text() for mutant in made] == [f"y = {slip}" for slip in SLIPS[code]]


def test_not_where_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation, "HERE", tmp_path)
    code = 'def f(x: g(a, b)) -> g(a, b):\n    """1"""\n    raise TypeError(f"{x + 1}")'
    (tmp_path / "code.py").write_text(code, encoding="utf-8")
    assert mutation.mutants(Path("code.py")) == []
