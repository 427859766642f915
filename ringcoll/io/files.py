"""Write files whole or not at all. A file that cannot be written is refused before the work."""

import os
import secrets
import shutil
from contextlib import suppress

Path = str | os.PathLike[str]


def write(path: Path, content: str | bytes) -> None:
    """Replace the content of a file: a reader finds all of the old content or all of the new.

    The new content goes into a new file in the same folder, which then takes the name. So the old
    file stays if the disk is full or the program ends in the middle. A link stays a link. A pipe or
    a device, such as /dev/stdout, is written to directly.

    Args:
        path: the file; its folder must exist.
        content: text is written as UTF-8.

    Raises:
        OSError: as `check`; or the disk is full.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if is_stream(path):
        with open(path, "wb") as stream:
            stream.write(data)
        return
    target = os.path.realpath(path)
    # Not its name with an ending, which may be too long.
    beside = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
        if os.path.exists(target):  # a private file stays private
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except OSError as error:  # name the file that the caller asked for
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        with suppress(OSError):  # it is gone if it has taken the name
            os.remove(beside)


def check(path: Path) -> None:
    """Refuse a file that `write` could not write, before the work for it is done.

    Raises:
        OSError: its folder is missing or cannot be written to, it is a folder, or it is protected.
    """
    if is_stream(path):  # opening a pipe would wait for its reader
        return
    target = os.path.realpath(path)
    is_new = not os.path.exists(target)
    with open(target, "ab"):
        pass
    if is_new:
        os.remove(target)


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a device or the like; or /dev/stdout, which may be a file."""
    if os.path.abspath(path).startswith(("/dev/std", "/dev/fd/")):
        return True
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
