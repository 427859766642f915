"""Scheduled HLO written by hand, small enough to be priced on paper.

The chip of these programs runs at 1 GHz, its links carry 1 GB/s each way, its memory moves
10 GB/s, and a hop takes 1 us: a transfer of 1,000,000 bytes to a neighbour takes 1001 us, and
a matmul of 1,000,000 cycles 1000 us.
"""

from collections.abc import Mapping

from ringcoll.overlap import Chip

CHIP = Chip("toy", clock=1e9, link=1e9, flops=1e12, hbm=10e9)

HEAD = "HloModule jit_f, is_scheduled=true, entry_computation_layout={{(f32[1]{{0:T(128)}})}}, "
HEAD += "num_partitions={ranks}\n\n"

#: x[500, 500] @ w[500, 500] in f32 is 1,000,000 bytes a matrix and 250 MFLOP.
MATMUL = """%matmul (p0: f32[500,500], p1: f32[500,500]) -> f32[500,500] {
  %p0 = f32[500,500]{1,0:T(8,128)} parameter(0)
  %p1 = f32[500,500]{1,0:T(8,128)} parameter(1)
  ROOT %conv = f32[500,500]{1,0:T(8,128)} convolution(%p0, %p1), dim_labels=bf_io->bf
}

"""

#: The shape of every matrix.
SHAPE = "f32[500,500]{1,0:T(8,128)}"
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
BACK = "source_target_pairs={{0,3},{1,0},{2,1},{3,2}}"
_X = "f32[500,500]{1,0:T(8,128)}"


def program(*lines: str, ranks: int = 4, before: str = MATMUL) -> str:
    """A program that consists of these lines; the last is its root."""
    body = [f"  {line}" for line in (f"%x = {_X} parameter(0)", f"%w = {_X} parameter(1)", *lines)]
    body[-1] = body[-1].replace("  %", "  ROOT %", 1)
    head = HEAD.format(ranks=ranks) + before
    return head + f"ENTRY %main (x: f32[1]) -> f32[1] {{\n{chr(10).join(body)}\n}}\n"


def computation(name: str, parameters: Mapping[str, str], *lines: str, end: str = "}") -> str:
    """A computation that instructions of the program call; the last line is its root."""
    numbered = enumerate(parameters.items())
    body = [f"%{one} = {shape} parameter({i})" for i, (one, shape) in numbered] + [*lines]
    body[-1] = body[-1].replace("%", "ROOT %", 1)
    return f"%{name} (p: f32[1]) -> f32[1] {{\n  {(chr(10) + '  ').join(body)}\n{end}\n\n"


def dot(name: str, x: str = "x", cycles: int = 1_000_000) -> str:
    """A matmul that takes this many cycles."""
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%{name} = {_X} fusion(%{x}, %w), kind=kOutput, calls=%matmul, {config}"


def start(name: str, x: str = "x", pairs: str = RING) -> str:
    """The start of a permute of 1,000,000 bytes."""
    return f"%{name} = ({_X}, {_X}, u32[]) collective-permute-start(%{x}), channel_id=1, {pairs}"


def done(name: str, of: str) -> str:
    """The end of the permute `of`."""
    return f"%{name} = {_X} collective-permute-done(%{of})"


def blocking(opcode: str, x: str = "x", groups: str = "{{0,1,2,3}}", shape: str = _X) -> str:
    """A collective without start and done."""
    return f"%{opcode}.1 = {shape} {opcode}(%{x}), replica_groups={groups}, dimensions={{0}}"


def add(name: str, x: str = "x", y: str = "w", cycles: int = 999_999_999) -> str:
    """An elementwise operation: 3,000,000 bytes to and from memory, 300 us."""
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%{name} = {_X} add(%{x}, %{y}), {config}"


def loop(turns: str, *body: str, bound: str = "7", first: str = "0", step: str = "1") -> str:
    """A module that runs only a loop; its body takes %x and %w and computes %next.

    `turns` is text for the loop's line: its known_trip_count, or nothing.
    """
    carry = f"(s32[], {_X}, {_X})"
    x, w = (f"%{name} = {_X} get-tuple-element(%c), index={i}" for i, name in ((1, "x"), (2, "w")))
    turned = loop_of(carry, "%next, %w", x, w, *body, bound=bound, step=step)
    return program(
        f"%first = s32[] constant({first})",
        "%copied = s32[] copy(%first)",
        f"%carry = {carry} tuple(%copied, %x, %w)",
        f"%while = {carry} while(%carry), condition=%condition, body=%body{turns}",
        f"%out = {_X} get-tuple-element(%while), index=1",
        before=MATMUL + turned,
    )


def loop_of(carry: str, kept: str, *body: str, bound: object = "7", step: str = "1") -> str:
    """The body and the condition of a loop. Its carry is a counter, and then what is `kept`."""
    lines = "\n".join(f"  {line}" for line in body)
    return f"""%body (c: {carry}) -> {carry} {{
  %c = {carry} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant({step})
{lines}
  %j = s32[] add(%i, %one)
  ROOT %t = {carry} tuple(%j, {kept})
}}

%condition (d: {carry}) -> pred[] {{
  %d = {carry} parameter(0)
  %k = s32[] get-tuple-element(%d), index=0
  %bound = s32[] constant({bound})
  ROOT %less = pred[] compare(%k, %bound), direction=LT
}}

"""


def untiled(text: str) -> str:
    """The text as a GPU's program, which has no times: its layouts have no tiles."""
    return text.replace(":T(8,128)", "").replace(":T(128)", "")


def us(report, *fields):
    """Microseconds of a report, rounded."""
    return tuple(round(1e6 * getattr(report, field)) for field in fields)
