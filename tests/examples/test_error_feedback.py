"""The error feedback of the examples."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.error_feedback import error_feedback
from ringcoll import Wire


def test_what_is_passed_on_adds_up_to_the_gradients():
    """Except the last residual. Without feedback, small entries would be lost for ever."""
    gradients = {"w": jnp.array([1.0, 1e-3, -2e-3, 0.0]), "b": jnp.array([3.0], jnp.bfloat16)}
    feedback = error_feedback(Wire("int8", 4))
    update = jax.jit(feedback.update)
    residual, total = feedback.init(gradients), np.zeros(4)
    first, _ = update(gradients, residual)
    assert first["w"][1] == 0
    for _ in range(50):
        sent, residual = update(gradients, residual)
        total += sent["w"]
    assert sent["b"].dtype == jnp.bfloat16
    assert abs(total - 50 * np.asarray(gradients["w"])).max() <= 0.5 * 1.01 / 127
    assert abs(residual["w"]).max() <= 0.5 * 1.01 / 127
