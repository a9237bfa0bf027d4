"""The commands of docs/remote.md, in a bucket of a server on loopback."""

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from test_readme import check_commands, steps

from object_servers import moto


@pytest.mark.long
def test_commands_run_and_print_what_is_shown(
    repository: Path, corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto(tmp_path) as (port, bucket):
        for name, value in {
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "password",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "TOKMILL_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        where = f"http://127.0.0.1:{port}/{bucket}/raw/a.txt"
        kind = {"Content-Type": "text/plain"}
        put = urllib.request.Request(where, corpus.txt.read_bytes(), kind, method="PUT")
        urllib.request.urlopen(put, timeout=20).close()
        check_commands(steps((repository / "docs/remote.md").read_text("utf-8")), tmp_path)
