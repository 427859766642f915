"""Text that every machine has: the sources of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import numpy as np

BYTES = 256
#: With some tokens that never occur, so that 2, 3, 4, 6, 8, 11 or 12 ranks divide it.
VOCABULARY = BYTES + 8


def read() -> tuple[np.ndarray, np.ndarray]:
    """The text to learn from, and the held-out text: every tenth module by name."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = b"".join(path.read_bytes() for path in modules[::10])
    seen = b"".join(path.read_bytes() for i, path in enumerate(modules) if i % 10)
    return np.frombuffer(seen, np.uint8), np.frombuffer(held_out, np.uint8)


def batch(text: np.ndarray, rows: int, length: int, seed: int, step: int) -> np.ndarray:
    """Random stretches of the text: `[rows, length]`.

    They depend on the seed and the step alone, so a resumed run continues as before.
    """
    starts = np.random.default_rng((seed, step)).integers(len(text) - length, size=rows)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """Tokens as text."""
    return bytes(tokens.tolist()).decode("utf-8", "replace")
