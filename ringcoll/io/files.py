"""Write files whole or not at all. A file that cannot be written is refused before the work."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Path = str | os.PathLike[str]

#: Names of open streams. `write` does not replace them: readers would keep the old file.
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")


def write(path: Path, content: str | bytes) -> None:
    """Replace the content of a file: a reader finds all of the old content or all of the new.

    The new content goes into a temporary file in the same folder, which then takes the name. So
    the old file stays if the disk is full or the program ends in the middle. A link stays a link,
    and a file keeps its mode. A pipe, a device or /dev/stdout is written to directly.

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
    with _new_beside(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        os.replace(temporary, os.path.realpath(path))


def check(path: Path) -> None:
    """Refuse a file that `write` could not write, before the work for it is done.

    Raises:
        OSError: its folder is missing or cannot be written to, it is a folder, or it is protected.
    """
    if is_stream(path):
        _check_access(path)
        return
    with _new_beside(path):
        pass


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be made, or that cannot hold a file.

    Raises:
        OSError: it, or the nearest folder above it that exists, is a file or cannot be written to.
    """
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), there)
    check(os.path.join(there, secrets.token_hex(4)))


@contextmanager
def _new_beside(path: Path) -> Iterator[str]:
    """Make an empty file in the folder of `path`, with the same mode, and remove it at the end."""
    folder, name = os.path.split(os.path.realpath(path))
    mode = None
    with suppress(FileNotFoundError):  # a new file has no mode to keep
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        _check_access(path)
    # Cut the name: the longest allowed name plus this ending would be too long.
    temporary = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:  # name the file that the caller asked for
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    try:
        if mode is not None:
            os.chmod(temporary, mode)
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a device or the like, or begins as one of `_STREAMS`."""
    if os.path.abspath(path).startswith(_STREAMS):
        return True
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _check_access(path: Path) -> None:
    """Refuse a protected file: replacing it by a new file would evade the protection."""
    if not os.access(path, os.W_OK):
        number = errno.EACCES if os.path.exists(path) else errno.ENOENT
        raise OSError(number, os.strerror(number), os.fspath(path))
