"""Bad calls of matmuls are refused before anything is sent: function, value and cure."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support import data, make_mesh, per_rank

import ringcoll
from ringcoll import Table, algorithms
from ringcoll.collectives.all_gather import AllGather
from ringcoll.runtime import hop

N = 3
OPERANDS = data((N, 6, 4)), data((N, 4, 2))


def of(function, change=lambda x, w: (x, w), **options):
    """A call with x: [6, 4] and w: [4, 2], or with what `change` makes of them."""

    def call(x, w):
        return function(*change(x, w), **options)

    call.name = f"ringcoll.{function.__name__}("
    return call


gather = partial(of, ringcoll.all_gather_matmul, axis_name="x")
scatter = partial(of, ringcoll.matmul_reduce_scatter, axis_name="x")
reduce = partial(of, ringcoll.matmul_all_reduce, axis_name="x")


def einsum(spec, label="m"):
    options = {"axis_name": "x", "gather": label}
    return of(ringcoll.all_gather_einsum, lambda x, w: (spec, x, w), **options)


def einsum_scatter(spec, label):
    options = {"axis_name": "x", "scatter": label}
    return of(ringcoll.einsum_reduce_scatter, lambda x, w: (spec, x, w), **options)


def sharded(*specs, change=lambda a, b: (a, b), **options):
    return of(ringcoll.sharded_matmul, lambda a, b: (*change(a, b), *specs), **options)


def keys(x):
    return jax.random.split(jax.random.key(0), x.size).reshape(x.shape)


#: For each error: a part of its message, and a call that raises it.
REFUSED = {
    NameError: {
        "axis_name='typo', operand=0, dim=-2): unbound axis name": gather(axis_name="typo"),
        "unbound axis name: typo; the axes here are 'x', 'y'": sharded(P("typo"), P(), P()),
        "unbound axis name: free": sharded(P("free"), P(), P("free")),  # nothing would be sent
    },
    ValueError: {
        "repeated axis in axis_name; name each axis once": gather(axis_name=("x", "x")),
        "0 is not a name; axes by position are lax's own; name": gather(axis_name=0),
        "no algorithm 'rign'; did you mean 'ring'? choose from auto": gather(algorithm="rign"),
        "got 3 ranks; use algorithm='bruck'": scatter(algorithm="recursive_doubling"),
        "a schedule of 4 ranks on axes of sizes (3,)": gather(algorithm=algorithms.ring(4)),
        "a Table is only for collectives; pass": gather(algorithm=Table.from_json('{"rows": []}')),
        "residuals='keep'; choose from regather, save": gather(residuals="keep"),
        "operand=2; pass 0 to gather x, 1 to gather w": gather(operand=2),
        "of a matrix; pass -2 or -1; use all_gather_einsum": gather(dim=0),
        "dim: axis 2 is out of bounds": scatter(dim=2),
        "x has 0 dimensions; pass a matrix": scatter(lambda x, w: (x[0, 0], w)),
        "(x, w, axis_name='x'): x has 1 dimensions; pass a matrix": reduce(lambda x, w: (x[0], w)),
        "key<fry>": gather(lambda x, w: (keys(x), w)),
        "=bfloat16 cannot hold every float32; pass": scatter(accumulate_dtype=jnp.bfloat16),
        "Precision argument must be one of": gather(precision="some"),
        "of 'ak,kf->af' is of size 4 in x and 3 in w; make": gather(lambda x, w: (x, [w, w[1:]])),
        "size 4 in x and 12 in w, counting all shards; pass a shard of one": gather(operand=1),
        "'int4' has no codes": gather(wire="int4"),
        "has size 4, not divisible by 3; pad it": scatter(lambda x, w: (x[:4], w)),
        "gather='m', operand=0): the spec is not of two factors and a result": einsum("mk,kf"),
        "'...k' is not made of letters; give every": einsum("...k,kf->...f"),
        "'mk' is not a label of the factor that is gathered; choose": einsum("mk,kf->mf", "mk"),
        "'mm' has a label twice; take the diagonal": einsum("mm,mf->mf"),
        "label 'j' stands in one place only; sum": einsum("mk,jf->mf"),
        "'k' is not a label of the result; choose from m": einsum_scatter("mk,kf->mf", "k"),
        "'amk' does not fit the 2 dimensions of x": einsum("amk,kf->amf"),
        "a has 1 dimensions, and a matrix has 2; reshape it": sharded(
            P(), P(), P(), change=lambda a, b: (a[0], b)
        ),
        "leaves a dimension open; say how": sharded(P(P.UNCONSTRAINED), P(), P()),
        "size 4 in x and 3 in w; make": sharded(P(), P(), P(), change=lambda a, b: (a, b[1:])),
        "no algorithm 'rign'": sharded(P("x"), P(), P("x"), algorithm="rign"),
        "names an axis twice": sharded(P("x"), P(None, "x"), P("x", "x")),
        "J is sharded over ('y',) in a and ('x',) in b": sharded(P("x", "y"), P("x"), P("x")),
        "I is sharded over ('x',), the result's over ('y',)": sharded(P("x"), P(), P("y")),
        "more than one collective": sharded(P("x"), P(None, "y"), P()),
        "not the spec of a matrix": sharded(P("x", None, None), P(), P()),
    },
    TypeError: {
        "algorithm=[1] is not an algorithm; pass": gather(algorithm=[1]),
        "but 1 was given; it is called with the size of each": gather(algorithm=lambda: None),
        "dim='0' is not an integer; pass": scatter(dim="0"),
        "'None' of type '<class 'NoneType'>'": gather(lambda x, w: (None, w)),
        "'<class 'list'>' is not a valid JAX type": gather(lambda x, w: ([x, x], w)),
        "accumulate_dtype='wide' is not a dtype; pass": gather(accumulate_dtype="wide"),
        "not a wire": gather(wire=8),
        "int32 is not encoded": gather(lambda x, w: (x.astype(int), w.astype(int)), wire="int8"),
        "dtype bool; cast to int32 first": scatter(lambda x, w: (x > 0, w > 0)),
        "'wide' not understood": scatter(preferred_element_type="wide"),
        "the spec is 3, no string; write 'mk,kf->mf'": einsum(3),
        "b is None, no array; pass": sharded(P(), P(), P(), change=lambda a, b: (a, None)),
        "'x' is not a spec; write P(": sharded("x", P(), P()),
    },
}


@pytest.mark.parametrize(
    ("kind", "words"), [(kind, words) for kind, calls in REFUSED.items() for words in calls]
)
def test_refused_before_anything_is_sent(kind, words, monkeypatch):
    call, sent = REFUSED[kind][words], []
    monkeypatch.setattr(hop.Ppermute, "__call__", lambda self, x: sent.append(x))
    monkeypatch.setattr(AllGather, "__call__", lambda self, x: sent.append(x))
    with pytest.raises(kind) as refusal:
        per_rank(make_mesh(N, 1), call, *OPERANDS)
    assert type(refusal.value) is kind
    assert str(refusal.value).startswith(call.name)
    assert words in str(refusal.value)
    assert not sent
