"""The digest that plan, receipt and manifest end with: a changed byte is seen when one is read.

The last key of such a file is `digest`, the sha256 of all bytes before the comma in front of it.
Files of older stores have none, and are read as before.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from tokmill.headers import loads_json

TAIL = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n\}\n\Z')
LENGTH = len(',\n "digest": ""\n}\n') + 64
END = b"\n}\n"


def sealed(value: msgspec.Struct) -> bytes:
    """Return a struct as indented JSON with its digest as the last key."""
    data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    body = data.removesuffix(b"\n}")
    digest = hashlib.sha256(body).hexdigest()
    return body + f',\n "digest": "{digest}"'.encode() + END


def unsealed(data: bytes) -> bytes:
    """Return a file without its digest, as older programs wrote it."""
    found = TAIL.search(data, max(0, len(data) - LENGTH))
    return data[: found.start()] + END if found else data


def check_seal(data: bytes, kind: type[msgspec.Struct]) -> None:
    """Raise `ValueError` where a file is not what its digest says.

    Of one without a digest the keys are checked: a damaged `digest` is not to be taken for none.
    """
    found = TAIL.search(data, max(0, len(data) - LENGTH))
    if found:
        if hashlib.sha256(data[: found.start()]).hexdigest().encode() != found[1]:
            raise ValueError("its content is not what its digest says")
        return
    value = loads_json(data)
    known = set(kind.__struct_encode_fields__)
    if isinstance(value, dict) and (strange := sorted(value.keys() - known)):
        raise ValueError(f"the key {strange[0]!r} is not known")
