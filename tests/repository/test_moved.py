"""Modules that moved can be imported under their old names, with a warning."""

import sys
from importlib import import_module

import pytest

import ringcoll
from ringcoll import moved


@pytest.mark.parametrize(("old", "new"), moved.MOVED.items())
def test_an_old_name_is_the_new_module(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, f"ringcoll.{old}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"ringcoll.{old} is now ringcoll.{new}"):
        assert import_module(f"ringcoll.{old}") is import_module(f"ringcoll.{new}")


def test_from_the_package_too(monkeypatch):
    monkeypatch.delitem(sys.modules, "ringcoll.schedule", raising=False)
    monkeypatch.delattr(ringcoll, "schedule", raising=False)
    with pytest.warns(DeprecationWarning, match="ringcoll.schedule is now"):
        from ringcoll import schedule
    assert schedule.Schedule is ringcoll.Schedule


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("ringcoll.no_such_module")
