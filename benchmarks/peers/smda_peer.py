"""SMDA on one program: smda_peer.py PROGRAM prints JSON; imports are not timed."""

from __future__ import annotations

import json
import logging
import sys
import time

from smda.Disassembler import Disassembler
from smda.SmdaConfig import SmdaConfig

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    config = SmdaConfig()
    # Off by default; the others read unwind tables too.
    config.USE_ELF_EH_FRAME_CANDIDATES = True
    config.TIMEOUT = int(sys.argv[2])
    started = time.process_time()
    report = Disassembler(config).disassembleFile(sys.argv[1])
    seconds = time.process_time() - started
    functions = list(report.getFunctions())
    blocks = [block.offset for function in functions for block in function.getBlocks()]
    answer = {
        "seconds": seconds,
        "starts": [function.offset for function in functions],
        "blocks": blocks,
        "status": report.status,
    }
    print(json.dumps(answer))
