"""The skips that are allowed; continuous integration fails on any other.

`pytest --only-listed-skips` (in `.ci/run`) compares the reason of each skipped test with this list.
A new line needs something that a fresh machine cannot have: a GPU, or a user that is not root.
"""

import re
from collections.abc import Iterable

LISTED = (
    # No GPU: kernels in CUDA.
    r"there is no CUDA device",
    r"the kernel needs CUDA and an Ampere GPU or a newer one",
    # Debian's security archive has this version for one release alone.
    r"mlir-opt-22 of Debian's mlir-22-tools is not there",
    # The tests run as root, who may write anywhere.
    r"root may write anywhere",
    # The tests do not run as root, or in a container that may not make networks.
    r"needs root and iproute2",
    r"network namespaces cannot be made: .*",
)


def unlisted(reasons: Iterable[str]) -> list[str]:
    """Return the reasons that are not in the list, each once."""
    listed = re.compile("|".join(f"(?:{pattern})" for pattern in LISTED))
    return sorted({reason for reason in reasons if not listed.fullmatch(reason)})


def reason_of(longrepr: object) -> str:
    """Return the reason of a skipped report: `longrepr` is (file, line, "Skipped: reason")."""
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")
