"""Bad calls of matmuls are refused before anything is sent: function, value and cure."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support import data, make_mesh, per_rank

import ringcoll
from ringcoll import Table, algorithms
from ringcoll.collectives.all_gather import AllGather
from ringcoll.matmuls import overlapped
from ringcoll.runtime import hop

N = 3
OPERANDS = data((N, 6, 4)), data((N, 4, 2))


def gather(axis="x", **options):
    return lambda x, w: ringcoll.all_gather_matmul(x, w, axis, **options)


def scatter(axis="x", **options):
    return lambda x, w: ringcoll.matmul_reduce_scatter(x, w, axis, **options)


def einsum(spec="mk,kf->mf", **options):
    return lambda x, w: ringcoll.all_gather_einsum(spec, x, w, "x", **{"gather": "m", **options})


def scattering(spec="mk,kf->mf", **options):
    return lambda x, w: ringcoll.einsum_reduce_scatter(
        spec, x, w, "x", **{"scatter": "m", **options}
    )


def sharded(*specs, **options):
    return lambda a, b: ringcoll.sharded_matmul(a, b, *specs, **options)


def keys(x):
    return jax.random.split(jax.random.key(0), x.size).reshape(x.shape)


GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
EINSUM, SUM, SHARDED = "all_gather_einsum", "einsum_reduce_scatter", "sharded_matmul"
TABLE = Table.from_json('{"rows": []}')

#: name: kind, call of x: [6, 4] and w: [4, 2], words besides "ringcoll.".
REFUSED = {
    "axis unbound": (
        NameError,
        gather(axis="typo"),
        (GATHER, "axis_name='typo'", "unbound axis name: typo", "the axes here are 'x'"),
    ),
    "axis unbound, sharded": (
        NameError,
        sharded(P("typo"), P(), P()),
        (SHARDED, "unbound axis name: typo", "the axes here are 'x'"),
    ),
    "axis twice": (
        ValueError,
        gather(axis=("x", "x")),
        (GATHER, "axis_name=('x', 'x')", "repeated axis", "name each axis once"),
    ),
    "axis by position": (
        ValueError,
        gather(axis=0),
        (GATHER, "axis_name=0", "0 is not a name", "name an axis of the mesh"),
    ),
    "no such algorithm": (
        ValueError,
        gather(algorithm="rign"),
        (GATHER, "no algorithm 'rign'", "choose from auto, ring, bidirectional_ring"),
    ),
    "no power of two": (
        ValueError,
        scatter(algorithm="recursive_doubling"),
        (SCATTER, "got 3 ranks", "use algorithm='bruck'"),
    ),
    "schedule of other ranks": (
        ValueError,
        gather(algorithm=algorithms.ring(4)),
        (GATHER, "a schedule of 4 ranks", "(3,)"),
    ),
    "algorithm not hashable": (TypeError, gather(algorithm=[1]), (GATHER, "algorithm=[1]")),
    "function of other arguments": (
        TypeError,
        gather(algorithm=lambda: None),
        (GATHER, "algorithm=<lambda>", "positional argument", "the size of each axis"),
    ),
    "table": (
        ValueError,
        gather(algorithm=TABLE),
        (GATHER, "algorithm", "a Table is only for collectives", "pass a name"),
    ),
    "residuals": (
        ValueError,
        gather(residuals="keep"),
        (GATHER, "residuals='keep'", "choose from regather, save"),
    ),
    "operand": (
        ValueError,
        gather(operand=2),
        (GATHER, "operand=2", "pass 0 to gather x, 1 to gather w"),
    ),
    "dimension of neither kind": (
        ValueError,
        gather(dimension=0),
        (GATHER, "dimension=0", "not one of the last two", "use all_gather_einsum"),
    ),
    "scatter_dimension": (
        ValueError,
        scatter(scatter_dimension=2),
        (SCATTER, "scatter_dimension=2", "out of bounds for array of dimension 2", "count dim"),
    ),
    "scatter_dimension no integer": (
        TypeError,
        scatter(scatter_dimension="0"),
        (SCATTER, "scatter_dimension='0' is not an integer", "pass a Python int"),
    ),
    "scalar": (
        ValueError,
        lambda x, w: scatter()(x[0, 0], w),
        (SCATTER, "x has 0 dimensions", "pass a matrix"),
    ),
    "sum of a vector": (
        ValueError,
        lambda x, w: ringcoll.matmul_all_reduce(x[0], w, "x"),
        (REDUCE, "x has 1 dimensions", "pass a matrix"),
    ),
    "no array": (TypeError, lambda x, w: gather()(None, w), (GATHER, "not a valid JAX type")),
    "several to gather": (TypeError, lambda x, w: gather()([x, x], w), (GATHER, "<class 'list'>")),
    "keys": (ValueError, lambda x, w: gather()(keys(x), w), (GATHER, "key<fry>")),
    "accumulation in no dtype": (
        TypeError,
        gather(accumulate_dtype="wide"),
        (GATHER, "accumulate_dtype='wide' is not a dtype", "such as jnp.float32"),
    ),
    "accumulation too narrow": (
        ValueError,
        scatter(accumulate_dtype=jnp.bfloat16),
        (SCATTER, "accumulate_dtype=bfloat16 cannot hold every float32", "pass a dtype"),
    ),
    "precision": (ValueError, gather(precision="some"), (GATHER, "Precision", "some")),
    "bools": (
        TypeError,
        lambda x, w: ringcoll.matmul_reduce_scatter(x > 0, w > 0, "x"),
        (SCATTER, "dtype bool", "cast to int32 first"),
    ),
    "element type": (TypeError, scatter(preferred_element_type="wide"), (SCATTER, "'wide'")),
    "sizes, one of several": (
        ValueError,
        lambda x, w: gather()(x, [w, w[1:]]),
        (GATHER, "label 'k' of 'ak,kf->af' is of size 4 in x and 3 in w", "make"),
    ),
    "sizes, counting shards": (
        ValueError,
        gather(operand=1),
        (GATHER, "size 4 in x and 12 in w, counting all shards", "pass a shard of one"),
    ),
    "rows do not divide": (
        ValueError,
        lambda x, w: scatter()(x[:4], w),
        (
            SCATTER,
            "label 'a' of 'ak,kf->af' has size 4, not divisible by 3",
            "pad it to a multiple",
        ),
    ),
    "spec no string": (TypeError, einsum(3), (EINSUM, "the spec is 3", "write 'mk,kf->mf'")),
    "spec without a result": (
        ValueError,
        einsum("mk,kf"),
        (EINSUM, "'mk,kf'", "write 'mk,kf->mf'"),
    ),
    "ellipsis": (ValueError, einsum("...k,kf->...f"), (EINSUM, "'...k'", "give every")),
    "two labels to gather": (
        ValueError,
        einsum(gather="mk"),
        (EINSUM, "'mk' is not a label of the factor that is gathered", "choose from m, k"),
    ),
    "diagonal": (ValueError, einsum("mm,mf->mf"), (EINSUM, "'mm' has a label twice", "diagonal")),
    "label in one place": (
        ValueError,
        einsum("mk,jf->mf"),
        (EINSUM, "label 'j' stands in one place only", "sum over it before"),
    ),
    "label not of the result": (
        ValueError,
        scattering(scatter="k"),
        (SUM, "'k' is not a label of the result", "choose from m, f"),
    ),
    "dimensions": (
        ValueError,
        einsum("amk,kf->amf"),
        (EINSUM, "'amk' does not fit the 2 dimensions of x", "give each a letter"),
    ),
    "sharded vector": (
        ValueError,
        lambda a, b: sharded(P(), P(), P())(a[0], b),
        (SHARDED, "a has 1 dimensions", "reshape it to a matrix, or call all_gather_einsum"),
    ),
    "sharded nothing": (
        TypeError,
        lambda a, b: sharded(P(), P(), P())(a, None),
        (SHARDED, "b is None, no array", "pass this rank's shard"),
    ),
    "no spec": (TypeError, sharded("x", P(), P()), (SHARDED, "'x' is not a spec", "write P(")),
    "open spec": (
        ValueError,
        sharded(P(P.UNCONSTRAINED), P(), P()),
        (SHARDED, "leaves a dimension open", "say how it is sharded"),
    ),
    "sizes, nothing sharded": (
        ValueError,
        lambda a, b: sharded(P(), P(), P())(a, b[1:]),
        (SHARDED, "label 'k' of 'ak,kf->af' is of size 4 in x and 3 in w", "make them agree"),
    ),
    "algorithm, nothing sharded": (
        ValueError,
        sharded(P("x"), P(), P("x"), algorithm="rign"),
        (SHARDED, "no algorithm 'rign'", "choose from auto"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_sent(case, monkeypatch):
    kind, call, words = REFUSED[case]
    sent = []
    monkeypatch.setattr(hop.Ppermute, "__call__", lambda self, x: sent.append(x))
    monkeypatch.setattr(AllGather, "__call__", lambda self, x: sent.append(x))
    monkeypatch.setattr(overlapped.built_in, "all_gather", lambda *_, **__: sent.append(0))
    with pytest.raises(kind) as refusal:
        per_rank(make_mesh(N), call, *OPERANDS)
    assert type(refusal.value) is kind
    name, *words = words
    assert str(refusal.value).startswith(f"ringcoll.{name}(")
    for word in words:
        assert word in str(refusal.value)
    assert not sent
