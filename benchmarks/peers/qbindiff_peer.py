"""Match two `.BinExport` files by qbindiff with its default features.

    python qbindiff_peer.py PARENT A B SEED

PARENT is the number of the process that starts it: when that one ends, this one does too.
Prints JSON: pairs of addresses, CPU seconds (imports left out) and the largest resident bytes.
"""

import ctypes
import json
import os
import random
import resource
import signal
import sys
import time
import warnings

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Be killed when the process that started this one ends, in whatever way."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the benchmark has ended")


def main(parent: str, a: str, b: str, seed: str) -> None:
    end_with(int(parent))
    warnings.simplefilter("ignore")
    import numpy as np
    from qbindiff import Program, QBinDiff
    from qbindiff.features import DEFAULT_FEATURES
    from qbindiff.loader.types import LoaderType

    # Its feature of names numbers those that it cannot know at random.
    random.seed(int(seed))
    np.random.seed(int(seed))
    started = time.process_time()
    diff = QBinDiff(*(Program(path, loader=LoaderType.binexport) for path in (a, b)))
    for feature in DEFAULT_FEATURES:
        diff.register_feature_extractor(feature, 1.0)
    diff.process()
    pairs = [[one.primary.addr, one.secondary.addr] for one in diff.compute_matching()]
    print(
        json.dumps(
            {
                "pairs": pairs,
                "cpu_seconds": time.process_time() - started,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
