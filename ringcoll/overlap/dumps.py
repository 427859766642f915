"""Read a text from a file, or from the folder that `--xla_dump_to` names."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ringcoll.overlap.hlo import HloError, as_hlo_error, parse
from ringcoll.overlap.timeline import Timeline
from ringcoll.placement.network import Network


def read_dump(path: Path) -> tuple[str, tuple[str, ...]]:
    """The text of a file or, of the programs in a folder, of that with the most FLOPs; and notes.

    Raises:
        HloError: the folder has no scheduled program.
        OSError: there is no such file.
    """
    if not path.is_dir():
        return path.read_text("utf-8"), ()
    flops = {text: _flops(text) for text in _latest(path)}
    if not flops:
        raise HloError(
            f"{path}: no .txt file in it begins with 'HloModule' and is_scheduled=true; pass the "
            "folder that --xla_dump_to names"
        )
    taken, *others = sorted(flops, key=lambda text: (-flops[text], -text.stat().st_size))
    work = {text: "unread" if flops[text] < 0 else f"{flops[text]:.3g} FLOP" for text in others}
    beside = ", ".join(f"{text.name} ({words})" for text, words in work.items())
    most = f", which has the most FLOPs; beside it {beside}" * bool(others)
    return taken.read_text("utf-8"), (f"read from {taken.name}{most}",)


def _latest(folder: Path) -> Iterator[Path]:
    """The latest text of each scheduled program; a compiler writes several, at last with cycles."""
    stages = defaultdict(list)  # by what their names begin with, and the name of the program
    for file in sorted(folder.glob("*.txt")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            head = next(lines, "").split(",")
        if head[0].startswith("HloModule ") and " is_scheduled=true" in head:
            title = head[0].split()[1]
            stages[file.name.partition(f".{title}.")[0], title].append(file)
    for texts in stages.values():
        yield max(texts, key=lambda t: (t.read_bytes().count(b"_cycles"), t.stat().st_size))


def _flops(text: Path) -> float:
    """The FLOPs of all matmuls that a program runs; -1 if it cannot be read."""
    with suppress(HloError), as_hlo_error():
        module = parse(text.read_text("utf-8"))
        return Timeline(module, Network.ring(module.ranks), None, {}).run().whole.flops
    return -1.0
