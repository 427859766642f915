"""The benchmark of compiled collectives."""

from support import make_mesh

from benchmarks.compiled import collectives


def test_the_compiled_operand_is_of_so_many_bytes(monkeypatch):
    monkeypatch.setattr(collectives.overlap, "mesh", lambda topology, **axes: make_mesh(4, 2))
    _, (operand,) = collectives.program_of("v5e:4x2", "4x2", "psum_scatter", "1M", "ring")
    assert operand.size * 4 == 8 * 2**20
