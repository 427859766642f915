"""Programs as the XML files of MSCCL, which its run time and msccl-tools read and write.

    <algo name= proto= nchannels= nchunksperloop= ngpus= coll= inplace= outofplace=>
      <gpu id= i_chunks= o_chunks= s_chunks=>
        <tb id= send= recv= chan=>
          <step s= type= srcbuf= srcoff= dstbuf= dstoff= cnt= depid= deps= hasdep=/>

In a thread block, -1 means no rank. In a step, `depid` and `deps` are the thread block and the step
that it waits for, or -1; `hasdep` says that others wait for it. Other attributes are ignored.
"""

from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

from ringcoll.formats.program import KINDS, Block, ChunkPlace, Program, RankProgram, Step
from ringcoll.schedules.schedule import ScheduleError

#: The names of collectives in files, by ringcoll's names. Readers ignore signs and case.
_COLLECTIVES = {
    "all_gather": "allgather",
    "psum_scatter": "reduce_scatter",
    "psum": "allreduce",
    "all_to_all": "alltoall",
}
_PROTOCOLS = ("Simple", "LL", "LL128")
_MOST = 2**31


@dataclass
class _Element:
    """An element of a file, with the number of its line."""

    tag: str
    attributes: dict[str, str]
    line: int
    file: str
    inner: list["_Element"] = field(default_factory=list)

    def wrong(self, why: str) -> ScheduleError:
        return ScheduleError(f"{self.file}, line {self.line}: <{self.tag}> {why}")

    def text(self, name: str) -> str:
        if name not in self.attributes:
            raise self.wrong(f"has no attribute {name!r}")
        return self.attributes[name]

    def number(self, name: str, least: int = 0) -> int:
        text = self.text(name)
        try:
            number = int(text)
        except ValueError:
            number = _MOST
        if not least <= number < _MOST:
            raise self.wrong(f'{name}="{text:.40}" is not a whole number from {least}')
        return number

    def flag(self, name: str, default: bool) -> bool:
        return self.number(name) > 0 if name in self.attributes else default

    def children(self, tag: str) -> list["_Element"]:
        """The elements inside it; all must have this tag."""
        for one in self.inner:
            if one.tag != tag:
                raise one.wrong(f"is in <{self.tag}>, where only <{tag}> can be")
        return self.inner

    def numbered(self, tag: str, name: str) -> list["_Element"]:
        """The elements inside it, sorted by number. The numbers must be 0, 1, 2 and so on."""
        by_number: dict[int, _Element] = {}
        for one in self.children(tag):
            if one.number(name) in by_number:
                raise one.wrong(f'{name}="{one.number(name)}" is there twice')
            by_number[one.number(name)] = one
        for number, (given, one) in enumerate(sorted(by_number.items())):
            if number != given:
                raise one.wrong(f'{name}="{given}", but there is no {name}="{number}"')
        return [by_number[number] for number in sorted(by_number)]


def from_msccl(text: str | bytes, file: str = "MSCCL XML") -> Program:
    """Read the program in the text of an MSCCL file. It is not proved: see `prove`.

    If a file has no `outofplace`, it is only for the calls that `inplace` names.

    Args:
        text: XML.
        file: its name, for errors.

    Raises:
        ScheduleError: it is not XML, lacks an attribute, or names something that does not exist;
            the message has the line.

    >>> text = formats.to_msccl(formats.program("all_gather", "ring", (4,)))
    >>> formats.from_msccl(text).size
    4
    """
    root = _parsed(text, file)
    if root.tag != "algo":
        raise root.wrong("is the outermost element; that of an MSCCL file is an <algo>")
    gpus = root.numbered("gpu", "id")
    if len(gpus) != root.number("ngpus"):
        raise root.wrong(f'ngpus="{root.text("ngpus")}", but it has {len(gpus)} <gpu>')
    ranks = tuple(_rank(gpu) for gpu in gpus)
    in_place = root.flag("inplace", False)
    program = Program(
        name=root.text("name"),
        collective=_collective(root),
        ranks=ranks,
        in_place=in_place,
        out_of_place=root.flag("outofplace", not in_place),
        protocol=_protocol(root),
        file=file,
    )
    root.number("nchunksperloop"), root.number("nchannels")
    program.check_indices()
    _check_signals(program, gpus)
    return program


def _parsed(text: str | bytes, file: str) -> _Element:
    parser = expat.ParserCreate()
    roots: list[_Element] = []
    open_: list[_Element] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        one = _Element(tag, attributes, parser.CurrentLineNumber, file)
        (open_[-1].inner if open_ else roots).append(one)
        open_.append(one)

    def refuse(*_: object) -> None:  # with entities, a short file could become endless
        raise ScheduleError(f"{file}, line {parser.CurrentLineNumber}: has a document type")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: open_.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        why = expat.ErrorString(error.code)
        raise ScheduleError(f"{file}, line {error.lineno}: is not XML: {why}") from error
    return roots[0]


def _collective(root: _Element) -> str:
    given = root.text("coll")
    plain = given.lower().replace("_", "")
    for ours, name in _COLLECTIVES.items():
        if plain == name.replace("_", ""):
            return ours
    known = ", ".join(_COLLECTIVES.values())
    raise root.wrong(f'coll="{given:.40}" is not one of {known}: only their results are known')


def _protocol(root: _Element) -> str:
    given = root.text("proto")
    for known in _PROTOCOLS:
        if given.lower() == known.lower():
            return known
    raise root.wrong(f'proto="{given:.40}" is not one of {", ".join(_PROTOCOLS)}')


def _rank(gpu: _Element) -> RankProgram:
    inputs, outputs, scratch = (gpu.number(f"{buffer}_chunks") for buffer in "ios")
    blocks = tuple(_block(tb) for tb in gpu.numbered("tb", "id"))
    return RankProgram(inputs, outputs, scratch, blocks, gpu.line)


def _block(tb: _Element) -> Block:
    to, source = tb.number("send", -1), tb.number("recv", -1)
    steps = tuple(_step(step) for step in tb.numbered("step", "s"))
    channel = tb.number("chan")
    return Block(to if to >= 0 else None, source if source >= 0 else None, channel, steps, tb.line)


def _step(step: _Element) -> Step:
    kind = step.text("type")
    if kind not in KINDS:
        raise step.wrong(f'type="{kind:.40}" is not one of {", ".join(KINDS)}')
    source = ChunkPlace(step.text("srcbuf"), step.number("srcoff", -1))
    target = ChunkPlace(step.text("dstbuf"), step.number("dstoff", -1))
    block, number = step.number("depid", -1), step.number("deps", -1)
    if (block < 0) != (number < 0):
        raise step.wrong(f'depid="{block}" and deps="{number}": one is -1, and the other is not')
    step.number("hasdep")
    after = (block, number) if block >= 0 else None
    return Step(kind, source, target, step.number("cnt"), after, step.line)


def _check_signals(program: Program, gpus: list[_Element]) -> None:
    """Refuse a step that waits for a step with hasdep="0"."""
    tells = {
        (rank, block, number)
        for rank, gpu in enumerate(gpus)
        for block, tb in enumerate(gpu.numbered("tb", "id"))
        for number, step in enumerate(tb.numbered("step", "s"))
        if step.number("hasdep")
    }
    for at, step in program.steps():
        if step.after and (at.rank, *step.after) not in tells:
            block, number = step.after
            why = f'it waits for thread block {block}, step {number}, which has hasdep="0"'
            raise program.wrong(at, why)


def to_msccl(program: Program) -> str:
    """The text of an MSCCL file.

    Args:
        program: a program of any collective.

    >>> print(formats.to_msccl(formats.program("all_gather", "ring", (2,)))[:47])
    <algo name="all_gather_ring" proto="Simple" nch
    """
    root = ElementTree.Element("algo", {
        "name": program.name,
        "proto": program.protocol,
        "nchannels": str(program.channels),
        "nchunksperloop": str(program.chunks),
        "ngpus": str(program.size),
        "coll": _COLLECTIVES[program.collective],
        "inplace": str(int(program.in_place)),
        "outofplace": str(int(program.out_of_place)),
    })  # fmt: skip
    waited_for = {(at.rank, *step.after) for at, step in program.steps() if step.after}
    for rank, one in enumerate(program.ranks):
        gpu = _add(root, "gpu", id=rank, i_chunks=one.inputs, o_chunks=one.outputs)
        gpu.set("s_chunks", str(one.scratch))
        for number, block in enumerate(one.blocks):
            to, source = (-1 if peer is None else peer for peer in (block.to, block.source))
            tb = _add(gpu, "tb", id=number, send=to, recv=source, chan=block.channel)
            for s, step in enumerate(block.steps):
                waits, tells = step.after or (-1, -1), (rank, number, s) in waited_for
                _add(
                    tb,
                    "step",
                    s=s,
                    type=step.kind,
                    srcbuf=step.source.buffer,
                    srcoff=step.source.first,
                    dstbuf=step.target.buffer,
                    dstoff=step.target.first,
                    cnt=step.count,
                    depid=waits[0],
                    deps=waits[1],
                    hasdep=int(tells),
                )
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(parent: ElementTree.Element, tag: str, **attributes: object) -> ElementTree.Element:
    named = {name: str(value) for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, named)


def read(path: str | Path) -> Program:
    """Read the program in an MSCCL file.

    Raises:
        ScheduleError: as `from_msccl`.
        OSError: the file cannot be read.
    """
    return from_msccl(Path(path).read_bytes(), str(path))
