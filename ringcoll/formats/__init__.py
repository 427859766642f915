"""Read and write schedules in the files of other tools, and prove the programs in them.

from ringcoll import formats

print(formats.to_msccl(formats.program("all_reduce", "ring", (4,))))
"""

from ringcoll.formats.chakra import to_chakra
from ringcoll.formats.counting import price_of
from ringcoll.formats.lowering import program
from ringcoll.formats.msccl import from_msccl, to_msccl
from ringcoll.formats.mscclpp import to_mscclpp
from ringcoll.formats.nccl_tuner import from_nccl_tuner, to_nccl_tuner
from ringcoll.formats.picture import svg_of
from ringcoll.formats.program import Program
from ringcoll.formats.proof import Proof, prove
from ringcoll.formats.recovery import schedule_of, schedules_of

__all__ = [
    "Program",
    "Proof",
    "from_msccl",
    "from_nccl_tuner",
    "price_of",
    "program",
    "prove",
    "schedule_of",
    "schedules_of",
    "svg_of",
    "to_chakra",
    "to_msccl",
    "to_mscclpp",
    "to_nccl_tuner",
]
