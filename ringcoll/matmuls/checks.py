"""The checks of every call of a matmul with a collective, before anything is sent."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringcoll.collectives import wires
from ringcoll.collectives.axes import AxisName
from ringcoll.collectives.call import Call
from ringcoll.collectives.front_door import wide_dtype
from ringcoll.costs.wire import Wire
from ringcoll.matmuls.labels import Labels
from ringcoll.matmuls.options import Options


class FactorsCall(Call):
    """One call of an einsum of two factors, without the factors themselves."""

    def __init__(self, name: str, spec: Any, axis_name: AxisName, **arguments: Any) -> None:
        super().__init__(name, axis_name, arguments=arguments, operands=f"{spec!r}, x, w")

    def wire(self, wire: Any, *factors: Array) -> Wire | None:
        """The wire of the messages, if the factors can be encoded.

        It is None on a single rank: it sends nothing, so it rounds nothing.
        """
        if wire is None:
            return None
        wire = self.attempt(wires.as_wire, wire)
        self.attempt(wires.check_operands, factors, [False] * len(factors))
        return wire if self.rank_count() > 1 else None

    def labels(self, spec: Any) -> Labels:
        """The labels of the spec, or a refusal."""
        if not isinstance(spec, str):
            raise self.refusal(TypeError, f"the spec is {spec!r}, no string", "write 'mk,kf->mf'")
        return self.attempt(Labels.of, spec)

    def check_label(self, label: Any, labels: str, factor: str) -> None:
        """Refuse a label that is not among `labels`."""
        if label not in tuple(labels):  # "mk" is in "mkf"
            cure = f"choose from {', '.join(labels)}"
            raise self.refusal(ValueError, f"{label!r} is not a label of {factor}", cure)

    def array(self, factor: Any) -> Array:
        """A factor as an array, or a refusal."""
        self.attempt(jax.typeof, factor)
        return jnp.asarray(factor)

    def dtype(
        self, options: Options, labels: Labels, sizes: Any, x: Array, w: Array, preferred: Any
    ) -> np.dtype:
        """The dtype of the result by `jax.numpy.einsum`, which may refuse."""
        factors = [
            jax.ShapeDtypeStruct([sizes[label] for label in own], factor.dtype)
            for own, factor in ((labels.x, x), (labels.w, w))
        ]
        exact = {"precision": options.precision, "preferred_element_type": preferred}
        einsum = partial(jnp.einsum, f"{labels.x},{labels.w}->{labels.out}", **exact)
        out = self.attempt(jax.eval_shape, einsum, *factors)
        if jnp.issubdtype(out.dtype, jnp.bool_):  # lax has no sum of booleans over ranks
            raise self.refusal(TypeError, "the product is of dtype bool", "cast to int32 first")
        if options.accumulate_dtype is not None:
            wide_dtype(self, options.accumulate_dtype, out)
        return out.dtype
