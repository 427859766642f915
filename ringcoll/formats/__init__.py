"""Write schedules as MSCCL files, read such files, and prove the programs in them.

from ringcoll import formats

print(formats.to_msccl(formats.program("all_reduce", "ring", (4,))))
"""

from ringcoll.formats.lowering import program
from ringcoll.formats.msccl import from_msccl, to_msccl
from ringcoll.formats.program import MscclProgram
from ringcoll.formats.proof import prove

__all__ = ["MscclProgram", "from_msccl", "program", "prove", "to_msccl"]
