"""Write everything that a run measured as JSON, in seconds and bytes."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from benchmarks.measuring.model import Fitted
from benchmarks.measuring.row import Measurement
from ringcoll.io.files import write


def write_json(args: argparse.Namespace, found: Any) -> None:
    """Write the results to the file of --json, if it is given."""
    if args.json:
        write(args.json, json.dumps(found, indent=1) + "\n")


def everything(
    header: Mapping[str, Any],
    checks: Sequence[Measurement],
    rows: Sequence[Measurement],
    fitted: Mapping[str, Fitted],
) -> dict[str, Any]:
    """Everything that was measured: seconds, bytes, bytes per second."""
    models = {
        name: {**asdict(model), "median_error": error, "rows": count}
        for name, (model, error, count) in fitted.items()
    }
    return {
        "measured_on": dict(header),
        "checks": [_fields(row) for row in checks],
        "rows": [_fields(row) for row in rows],
        "models": models,
    }


def _plain(value: Any) -> Any:
    """A value for JSON; a named tuple becomes an object."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return value


def _fields(row: Measurement) -> dict[str, Any]:
    figures = {field.name: _plain(getattr(row, field.name)) for field in fields(row)}
    if row.seconds:
        median = row.seconds.median
        figures |= {"algbw": row.algbw(median), "busbw": row.busbw(median)}
    return figures
