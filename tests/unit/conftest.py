"""What unit tests share."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_fsync() -> Iterator[None]:
    """Unit tests write thousands of tiny files, and no power fails here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
