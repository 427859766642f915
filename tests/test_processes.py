"""Benchmarks over several processes of this machine, each with devices of its own."""

import json
import os
import socket
import subprocess
import sys

import pytest
from support import HERE

from benchmarks.__main__ import main

SHORT = "-b 1K -e 1K -n 3 --budget 20 -d bfloat16"


def together(devices, arguments):
    """The same command in a process for each number of devices, at once: what each has said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--coordinator 127.0.0.1:{port} --num-processes {len(devices)}"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks", *f"{arguments} {flags} --process-id {i}".split()],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(own)},
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, own in enumerate(devices)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.parametrize("devices", [(1, 1), (2, 2, 2)])
def test_collectives_over_processes_are_right(devices, tmp_path):
    path = tmp_path / "measured.json"
    collectives = "all_gather,psum_scatter,psum,all_to_all"
    ran = together(devices, f"{SHORT} --collective {collectives} --json {path}")
    assert [status for status, _ in ran] == [0] * len(devices), ran
    assert "#wrong 0" in ran[0][1]
    assert not any("Measured" in text for _, text in ran[1:])  # the first speaks for all
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [*found["checks"], *found["rows"]]
    assert {row["ranks"] for row in rows} == {sum(devices)}
    assert {row["collective"] for row in rows} == set(collectives.split(","))
    assert all(row["wrong"] == 0 for row in rows)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--num-processes 2", "--coordinator, --process-id: give all of --coordinator, --num-"),
        (
            "--coordinator localhost:1 --num-processes 2 --process-id 2",
            "--process-id 2: the processes are 0 to 1",
        ),
    ],
)
def test_processes_that_cannot_be_are_refused(flags, complaint):
    with pytest.raises(SystemExit, match=complaint):
        main(flags.split())
