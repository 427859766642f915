"""Checkpoints: nothing is deleted before a run has saved, and refusals are one line."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from examples import training


def small(features=4):
    """A state as a trainer's, but small."""
    params = {"w": jnp.arange(4.0 * features).reshape(4, features)}
    return training.State(params, {"mu": jnp.zeros((4, features)), "count": jnp.int32(7)})


@pytest.fixture
def saved(tmp_path):
    """A folder with the states of steps 2, 4 and 6."""
    checkpoints = training.Checkpoints(tmp_path, 2)
    for step in range(2, 7):
        checkpoints.save(step, small(), is_last=step == 6)
    return tmp_path


def test_an_earlier_state_replaces_later_ones_only_when_the_run_saves(saved):
    checkpoints = training.Checkpoints(saved, 2)
    step, state = checkpoints.restore(2, small())
    assert step == 2
    np.testing.assert_array_equal(state.params["w"], small().params["w"])
    checkpoints.save(3, small(), is_last=False)  # not the time to
    assert training.Checkpoints(saved, 2).steps() == [2, 4, 6]
    checkpoints.save(4, small(), is_last=False)
    assert training.Checkpoints(saved, 2).steps() == [2, 4]
    assert {path.name for path in saved.iterdir()} == {"2", "4"}


def test_replaced_states_are_restored_if_the_run_ends_while_it_saves(saved, monkeypatch):
    checkpoints = training.Checkpoints(saved, 2)
    checkpoints.restore(2, small())
    monkeypatch.setattr(checkpoints._manager, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(4, small(), is_last=False)
    again = training.Checkpoints(saved, 2)
    assert again.steps() == [2, 4, 6]
    assert again.restore(6, small())[0] == 6


def test_a_state_that_cannot_be_restored_is_refused_and_nothing_is_deleted(saved):
    checkpoints = training.Checkpoints(saved, 2)
    have = r"; nothing was deleted, there are \[2, 4, 6\]$"
    with pytest.raises(FileNotFoundError, match=f"^no state of step 3 in .*{have}"):
        checkpoints.restore(3, small())
    wrong = r"params\.w is \(4, 4\), in this run \(4, 5\)"
    with pytest.raises(
        ValueError, match=f"^the state of step 4 in .* is of a different model: {wrong}"
    ):
        checkpoints.restore(4, small(5))
    less = small()._replace(opt_state={})
    with pytest.raises(ValueError, match=r"opt_state\.count is \(\), in this run not there"):
        checkpoints.restore(4, less)
    for file in (saved / "2" / "default").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:9])
    with pytest.raises(ValueError, match=f"^the state of step 2 in .* is damaged: .*{have}"):
        checkpoints.restore(2, small())
    assert checkpoints.restore(-1, small())[0] == 6
