"""What a run writes: everything measured as JSON, the rows as CSV. Seconds and bytes."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.model import Fitted
from benchmarks.row import Row


def write_json(
    path: str,
    header: Mapping[str, Any],
    checks: Sequence[Row],
    rows: Sequence[Row],
    fitted: Mapping[str, Fitted],
) -> None:
    """Everything measured: seconds, bytes, bytes per second."""
    models = {
        name: {**asdict(model), "median_error": error, "rows": count}
        for name, (model, error, count) in fitted.items()
    }
    all_of_it = {
        "measured_on": dict(header),
        "checks": [_fields(row) for row in checks],
        "rows": [_fields(row) for row in rows],
        "models": models,
    }
    Path(path).write_text(json.dumps(all_of_it, indent=1) + "\n", encoding="utf-8")


def write_csv(path: str, rows: Sequence[Row]) -> None:
    """The rows, quartiles in columns of their own."""
    flat = []
    for row in rows:
        line: dict[str, Any] = {}
        for name, value in _fields(row).items():
            if isinstance(value, dict):
                line |= {f"{name}_{part}": item for part, item in value.items()}
            else:
                line[name] = value
        flat.append(line)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(flat[0]) if flat else [])
        writer.writeheader()
        writer.writerows(flat)


def _plain(value: Any) -> Any:
    """Named tuples as objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return value


def _fields(row: Row) -> dict[str, Any]:
    made = {field.name: _plain(getattr(row, field.name)) for field in fields(row)}
    if row.seconds:
        median = row.seconds.median
        made |= {"algbw": row.algbw(median), "busbw": row.busbw(median)}
    return made
