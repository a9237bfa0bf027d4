"""objdump on one program: objdump_peer.py PROGRAM prints JSON.

A linear sweep names no functions; what its calls lead to, and the entry, is the nearest to them.
"""

import json
import re
import resource
import subprocess
import sys

CALL = re.compile(rb"^ *[0-9a-f]+:\tcall +(?:0x)?([0-9a-f]+)\b", re.MULTILINE)
ENTRY = re.compile(rb"start address:? 0x([0-9a-f]+)")


def output(*words: str) -> bytes:
    command = ["objdump", *words, sys.argv[1]]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


if __name__ == "__main__":
    printed = output("-d", "-w", "--no-show-raw-insn")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    starts = {int(one, 16) for one in CALL.findall(printed) + ENTRY.findall(output("-f"))}
    answer = {
        "seconds": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss * 1024,
        "starts": sorted(starts),
    }
    print(json.dumps(answer))
