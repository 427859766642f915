"""Programs as the XML files of MSCCL, which its run time and msccl-tools read and write.

    <algo name= proto= nchannels= nchunksperloop= ngpus= coll= inplace= outofplace=>
      <gpu id= i_chunks= o_chunks= s_chunks=>
        <tb id= send= recv= chan=>
          <step s= type= srcbuf= srcoff= dstbuf= dstoff= cnt= depid= deps= hasdep=/>

In a thread block, -1 means no rank. In a step, `depid` and `deps` are the thread block and the step
that it waits for, or -1; `hasdep` is 1 if others wait for it. Other attributes are ignored.
"""

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from ringcoll.formats.program import Block, ChunkPlace, MscclProgram, RankProgram, Step
from ringcoll.schedules.schedule import ScheduleError

#: The names of collectives in files, by ringcoll's names. Readers ignore signs and case.
_COLLECTIVES = {
    "all_gather": "allgather",
    "psum_scatter": "reduce_scatter",
    "psum": "allreduce",
    "all_to_all": "alltoall",
}
_GPU, _BLOCK = "id i_chunks o_chunks s_chunks", "id send recv chan"
_STEP = "s type srcbuf srcoff dstbuf dstoff cnt depid deps hasdep"


def from_msccl(text: str | bytes) -> MscclProgram:
    """Read the program in the text of an MSCCL file. It is not proved: see `prove`.

    If a file has no `outofplace`, it is only for the calls that `inplace` names.

    Args:
        text: XML.

    Raises:
        ScheduleError: it is not XML, lacks an attribute, or names something that does not exist;
            the message has the element.

    >>> text = formats.to_msccl(formats.program("all_gather", "ring", (4,)))
    >>> formats.from_msccl(text).size
    4
    """
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # of its encoding
        raise ScheduleError(f"it is not XML: {error}") from error
    if root.tag != "algo":
        raise _wrong(root, "it is the outermost element; that of an MSCCL file is an <algo>")
    ranks = tuple(map(_rank, _numbered(root, "gpu", "id")))
    if len(ranks) != _number(root, "ngpus"):
        raise _wrong(root, f"it has {len(ranks)} <gpu>, not as many as ngpus")
    given = _text(root, "coll").lower().replace("_", "")
    ours = {name.replace("_", ""): collective for collective, name in _COLLECTIVES.items()}
    if given not in ours:
        raise _wrong(root, f"coll is not one of {', '.join(_COLLECTIVES.values())}")
    in_place = "inplace" in root.attrib and _number(root, "inplace") > 0
    out_of_place = _number(root, "outofplace") > 0 if "outofplace" in root.attrib else not in_place
    protocol = _text(root, "proto")
    program = MscclProgram(
        _text(root, "name"), ours[given], ranks, in_place, out_of_place, protocol
    )
    program.check()
    return program


def _wrong(element: Element, why: str) -> ScheduleError:
    """An error that shows the element as it is in the file."""
    attributes = "".join(f' {name}="{text:.40}"' for name, text in element.attrib.items())
    return ScheduleError(f"<{element.tag}{attributes}>: {why}")


def _text(element: Element, name: str) -> str:
    if name not in element.attrib:
        raise _wrong(element, f"it has no attribute {name!r}")
    return element.attrib[name]


def _number(element: Element, name: str, least: int = 0) -> int:
    text = _text(element, name)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise _wrong(element, f"{name} is not a whole number from {least}")
    return number


def _numbered(element: Element, tag: str, name: str) -> list[Element]:
    """The elements inside it, sorted by number. The numbers must be 0, 1, 2 and so on."""
    for inner in element:
        if inner.tag != tag:
            raise _wrong(inner, f"it is in <{element.tag}>, where only <{tag}> can be")
    found = sorted(element, key=lambda inner: _number(inner, name))
    for number, inner in enumerate(found):
        if _number(inner, name) != number:
            raise _wrong(inner, f"{name} is not {number}; number them 0, 1, 2 and so on")
    return found


def _rank(gpu: Element) -> RankProgram:
    inputs, outputs, scratch = (_number(gpu, f"{buffer}_chunks") for buffer in "ios")
    blocks = tuple(map(_block, _numbered(gpu, "tb", "id")))
    tells = {
        (_number(tb, "id"), _number(step, "s"))
        for tb in gpu
        for step in tb
        if _number(step, "hasdep")
    }
    for after in (step.after for block in blocks for step in block.steps):
        if after and after not in tells:
            where = f"thread block {after[0]}, step {after[1]}"
            raise _wrong(gpu, f'a step waits for {where}, which has no hasdep="1"')
    return RankProgram(inputs, outputs, scratch, blocks)


def _block(tb: Element) -> Block:
    to, source = (_number(tb, name, -1) for name in ("send", "recv"))
    steps = tuple(map(_step, _numbered(tb, "step", "s")))
    return Block(
        to if to >= 0 else None, source if source >= 0 else None, _number(tb, "chan"), steps
    )


def _step(step: Element) -> Step:
    source = ChunkPlace(_text(step, "srcbuf"), _number(step, "srcoff", -1))
    target = ChunkPlace(_text(step, "dstbuf"), _number(step, "dstoff", -1))
    block, number = _number(step, "depid", -1), _number(step, "deps", -1)
    after = (block, number) if block >= 0 else None
    return Step(_text(step, "type"), source, target, _number(step, "cnt"), after)


def to_msccl(program: MscclProgram) -> str:
    """The text of an MSCCL file.

    Args:
        program: a program of any collective.

    >>> print(formats.to_msccl(formats.program("all_gather", "ring", (2,)))[:47])
    <algo name="all_gather_ring" proto="Simple" nch
    """
    channels = {block.channel for rank in program.ranks for block in rank.blocks}
    root = Element("algo", {
        "name": program.name,
        "proto": program.protocol,
        "nchannels": str(1 + max(channels, default=0)),
        "nchunksperloop": str(program.chunks),
        "ngpus": str(program.size),
        "coll": _COLLECTIVES[program.collective],
        "inplace": str(int(program.in_place)),
        "outofplace": str(int(program.out_of_place)),
    })  # fmt: skip
    waited_for = {(at.rank, *step.after) for at, step in program.steps() if step.after}
    for rank, one in enumerate(program.ranks):
        gpu = _add(root, "gpu", _GPU, rank, one.inputs, one.outputs, one.scratch)
        for number, block in enumerate(one.blocks):
            peers = (-1 if peer is None else peer for peer in (block.to, block.source))
            tb = _add(gpu, "tb", _BLOCK, number, *peers, block.channel)
            for s, step in enumerate(block.steps):
                waits, tells = step.after or (-1, -1), (rank, number, s) in waited_for
                places = (*step.source, *step.target)
                _add(tb, "step", _STEP, s, step.kind, *places, step.count, *waits, int(tells))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(parent: Element, tag: str, names: str, *values: str | int) -> Element:
    attributes = dict(zip(names.split(), map(str, values), strict=True))
    return ElementTree.SubElement(parent, tag, attributes)
