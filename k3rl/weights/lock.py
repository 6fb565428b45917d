"""One writer for a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from k3rl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def lock_folder(folder: Path, timeout_s: float = 0.0) -> Iterator[None]:
    """Make ``folder`` and hold it for this process; ConfigError that names the holder, if it does not let go in time.

    The operating system lets go of it when the process ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with open(folder / ".lock", "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    raise ConfigError(f"folder {folder} is in use by {holder}") from error
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
