"""Temporary folders that are removed however this process ends, even if it is killed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from types import TracebackType
from typing import Self

REMOVE = 'read -r line; rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }'
"""Waits until its stdin ends. What still writes at that moment ends with the same process."""


class Scratch:
    """A temporary folder, `path`, with a shell beside it that removes it when this process ends.

    Commands end by `os._exit` and workers are killed, so nothing in this process can be relied on.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="tokmill-")
        try:
            # A session of its own: the terminal's Ctrl-C does not reach it.
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", REMOVE, "tokmill-scratch", self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder."""
        assert self._remover.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._remover.stdin.close()
        self._remover.wait()
