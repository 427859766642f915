"""MSCCL++ plans and Chakra traces do what the program says when they are run; NCCL's tuner."""

import json
import random
from collections import Counter, defaultdict

import pytest
from msccl_files import CHAIN
from support import SIZES, runnable

from ringcoll import Table, formats
from ringcoll.collectives.table import TableRow
from ringcoll.pricing import price

pytestmark = pytest.mark.quick

COLLECTIVES = ("all_gather", "psum_scatter", "psum", "all_to_all")
SHAPES = [*((n,) for n in SIZES), (2, 3)]


# -- MSCCL++ --


def check_executor_takes(gpu):
    """With more (or no) chunks it throws, divides by zero, or overwrites what it has read."""
    assert gpu["input_chunks"] > 0
    assert gpu["output_chunks"] > 0
    for number, block in enumerate(gpu["threadblocks"]):
        assert block["id"] == number
        assert len(block["ops"]) <= 64
        assert all(len(op.get("semaphore_ids", ())) <= 16 for op in block["ops"])
        assert sum(len(some["channel_ids"]) for some in block["channels"]) <= 16


class Machine:
    """Runs an execution plan on sums of numbers; a sum shows whose data it contains."""

    def __init__(self, text, collective, in_place):
        plan = json.loads(text)
        self.gpus, self.n = plan["gpus"], len(plan["gpus"])
        self.collective, self.in_place = collective, in_place
        assert [gpu["id"] for gpu in self.gpus] == list(range(self.n))
        for gpu in self.gpus:
            check_executor_takes(gpu)
        self.memory = [defaultdict(lambda: None) for _ in self.gpus]
        for rank, gpu in enumerate(self.gpus):
            for i in range(gpu["input_chunks"]):
                self.memory[rank][self.place(rank, "i", i)] = Counter({(rank, i): 1})
        self.signals, self.released = Counter(), Counter()

    def place(self, rank, buffer, index):
        """If the call is in place, input and output are one memory."""
        gpu = self.gpus[rank]
        chunks = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}[buffer]
        assert 0 <= index < gpu[chunks]
        if self.in_place and buffer == "i" and self.collective != "psum_scatter":
            share = gpu["input_chunks"] if self.collective == "all_gather" else 0
            return "o", rank * share + index
        if self.in_place and buffer == "o" and self.collective == "psum_scatter":
            return "i", rank * gpu["output_chunks"] + index
        return buffer, index

    def cells(self, rank, part):
        return [self.place(rank, part["type"], part["index"] + i) for i in range(part["size"])]

    def peer(self, rank, channel):
        """The other end: the k-th channel to a peer is joined with its k-th channel to us."""
        (all_,) = self.gpus[rank]["channels"]
        other = all_["connected_to"][channel]
        k = all_["connected_to"][:channel].count(other)
        (theirs,) = self.gpus[other]["channels"]
        return other, [i for i, to in enumerate(theirs["connected_to"]) if to == rank][k]

    def run(self, seed):
        """Thread blocks go on in any order, a few operations at a time."""
        blocks = [
            (rank, block, iter(block["ops"]))
            for rank, gpu in enumerate(self.gpus)
            for block in gpu["threadblocks"]
        ]
        pending = {i: next(ops, None) for i, (_, _, ops) in enumerate(blocks)}
        order = random.Random(seed)
        while any(pending.values()):
            went_on = False
            for i in order.sample(list(pending), len(pending)):
                rank, block, ops = blocks[i]
                for _ in range(order.randint(1, 9)):
                    if pending[i] and self.can(rank, block, pending[i]):
                        self.do(rank, block, pending[i])
                        pending[i], went_on = next(ops, None), True
            assert went_on, "all wait for ever"

    def channel(self, block, op):
        (all_,) = block["channels"]
        return all_["channel_ids"][op["channel_ids"][0]]

    def can(self, rank, block, op):
        if op["name"] == "wait":
            return self.signals[rank, self.channel(block, op)] > 0
        if op["name"] == "sem_acquire":
            return all(self.released[rank, number] > 0 for number in op["semaphore_ids"])
        return True

    def do(self, rank, block, op):
        name = op["name"]
        if name == "wait":
            self.signals[rank, self.channel(block, op)] -= 1
        elif name == "signal":
            self.signals[self.peer(rank, self.channel(block, op))] += 1
        elif name in ("sem_acquire", "sem_release"):
            for number in op["semaphore_ids"]:
                assert number < len(self.gpus[rank]["semaphores"])
                self.released[rank, number] += 1 if name == "sem_release" else -1
        elif name in ("copy", "re", "put"):
            self.move(rank, block, op)
        else:
            assert name == "nop"

    def move(self, rank, block, op):
        sources = [self.cells(rank, part) for part in op["src_buff"]]
        values = [
            sum((self.memory[rank][c] for c in column), Counter())
            for column in zip(*sources, strict=True)
        ]
        (target,), to = op["dst_buff"], rank
        if op["name"] == "put":
            (refs,) = block["remote_buffer_refs"]
            number = refs["remote_buffer_ids"][target["buffer_id"]]
            remote = self.gpus[rank]["remote_buffers"][number]
            to, target = remote["rank"], {**target, "type": remote["type"]}
            assert to == self.peer(rank, self.channel(block, op))[0]
        for cell, value in zip(self.cells(to, target), values, strict=True):
            self.memory[to][cell] = value

    def check(self):
        for rank, gpu in enumerate(self.gpus):
            for i in range(gpu["output_chunks"]):
                k = max(gpu["input_chunks"], gpu["output_chunks"]) // self.n
                wanted = {
                    "all_gather": lambda i=i, k=k: {(i // k, i % k)},
                    "all_to_all": lambda i=i, k=k, r=rank: {(i // k, r * k + i % k)},
                    "psum": lambda i=i: {(q, i) for q in range(self.n)},
                    "psum_scatter": lambda i=i, k=k, r=rank: {
                        (q, r * k + i) for q in range(self.n)
                    },
                }[self.collective]()
                assert self.memory[rank][self.place(rank, "o", i)] == Counter(wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_plan_of_mscclpp_ends_with_the_result_in_any_order(collective, shape):
    for number, algorithm in enumerate(runnable(collective, *shape)):
        program = formats.program(collective, algorithm, shape)
        for in_place in (False, True):
            machine = Machine(formats.to_mscclpp(program, in_place), collective, in_place)
            machine.run(seed=number)
            machine.check()


@pytest.mark.parametrize(
    ("collective", "algorithm", "shape"),
    [
        ("psum", "ring", (16,)),  # 93 operations in a thread block
        ("all_to_all", "pairwise", (16,)),  # 124
        ("all_gather", "torus", (2, 2, 2)),  # one step before 18 others
    ],
)
def test_what_is_too_long_for_a_thread_block_goes_on_in_another(collective, algorithm, shape):
    program = formats.program(collective, algorithm, shape)
    machine = Machine(formats.to_mscclpp(program), collective, False)
    machine.run(seed=3)
    machine.check()


def test_a_gather_is_put_where_it_belongs_and_a_sum_beside():
    def scratch(text):
        return [gpu["scratch_chunks"] for gpu in json.loads(text)["gpus"]]

    assert scratch(formats.to_mscclpp(formats.program("all_gather", "ring", (4,)))) == [0] * 4
    reduced = formats.program("psum", "ring", (4,))
    assert scratch(formats.to_mscclpp(reduced)) == [6] * 4  # a chunk for each message


def test_a_plan_for_calls_that_a_program_is_not_meant_for_is_refused():
    chain = formats.from_msccl(CHAIN)
    assert json.loads(formats.to_mscclpp(chain))["inplace"] is True
    with pytest.raises(ValueError, match="in_place=False: the program is not meant for calls out"):
        formats.to_mscclpp(chain, in_place=False)


def test_fused_steps_become_operations():
    machine = Machine(formats.to_mscclpp(formats.from_msccl(CHAIN)), "psum", True)
    machine.run(seed=1)
    machine.check()


# -- Chakra --


def schema():
    """The messages of et_def.proto that traces consist of, built without that file."""
    pool = pytest.importorskip("google.protobuf.descriptor_pool")
    from google.protobuf import descriptor_pb2, message_factory

    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="c", syntax="proto3")
    types = {
        "Attribute": [("name", 1, kind.TYPE_STRING), ("int32_val", 7, kind.TYPE_INT32),
                      ("int64_val", 9, kind.TYPE_INT64), ("uint64_val", 13, kind.TYPE_UINT64),
                      ("bool_val", 27, kind.TYPE_BOOL), ("string_val", 29, kind.TYPE_STRING)],
        "Node": [("id", 1, kind.TYPE_UINT64), ("name", 2, kind.TYPE_STRING),
                 ("type", 3, kind.TYPE_INT32), ("data_deps", 5, kind.TYPE_UINT64),
                 ("attr", 10, kind.TYPE_MESSAGE)],
        "Metadata": [("version", 1, kind.TYPE_STRING), ("attr", 2, kind.TYPE_MESSAGE)],
    }  # fmt: skip
    for name, fields in types.items():
        message = file.message_type.add(name=name)
        if name == "Attribute":
            message.oneof_decl.add(name="value")
        for field, number, of in fields:
            label = kind.LABEL_REPEATED if field in ("attr", "data_deps") else kind.LABEL_OPTIONAL
            one = message.field.add(name=field, number=number, type=of, label=label)
            if name == "Attribute" and field != "name":
                one.oneof_index = 0
            if of == kind.TYPE_MESSAGE:
                one.type_name = ".c.Attribute"
    known = pool.DescriptorPool()
    known.Add(file)
    get = message_factory.GetMessageClass
    return [get(known.FindMessageTypeByName(f"c.{name}")) for name in ("Metadata", "Node")]


def decoded(trace):
    """The metadata and the nodes of a trace: messages, each after its length."""
    metadata, node = schema()
    parts, at = [], 0
    while at < len(trace):
        size = shift = 0
        while True:
            byte, at = trace[at], at + 1
            size, shift = size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        parts.append(trace[at : at + size])
        at += size
    return metadata.FromString(parts[0]), [node.FromString(part) for part in parts[1:]]


def values(node):
    """For each attribute, by name: the field that holds its value, and the value."""
    fields = ((one, one.WhichOneof("value")) for one in node.attr)
    return {one.name: (field, getattr(one, field)) for one, field in fields}


COMPUTE, SEND, RECEIVE = 4, 5, 6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_traces_end_and_send_what_the_price_says(collective, shape):
    for algorithm in runnable(collective, *shape):
        program = formats.program(collective, algorithm, shape)
        chunk = 1000
        traces = [decoded(t) for t in formats.to_chakra(program, chunk * program.chunks)]
        assert {metadata.version for metadata, _ in traces} == {"0.0.4"}
        nodes = {(rank, node.id): node for rank, (_, some) in enumerate(traces) for node in some}
        keys, sizes, sent = {}, {}, Counter()
        for (rank, number), node in nodes.items():
            if node.type in (SEND, RECEIVE):
                read = {name: value for name, (_, value) in values(node).items()}
                key = keys[rank, number] = tuple(
                    read[f"comm_{name}"] for name in ("src", "dst", "tag")
                )
                assert rank == key[node.type == RECEIVE]
                assert (node.type, key) not in sizes
                sizes[node.type, key] = read["comm_size"]
                sent[rank] += read["comm_size"] * (node.type == SEND)
        for _, key in sizes:
            assert sizes[SEND, key] == sizes[RECEIVE, key]
        wanted = price(collective, algorithm, shape).sent * chunk * program.chunks / program.size
        assert set(sent.values()) <= {wanted}, algorithm
        done, waiting, arrived = set(), dict(nodes), set()
        while waiting:
            ran = set()
            for at, node in waiting.items():
                waits = {(at[0], other) for other in node.data_deps}
                if waits <= done and (node.type != RECEIVE or keys[at] in arrived):
                    ran.add(at)
                    if node.type == SEND:
                        arrived.add(keys[at])
            assert ran, "all wait for ever"
            done |= ran
            waiting = {at: node for at, node in waiting.items() if at not in ran}


def test_a_trace_is_what_a_reader_expects():
    first, _ = formats.to_chakra(formats.program("psum", "ring", (2,)), 2**20, itemsize=2)
    metadata, nodes = decoded(first)
    assert [(one.name, one.string_val) for one in metadata.attr] == [("name", "psum_ring")]
    assert [node.id for node in nodes] == list(range(len(nodes)))
    assert [node.name for node in nodes] == [
        *("copy", "send to 1", "receive from 1", "add", "send to 1", "receive from 1"),
    ]
    send, add = nodes[1], nodes[3]
    assert values(send) == {
        "is_cpu_op": ("bool_val", False),
        "comm_size": ("int64_val", 2**19),
        "comm_src": ("int32_val", 0),
        "comm_dst": ("int32_val", 1),
        "comm_tag": ("int32_val", 0),
    }
    assert (add.type, list(add.data_deps)) == (COMPUTE, [2])
    assert values(add)["num_ops"] == ("int64_val", 2**18)
    assert values(add)["tensor_size"] == ("uint64_val", 2**19)


def test_a_trace_of_no_bytes_is_refused():
    program = formats.program("psum", "ring", (4,))
    for sizes in ({"nbytes": 3}, {"nbytes": 64, "itemsize": 0}):
        with pytest.raises(
            ValueError, match=r"to_chakra: nbytes=.*; give at least one for each of 4"
        ):
            formats.to_chakra(program, **sizes)


# -- NCCL's tuner --

CONF = """\
# colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
allreduce,0,65535,ring,ll,4,1,8,-1,-1
allreduce,65536,1048575,nvls,simple,-1,1,8,-1,-1

allgather,0,8191,ring,ll128,-1,-1,8,-1,-1  # in all, a kilobyte each
reducescatter,0,4611686018427387904,ring,simple,-1,2,-1,-1,-1
broadcast,0,1024,tree,ll,-1,-1,-1,-1,-1
allgather,0,4095,ring,ll,-1,-1,-1,-1,-1
allreduce,0,4095,ring,ll,-1,-1,-1,4,-1
allreduce,0,4095,ring,ll,-1,-1,-1,-1,1
"""


def test_a_tuner_file_becomes_a_table_and_what_does_not_is_told():
    table, left_out = formats.from_nccl_tuner(CONF, "mine.conf")
    assert table.rows == (
        TableRow("psum", "gpu", "ring", (8, 9), hosts=(1, 2), bytes=(None, 65536),
                 why="NCCL: ring, ll, 4 channels"),
        TableRow("psum", "gpu", "lax", (8, 9), hosts=(1, 2), bytes=(65536, 2**20),
                 why="NCCL: nvls, simple"),
        TableRow("all_gather", "gpu", "ring", (8, 9), bytes=(None, 1024), why="NCCL: ring, ll128"),
        TableRow("psum_scatter", "gpu", "ring", hosts=(2, 3), why="NCCL: ring, simple"),
    )  # fmt: skip
    assert [line.partition(": left out: ")[::2] for line in left_out] == [
        ("mine.conf, line 7", "a table has no rows of broadcast"),
        ("mine.conf, line 8", "bytes of an all-gather on any number of ranks: give nRanks"),
        ("mine.conf, line 9", "numPipeOps=4, which a table ignores"),
        ("mine.conf, line 10", "regBuff=1, which a table ignores"),
    ]
    picks = [
        table.pick("psum", "gpu", 8, size, "float32", "0.12") for size in (65535, 65536, 2**20)
    ]
    assert picks == ["ring", "lax", "lax"]


@pytest.mark.parametrize("collective", ["all_gather", "psum_scatter", "psum"])
def test_a_table_comes_back_from_its_tuner_file(collective):
    rows = (
        TableRow(collective, "gpu", "ring", (8, 9), hosts=(2, 3), bytes=(100, 4096)),
        TableRow(collective, "gpu", "ring", (4, 5), bytes=(4096, None)),
        TableRow(collective, "gpu", "ring"),
    )
    text, left_out = formats.to_nccl_tuner(Table(rows), "ll128")
    assert not left_out
    back, _ = formats.from_nccl_tuner(text)
    assert [(r.ranks, r.hosts, r.bytes) for r in back.rows] == [
        (r.ranks, r.hosts, r.bytes) for r in rows
    ]
    assert (
        text.splitlines()[1]
        == {
            "all_gather": "allgather,800,32760,ring,ll128,-1,2,8,-1,-1",
            "psum_scatter": "reducescatter,100,4095,ring,ll128,-1,2,8,-1,-1",
            "psum": "allreduce,100,4095,ring,ll128,-1,2,8,-1,-1",
        }[collective]
    )


def test_a_row_of_several_numbers_of_ranks_is_as_many_lines():
    row = TableRow("all_gather", "*", "ring", (2, 5), bytes=(0, 1024))
    text, _ = formats.to_nccl_tuner(Table((row,)))
    assert [line.split(",")[2] for line in text.splitlines()[1:]] == ["2046", "3069", "4092"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TableRow("psum", "gpu", "halving_doubling"), "has only the ring, not halving_doubling"),
        (TableRow("all_to_all", "gpu", "bruck"), "NCCL tunes no all_to_all"),
        (TableRow("psum", "gpu", "ring", dtypes=("bfloat16",)), "NCCL ignores dtypes"),
        (TableRow("psum", "gpu", "ring", jax=("0.12", None)), "NCCL ignores jax"),
        (TableRow("psum", "gpu", "ring", ranks_a_host=(8, 9)), "ignores ranks_a_host"),
        (TableRow("psum", "gpu", "ring", (8, None)), "a line has one number of ranks"),
        (TableRow("psum", "gpu", "ring", (8, 999)), "a line has one number of ranks"),
        (TableRow("all_gather", "gpu", "ring", bytes=(0, 9)), "bytes are those of all ranks: give"),
    ],
)
def test_a_row_that_nccl_has_no_line_for_is_left_out_in_words(row, message):
    later = TableRow(row.collective, "gpu", "ring" if row.collective != "all_to_all" else "bruck")
    text, left_out = formats.to_nccl_tuner(Table((row, later)))
    assert message in left_out[0]
    assert "an earlier row, which has no line, covers some of its calls" in left_out[1]
    assert len(text.splitlines()) == 1


def test_calls_of_the_built_in_do_not_fall_to_a_later_line():
    lax = TableRow("psum", "gpu", "lax", bytes=(0, 4096))
    other_row = TableRow("psum", "gpu", "ring", bytes=(4096, 8192))
    over = TableRow("psum", "gpu", "ring", bytes=(0, 8192))
    cpu = TableRow("psum", "cpu", "direct")
    text, left_out = formats.to_nccl_tuner(Table((cpu, lax, other_row, over)))
    assert text.splitlines()[1:] == ["allreduce,4096,8191,ring,simple,-1,-1,-1,-1,-1"]
    assert left_out == (
        "row 4 (psum, ring): left out: an earlier row, which has no line, covers some of its calls",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allreduce,0,1,ring,ll", "5 columns; there are colltype, minbytes"),
        ("allreduce,0,1,ring,ll,1,1,1,1,1,1", "11 columns"),
        ("scan,0,1,ring,ll,-1,-1,-1", "colltype: there is no 'scan'"),
        ("allreduce,0,1,bruck,ll,-1,-1,-1", "algorithm: there is no 'bruck'"),
        ("allreduce,0,1,ring,l,-1,-1,-1", "protocol: there is no 'l'"),
        ("allreduce,x,1,ring,ll,-1,-1,-1", "minbytes: 'x' is not a whole number from 0"),
        ("allreduce,0,1,ring,ll,-1,-2,-1", "nNodes: '-2' is not a whole number from -1"),
        ("allreduce,9,1,ring,ll,-1,-1,-1", "minbytes 9 is above maxbytes 1"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(line, message):
    with pytest.raises(ValueError, match=r"mine\.conf, line 2: ") as refused:
        formats.from_nccl_tuner(f"# none\n{line}\n", "mine.conf")
    assert message in str(refused.value)


def test_another_protocol_is_refused():
    with pytest.raises(ValueError, match="protocol: there is no 'lll'; choose from ll, ll128"):
        formats.to_nccl_tuner(Table(), "lll")
