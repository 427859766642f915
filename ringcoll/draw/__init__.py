"""Who holds what after each round of a collective, as text, as pictures and as a page.

from ringcoll import draw
print(draw.as_text(draw.plan("all_reduce", "ring", (4,))))
"""

from ringcoll.draw.page import as_page as as_page
from ringcoll.draw.plan import Plan as Plan
from ringcoll.draw.plan import plan as plan
from ringcoll.draw.steps import Frame as Frame
from ringcoll.draw.steps import frames as frames
from ringcoll.draw.svg import as_svg as as_svg
from ringcoll.draw.text import as_text as as_text
