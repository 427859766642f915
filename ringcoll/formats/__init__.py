"""Files of schedules that other tools read and write, and the proof of programs in them.

from ringcoll import formats

print(formats.to_msccl(formats.program("all_reduce", "ring", (4,))))
"""

from ringcoll.formats.lowering import program
from ringcoll.formats.msccl import from_msccl, to_msccl
from ringcoll.formats.program import Program
from ringcoll.formats.proof import Proof, prove
from ringcoll.formats.recovery import schedule_of

__all__ = ["Program", "Proof", "from_msccl", "program", "prove", "schedule_of", "to_msccl"]
