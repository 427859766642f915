"""The separate process of `compile_for`: `python -m ringcoll.overlap.child FOLDER`.

LIBTPU_INIT_ARGS is set for this process, so the compiler writes a profile of the program.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export, tree
from jax.sharding import AxisType, Mesh

from ringcoll.overlap.program import program_of
from ringcoll.placement.topology import devices


def compile_exported(folder: Path) -> None:
    """Compile the program in a folder, and write its text and sizes there."""
    request = json.loads((folder / "request").read_text(encoding="utf-8"))
    available = np.array(devices(request["topology"]), object)[request["order"]]
    types = tuple(AxisType[name] for name in request["types"])
    mesh = Mesh(available.reshape(request["shape"]), request["axes"], axis_types=types)
    exported = export.deserialize(bytearray((folder / "exported").read_bytes()))
    leaves = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    arguments, keywords = tree.unflatten(exported.in_tree, leaves)

    def call(*arguments: Any, **keywords: Any) -> Any:
        return exported.call(*arguments, **keywords)

    call.__name__ = exported.fun_name  # the compiled module gets this name
    with jax.set_mesh(mesh):  # operands may have no sharding
        lowered = jax.jit(call).lower(*arguments, **keywords)
    program = program_of(lowered.compile(compiler_options=request["options"] or None))
    outcome = {
        "text": program.text,
        "temporaries": program.temporaries,
        "program_bytes": program.program_bytes,
    }
    (folder / "program").write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    compile_exported(Path(sys.argv[1]))
