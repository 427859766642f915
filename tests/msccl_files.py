"""MSCCL files written by hand: parts of them, and two whose ranks do different things."""


def step(number, kind, source="i 0", target="i 0", after="-1 -1", tells=0, count=1):
    (sb, so), (db, do), (block, other) = source.split(), target.split(), after.split()
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{sb}" srcoff="{so}" dstbuf="{db}" dstoff="{do}" '
        f'cnt="{count}" depid="{block}" deps="{other}" hasdep="{tells}" extra="ignored"/>\n'
    )


def block(number, send, recv, *steps, chan=0):
    inner = "".join(steps)
    return f'<tb id="{number}" send="{send}" recv="{recv}" chan="{chan}">\n{inner}</tb>\n'


def gpu(number, chunks, *blocks):
    i, o, s = chunks
    inner = "".join(blocks)
    return f'<gpu id="{number}" i_chunks="{i}" o_chunks="{o}" s_chunks="{s}">\n{inner}</gpu>\n'


def algo(coll, gpus, places='inplace="1" outofplace="0"', chunks=1):
    inner = "".join(gpus)
    return (
        f'<algo name="mine" nchannels="1" nchunksperloop="{chunks}" proto="LL" ngpus="{len(gpus)}" '
        f'coll="{coll}" {places} minBytes="0">\n{inner}</algo>\n'
    )


#: Partial sums go from rank 2 through 1 to 0, and the whole sum goes back.
CHAIN = algo(
    "allreduce",
    [
        gpu(
            0,
            (1, 0, 0),
            block(0, -1, 1, step(0, "rrc", tells=1)),
            block(1, 1, -1, step(0, "s", after="0 0")),
        ),
        gpu(1, (1, 0, 0), block(0, 0, 2, step(0, "rrs")), block(1, 2, 0, step(0, "rcs"))),
        gpu(2, (1, 0, 0), block(0, 1, -1, step(0, "s")), block(1, -1, 1, step(0, "r"))),
    ],
)
#: All ranks send their shards to rank 0, which sends them on.
HUB = algo(
    "allgather",
    [
        gpu(
            0,
            (1, 3, 0),
            block(0, 1, 1, step(0, "cpy", target="o 0", tells=1),
                  step(1, "r", target="o 1", tells=1), step(2, "nop", "i -1", "o -1", "1 0"),
                  step(3, "s", "o 0", count=3)),
            block(1, 2, 2, step(0, "r", target="o 2", after="0 1", tells=1),
                  step(1, "s", "o 0", count=3)),
        ),
        gpu(1, (1, 3, 0), block(0, 0, 0, step(0, "s"), step(1, "r", target="o 0", count=3))),
        gpu(2, (1, 3, 0), block(0, 0, 0, step(0, "s"), step(1, "r", target="o 0", count=3))),
    ],
    places='inplace="0"',
    chunks=3,
)  # fmt: skip
