"""SMDA on one program: smda_peer.py PROGRAM SECONDS prints JSON; imports are not timed."""

import json
import logging
import sys
import time
from pathlib import Path

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
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    functions = list(report.getFunctions())
    answer = {
        "seconds": seconds,
        "peak": peak,
        "starts": [function.offset for function in functions],
        "failed": "" if report.status == "ok" else f"status {report.status}",
    }
    print(json.dumps(answer))
