"""Published measurements of collectives, with their sources.

`points.csv` holds 1,247 of them. Its columns are source, url_or_repo_path, hardware, chips,
topology, collective, bytes, dtype, time_us, busbw_GBps and notes. `bytes` are counted as nccl-tests
counts them: the operand or the result of a rank, whichever is larger.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from ringcoll.algorithms import in_lax
from ringcoll.costs import machines

FILE = Path(__file__).with_name("points.csv")


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """One measurement: its source, its machine, its call, and the seconds that it took."""

    source: str
    device: str  # the name of a machine of `ringcoll.costs.machines`
    collective: str  # its name in lax
    ranks: int
    hosts: int
    topology: str
    bytes: float
    seconds: float
    notes: str

    @property
    def why_left_out(self) -> str:
        """Why the model cannot price this measurement; "" if it can."""
        if "NVLS_ENABLE=0" in self.notes or "NVLS off" in self.notes:
            return "NVLS was switched off"
        if re.search(r"one way|pairs", self.notes):
            return "a permute whose pattern is no ring"
        return ""


def read(path: Path = FILE) -> tuple[list[PublishedPoint], int]:
    """The points of a file, and the number of rows without a time."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    timed = [row for row in rows if row["time_us"]]
    return [_point(row) for row in timed], len(rows) - len(timed)


def merge(published: list[PublishedPoint], inside: list[PublishedPoint]) -> list[PublishedPoint]:
    """The points of the file and those of the table in the wheel, each only once.

    The file contains a part of that table, which is used if the wheel is not installed.
    """
    if not inside:
        return published
    return [one for one in published if not one.source.startswith("XLA:GPU")] + inside


def _point(row: dict[str, str]) -> PublishedPoint:
    hosts = re.search(r"(\d+) (?:nodes|hosts)", row["topology"])
    device = "gloo_infiniband" if "verbs" in row["topology"] else row["hardware"]
    return PublishedPoint(
        row["source"],
        machines.find(device).name,
        in_lax(row["collective"]),
        int(row["chips"]),
        int(hosts[1]) if hosts else 1,
        row["topology"],
        float(row["bytes"]),
        float(row["time_us"]) * 1e-6,
        row["notes"],
    )
