"""Show who holds what after each round of a collective, as text and as pictures.

from ringcoll import draw

print(draw.as_text(draw.plan("all_reduce", "ring", (4,))))
"""

from ringcoll.draw.motion import as_motion
from ringcoll.draw.plan import Execution, plan
from ringcoll.draw.steps import Frame, frames
from ringcoll.draw.svg import as_svg
from ringcoll.draw.text import as_text

__all__ = [
    "Execution",
    "Frame",
    "as_motion",
    "as_svg",
    "as_text",
    "frames",
    "plan",
]
