"""Compile the programs of `test_overlap_gpu`, and print their reports as JSON."""

import json
import sys

from benchmarks.compiled.programs import program, with_gradient
from ringcoll import overlap
from ringcoll.commands.overlap import mesh_on
from ringcoll.placement import gpus

TOPOLOGY = "h200:8"
SHAPE = "8192x8192x28672"
TWO = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
mesh = mesh_on(TOPOLOGY)

forms = {
    "gather": "all_gather_matmul",
    "scatter": "matmul_reduce_scatter",
    # By columns nothing is summed, so all of it is hidden.
    "weights": "weight_gather_columns",
}


def reported(form, algorithm, both=False, **options):
    """A form's report as plain data, and whether every collective overlaps a matmul."""
    function, operands = program(forms[form], SHAPE, algorithm, mesh)
    function = with_gradient(function) if both else function
    compiled = overlap.compile_for(TOPOLOGY, function, *operands, compiler_options=options)
    report = overlap.report(compiled)
    verdict = "red: " if any(row.without_matmul for row in report.rows) else "green"
    return {**report.to_dict(), "verdict": verdict, "text": str(report)}


reports = {
    f"{form} {algorithm}{' both' if both else ''}": reported(form, algorithm, both)
    for form in forms
    for algorithm in ("ring", "lax")
    for both in (False, True)
}
reports["both ways"] = reported("gather", "bidirectional_ring")
reports["both ways, two at once"] = reported("gather", "bidirectional_ring", **TWO)
reports["regather"] = reported("gather", "ring/regather", both=True)
reports["targets"] = {}
for name in gpus.TARGETS:
    small = program(forms["gather"], "512x512x1024", "ring", mesh_on(f"{name}:2"))
    found = overlap.report(overlap.compile_for(f"{name}:2", small[0], *small[1]))
    reports["targets"][name] = found.chip and found.chip.name, found.total, found.flops
reports["kinds"] = [device.device_kind for device in mesh.devices.flat]
json.dump(reports, sys.stdout)
