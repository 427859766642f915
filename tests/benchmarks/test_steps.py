"""Published steps: the page is what the data give, and a prediction is recorded beside its step."""

from benchmarks.__main__ import main
from benchmarks.compiled import steps
from benchmarks.machines.measured import page_text

FOUND = {"exposed": 1.0, "host": 0.0, "jax": "1", "libtpu": "2"}


def test_the_page_is_what_the_data_give():
    data, page = steps.read(), steps.PAGE.read_text("utf-8")
    assert page == page_text(page, steps.tables(data), steps.notes(data))
    times = ((2.0, 1.8), (1.0, 2.0), (3.0, 4.0), (2.01, 1.0), (4.0, 1.8))
    for step, (measured, total) in zip(data["steps"], times, strict=False):
        step |= {"measured": measured, "predicted": {"total": total, **FOUND}}
    names = [step["name"] for step in data["steps"][:5]]
    of = {"steps": data["steps"][:5], "pairs": [[names[0], name] for name in names[1:]]}
    table, pairs = steps.tables(of)
    assert table.title == "steps: 5 of 5 compiled, 1 of 5 near"
    assert [row[-1] for row in table.rows] == ["0.900", "2.000", "1.333", "0.498", "0.450"]
    assert [row[-1] for row in pairs.rows] == ["wrong", "right", "too small to count", "wrong"]


def test_a_prediction_or_a_refusal_is_recorded(tmp_path, monkeypatch, capsys):
    for name in ("DATA", "PAGE"):
        copy = tmp_path / getattr(steps, name).name
        copy.write_bytes(getattr(steps, name).read_bytes())
        monkeypatch.setattr(steps, name, copy)
    found = iter([{"total": 10.0, **FOUND}])
    monkeypatch.setattr(steps, "predicted", lambda *of: next(found))
    flags = ["steps", "--only", "16b-v5e-256", "--write"]
    assert main(flags) == 0
    assert "10.00 (1.00, 0.00) | 0.968 |" in steps.PAGE.read_text("utf-8")
    assert main(flags) == 1
    assert "failed 16b-v5e-256: StopIteration" in capsys.readouterr().out
