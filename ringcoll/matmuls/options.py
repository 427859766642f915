"""The options of matmuls with a collective: what a caller may pass, and what it means.

A function that only passes options on takes `**options: Unpack[MatmulOptions]`, or one of the types
derived from it. `with_options` shows their names and defaults in its signature.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args, get_type_hints

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ringcoll.choose.table import Algorithm
from ringcoll.collectives import choice
from ringcoll.collectives.axes import AxisName, axes_of
from ringcoll.collectives.public import public
from ringcoll.collectives.sums import PLAIN, Plain, sums_of
from ringcoll.io.text import choose, guess

F = TypeVar("F", bound=Callable[..., Any])


class MatmulOptions(TypedDict, total=False):
    """The options of every matmul with a collective, and of the layers that are made of them.

    Your own function may take them: `def f(x, **options: Unpack[ringcoll.MatmulOptions])`.

    Attributes:
        algorithm: how shards travel, as for the collectives (see `ringcoll.lax`): "auto", the name
            of a gather in `ringcoll.algorithms`, a `Schedule`, a function that makes one, or "lax"
            (gather, then multiply; multiply, then scatter).
        precision: the precision of the products, as for `jax.numpy.einsum`.
        preferred_element_type: the dtype of the result, as for `jax.numpy.einsum`.
        accumulate_dtype: the dtype of partial sums, also on the wire; None for that of the result.
    """

    algorithm: Algorithm
    precision: Any
    preferred_element_type: DTypeLike | None
    accumulate_dtype: DTypeLike | None


class GatherOptions(MatmulOptions, total=False):
    """The options of a matmul that gathers a factor: those of `MatmulOptions`, and `residuals`.

    Attributes:
        residuals: "save" keeps the gathered factor for the gradient, as autodiff of the plain form
            does; "regather" gathers it again (less memory, more time).
    """

    residuals: Literal["save", "regather"]


class LayerOptions(GatherOptions, total=False):
    """The options of a tensor-parallel layer: those of `GatherOptions`, and `sequence_parallel`.

    Attributes:
        sequence_parallel: whether activations between layers are sharded along the sequence; if
            not, they are the same on every rank, nothing is gathered, and `residuals` is ignored.
    """

    sequence_parallel: bool


#: The defaults of options; that of an option that is not listed is None.
DEFAULTS = {"algorithm": "auto", "residuals": "save", "sequence_parallel": True}


def with_options(room: str = "") -> Callable[[F], F]:
    """`public`, which also shows options in a signature, checks their names, and fills in defaults.

    The function has `**options: Unpack[a TypedDict]`, and gets a value for each option. `room` is
    the path of its public room, such as "layers.fsdp."; with it, errors do not show arguments.
    """

    def decorated(function: F) -> F:
        own = signature(function)
        *parameters, options = own.parameters.values()
        types = get_type_hints(*get_args(options.annotation))
        defaults = {name: DEFAULTS.get(name) for name in types}
        for name, default in defaults.items():
            kind = Parameter.KEYWORD_ONLY
            parameters.append(Parameter(name, kind, default=default, annotation=types[name]))
        shown = own.replace(parameters=parameters)
        known = list(shown.parameters)

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    cure = guess(name, known) or choose(name, known)
                    raise TypeError(f"unexpected keyword argument {name!r}; {cure}")
            return function(*args, **(defaults | given))

        vars(checked)["__signature__"] = shown
        return cast(F, public(room, arguments=not room)(checked))

    return decorated


@dataclass(frozen=True)
class Options:
    """The ranks, the algorithm and the precision of a matmul with a collective."""

    axes: tuple[Hashable, ...]
    algorithm: Algorithm
    precision: Any = None
    sums: Plain = PLAIN
    saves: bool = False  # whether the gathered factor is kept for the gradient
    early: bool = False  # whether that factor is a weight, which no work before makes

    @staticmethod
    def of(axis_name: AxisName, given: GatherOptions | MatmulOptions) -> "Options":
        """The options that were given to a call, checked."""
        axes = axes_of(axis_name)
        algorithm = choice.algorithm_of(given["algorithm"], axes)
        residuals = given.get("residuals", "save")
        if residuals not in ("regather", "save"):
            raise ValueError(f"residuals={residuals!r}; choose from regather, save")
        sums = sums_of(given["accumulate_dtype"])
        return Options(axes, algorithm, given["precision"], sums, residuals == "save")

    def einsum(self, spec: str, a: Array, b: Array, dtype: Any, sharding: Any = None) -> Array:
        """The einsum, in the dtype of partial sums for a result of `dtype`.

        If that is real and a factor is complex, it is the real part: such is the gradient of a real
        factor beside a complex one.
        """
        dtype = self.sums.wide(dtype)
        is_complex = any(jnp.iscomplexobj(x) for x in (a, b))
        is_part = is_complex and not jnp.issubdtype(dtype, jnp.complexfloating)
        wide = jnp.promote_types(dtype, jnp.complex64) if is_part else dtype
        exact: Any = {"precision": self.precision, "out_sharding": sharding}
        y = jnp.einsum(spec, a, b, preferred_element_type=wide, **exact)
        return y.real.astype(dtype) if is_part else y
