"""Find the program in the folder that `--xla_dump_to` names, and the chip it was compiled for."""

import re
from collections import defaultdict
from pathlib import Path

from ringcoll.overlap.hlo import HloError, in_words, parse
from ringcoll.overlap.timeline import Timeline
from ringcoll.placement.network import Network

#: The most programs of a folder that are listed.
LISTED = 12
#: The beginning of the names of all files of a program.
_NUMBER = r".*?module_\d+\."
#: How files beside the text name the `device_kind`: of a TPU, of a GPU.
_KIND = r'platform_version: "TFRT (TPU[^"\\]*)|device_description_str: "([^"]*)'


def find_text(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The scheduled program with the most FLOPs in a folder, and a note on those beside it.

    Raises:
        HloError: there is none.
    """
    if not path.is_dir():
        return path, ()
    stages = defaultdict(list)  # a compiler writes a program several times
    for file in sorted(path.glob("*.txt")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            head = re.match(r"HloModule ([^\s,]*).*is_scheduled=true", next(lines, ""))
        if head:
            number = re.match(_NUMBER, file.name)
            stages[number[0] if number else file.name, head[1]].append(file)
    if not stages:
        raise HloError(
            f"{path} has no scheduled program: no .txt file in it begins with 'HloModule' and has "
            "is_scheduled=true there; pass the folder that --xla_dump_to names"
        )
    work = {text: _flops(text) for text in (max(files, key=_stage) for files in stages.values())}
    taken, *others = sorted(work, key=lambda text: (work[text], text.stat().st_size), reverse=True)
    words = [
        f"{text.name} ({'cannot be read' if work[text] < 0 else f'{work[text]:.3g} FLOP'})"
        for text in others[:LISTED]
    ]
    if len(others) > LISTED:
        words.append(f"{len(others) - LISTED} with less")
    beside = f", the program with the most FLOPs; beside it: {', '.join(words)}" if words else ""
    return taken, (f"read from {taken.name}{beside}",)


def _stage(text: Path) -> tuple[int, int]:
    """How late in a compilation a text was written: code adds cycles, each stage adds something."""
    return text.read_bytes().count(b"estimated_cycles"), text.stat().st_size


def _flops(text: Path) -> float:
    """The FLOPs of all matmuls that a program runs; -1 if it cannot be read."""
    try:
        with in_words():
            module = parse(text.read_text(encoding="utf-8"))
            return Timeline(module, Network.ring(module.ranks), None, {}).run().tally["flops",]
    except HloError:
        return -1.0


def kind_of(text: Path) -> str | None:
    """The `device_kind` for which a text was compiled, if a file of the dump names it."""
    number = re.match(_NUMBER, text.name)
    for name in ("*/topology.textproto", "*gpu_target_config.pbtxt") if number else ():
        for file in text.parent.glob(f"{number[0]}{name}"):
            if kind := re.search(_KIND, file.read_text(encoding="utf-8")):
                return kind[1] or kind[2]
    return None
