"""The digest at the end of plan, receipt and manifest, which shows any changed byte.

The last key of such a file is `digest`: the sha256 of all bytes before the comma in front of that
key.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

TAIL = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n\}\n\Z')
LENGTH = len(',\n "digest": ""\n}\n') + 64
END = b"\n}\n"


def sealed(value: msgspec.Struct) -> bytes:
    """Return a struct as indented JSON with its digest as the last key."""
    data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    body = data.removesuffix(b"\n}")
    digest = hashlib.sha256(body).hexdigest()
    return body + f',\n "digest": "{digest}"'.encode() + END


def check_seal(data: bytes) -> None:
    """Raise `ValueError` if the content of a file does not have the stated digest."""
    found = TAIL.search(data, max(0, len(data) - LENGTH))
    if found is None:
        raise ValueError("it does not end with its digest")
    if hashlib.sha256(data[: found.start()]).hexdigest().encode() != found[1]:
        raise ValueError("its content is not what its digest says")
