"""Match two `.BinExport` files by qbindiff, with its default features or without some.

    python qbindiff_peer.py A B SEED [FEATURE THAT IS LEFT OUT …]

Prints JSON: pairs of addresses, seconds (imports left out) and the largest resident bytes.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import warnings


def main(a: str, b: str, seed: str, *without: str) -> None:
    warnings.simplefilter("ignore")
    import numpy as np
    from qbindiff import Program, QBinDiff
    from qbindiff.features import DEFAULT_FEATURES
    from qbindiff.loader.types import LoaderType

    # Its feature of names numbers those that it cannot know at random.
    random.seed(int(seed))
    np.random.seed(int(seed))
    started = time.process_time(), time.perf_counter()
    diff = QBinDiff(*(Program(path, loader=LoaderType.binexport) for path in (a, b)))
    for feature in DEFAULT_FEATURES:
        if feature.key not in without:
            diff.register_feature_extractor(feature, 1.0)
    diff.process()
    pairs = [[one.primary.addr, one.secondary.addr] for one in diff.compute_matching()]
    print(
        json.dumps(
            {
                "pairs": pairs,
                "cpu_seconds": time.process_time() - started[0],
                "seconds": time.perf_counter() - started[1],
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
