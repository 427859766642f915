"""Ring collectives by hand: thirteen lessons, each with one idea more than the last.

    python -m examples.lessons.01_ring_by_hand

Each is a script, a notebook and a page of the site. They run on any machine in seconds and need
ringcoll alone: eight virtual CPU devices are the ranks. A lesson checks every statement (a line
with a tick), and fails if one is wrong. It ends with two exercises; as a script it runs their
solutions.

| lesson | the idea |
|---|---|
| `01_ring_by_hand` | pass on the shard received last: an all-gather from one `ppermute` |
| `02_schedule` | an algorithm is a list of moves; other algorithms are other lists |
| `03_backward` | the list run backward is a reduce-scatter, and the gradient |
| `04_all_reduce` | few bytes (ring) or few rounds (recursive doubling): what each costs |
| `05_collective_matmul` | multiply one shard while the next is on the wire |
| `06_reading_the_schedule` | the compiled program: which transfers are hidden, which exposed |
| `07_tensor_parallel` | a layer whose weights are cut by columns and rows, and its tokens by rank |
| `08_fsdp` | weights that are whole only while they are used |
| `09_your_own` | ten lines of your own: run, proved, priced, drawn and timed |
| `10_attention_as_a_ring` | keys travel around the ring; their gradients follow them home |
| `11_experts` | tokens travel around the ring; the sums of their results follow |
| `12_narrow_wire` | a byte for each float: encoded once by a gather, at every hop by a sum |
| `13_same_bits` | one tree of additions: the same bits on any number of ranks |
"""
