"""Trackers: what was logged can be read back, also after a kill and a resume."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tokmill import plugins
from tokmill.base.errors import MissingExtraError
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.trackers import JsonLines, open_trackers, read_metrics
from toy import losses, recipe


def test_lines_are_written_and_forgotten(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path)
    lines.log(1, {"loss": 2.5})
    lines.log(2, {"loss": float("nan")})
    with open(tmp_path / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 3, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None},
    ]
    lines.forget_after(1)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5}]


def test_wandb_offline(store: Path, tmp_path: Path) -> None:
    """W&B starts a process of its own and keeps signals and streams: so it runs in a child."""
    pytest.importorskip("wandb", reason="needs the extra track")
    plain = recipe(store, 2, optim={"schedule": "constant"}, run={"track": ["wandb"]})
    code = (
        "import json, sys, tokmill\n"
        "recipe, out = json.loads(sys.argv[1]), sys.argv[2]\n"
        "tokmill.train(recipe, out, quiet=True)\n"
        "tokmill.train(None, out, options={'run': {'steps': 4}}, quiet=True)\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(plain), str(tmp_path / "run")],
        env={**environment, "WANDB_PROJECT": "mill"},
        check=True,
        timeout=120,
    )
    name = (tmp_path / "run/wandb-id").read_text()
    logs = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in logs] == 2 * [f"run-{name}.wandb"]
    first, second = map(logged, logs)
    assert first == pytest.approx({s: losses(tmp_path / "run")[s] for s in (1, 2)})
    assert second == pytest.approx({s: losses(tmp_path / "run")[s] for s in (3, 4)})


def logged(path: Path) -> dict[int, float]:
    """Return step → loss of W&B's own file: a log of LevelDB's form after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts, found = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the whole of a record, or its last part
            record, parts = Record.FromString(parts), b""
            assert record.run.project in ("", "mill")
            for item in record.history.item:
                if "loss" in (item.key, *item.nested_key):
                    found[record.history.step.num] = json.loads(item.value_json)
    return found


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plugins.TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        for loaded in [m for m in sys.modules if m.startswith(name + ".")]:
            monkeypatch.delitem(sys.modules, loaded)
        config = from_dict({"run": {"track": [name]}})
        with (
            pytest.raises(MissingExtraError, match=name) as caught,
            open_trackers(tmp_path, config, 0, rank=0),
        ):
            pass
        assert "tokmill[track]" in caught.value.hint
