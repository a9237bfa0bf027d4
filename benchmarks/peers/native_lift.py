"""tokmill's lifter on one program: native_lift.py PROGRAM prints JSON; imports are not timed."""

import json
import sys
import time
from pathlib import Path

from tokmill import plugins
from tokmill.x86.lift.cfg import lift

if __name__ == "__main__":
    plugins.require("iced_x86")
    if Path(sys.argv[1]).read_bytes()[:2] == b"MZ":
        plugins.require("lief")
    started = time.process_time()
    graph = lift(sys.argv[1])
    seconds = time.process_time() - started
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    starts = graph.function_address.tolist()
    print(json.dumps({"seconds": seconds, "peak": peak, "starts": starts}))
