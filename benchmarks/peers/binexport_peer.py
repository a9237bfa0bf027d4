"""Write a `.BinExport` file: binexport_peer.py OUT reads the message as JSON."""

import sys
from pathlib import Path

from binexport.binexport2_pb2 import BinExport2
from google.protobuf import json_format

if __name__ == "__main__":
    message = json_format.Parse(sys.stdin.buffer.read(), BinExport2())
    Path(sys.argv[1]).write_bytes(message.SerializeToString())
