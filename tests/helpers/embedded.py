"""Vectors of a store's records, without an overlay that stays."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.inference.embed import embed_store
from tokmill.store.store import Store


def vectors_of(run: Path, store: Path, **keys: Any) -> np.ndarray:
    """Return (records, width) float32; `keys` as of `embed`."""
    made = embed_store(run, store, name="vectors-of", fresh=True, **keys)
    found = np.array(Store(store, [made.overlay]).column("embedding"))
    shutil.rmtree(Path(store) / "overlays" / made.overlay)
    if not any((Path(store) / "overlays").iterdir()):
        (Path(store) / "overlays").rmdir()
    return found
