"""Real runs of tiny models on the CPU, recorded so that the verdict can be judged by them.

`python -m tests.support.recorded_runs` makes all of them anew, which takes some minutes, and
`python -m tests.support.recorded_runs tuned NAME ...` those of one set, or some of it. A record
keeps the events that the verdict reads, with numbers of five digits, in `tests/fixtures/verdict`.
"""

from __future__ import annotations

import json
import lzma
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.changes import Change
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import Record, StepFinished
from engine.runs.record.following import replay
from engine.training.loop import measurements
from engine.training.loop.run import start_run
from tests.support.runs_to_record import SETS, SETTINGS, Recorded

FOLDER = PROGRAM_ROOT / "tests" / "fixtures" / "verdict"
KINDS = {
    *("run_started", "state_changed", "settings_changed", "run_ended", "step_skipped"),
    *("step_finished", "memory_sampled", "eval_finished", "exact_match_measured"),
    *("forecast_checked", "checkpoint_written"),
}
"""These kinds of events are kept."""
LEFT_OUT = ("tokens_per_second", "tflops", "samples", "units", "device_name", "elapsed")
"""These fields are not kept."""
# ---------------------------------------------------------------------- rows


def _sums(draw: random.Random) -> dict[str, str]:
    first, second = draw.randrange(100), draw.randrange(100)
    return {"prompt": f"{first} + {second} =", "completion": str(first + second)}


def _products(draw: random.Random) -> dict[str, str]:
    first, second = draw.randrange(1000), draw.randrange(1000)
    return {"prompt": f"{first} x {second} =", "completion": str(first * second)}


def _word(draw: random.Random) -> str:
    return "".join(draw.choice("abcdefghij") for _ in range(draw.randrange(4, 9)))


def _reversed(draw: random.Random) -> dict[str, str]:
    word = _word(draw)
    return {"prompt": f"Reverse {word}", "completion": word[::-1]}


def _copied(draw: random.Random) -> dict[str, str]:
    word = _word(draw)
    return {"prompt": f"Repeat {word}", "completion": word}


def _unrelated(draw: random.Random) -> dict[str, str]:
    return {"prompt": f"Code of {_word(draw)}", "completion": _word(draw)}


def _mixed(draw: random.Random) -> dict[str, str]:
    return draw.choice((_sums, _copied, _unrelated))(draw)


def _sorted_letters(draw: random.Random) -> dict[str, str]:
    word = _word(draw)
    return {"prompt": f"Sort {word}", "completion": "".join(sorted(word))}


def _counted(draw: random.Random) -> dict[str, str]:
    word = _word(draw)
    return {"prompt": f"Letters of {word}", "completion": f"{len(word)} letters, {len(set(word))}"}


ROWS = {
    "sums": _sums,
    "products": _products,
    "reversed": _reversed,
    "copied": _copied,
    "unrelated": _unrelated,
    "mixed": _mixed,
    "sorted": _sorted_letters,
    "counted": _counted,
}


# ---------------------------------------------------------------------- runs


ASSETS = {
    "starter": "starter.jsonl",
    "preferences": "preferences.jsonl",
    "polite": "preferences.jsonl",
}
"""These rows are those of the starters."""
FEW = 100
"""Of the starter's rows, all are taken unless fewer than this many are asked for."""


def _chosen_alone(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a pair of answers as a row with one answer, the chosen one."""
    return {"prompt": row["prompt"], "completion": row["chosen"]}


def _model(place: Path, made: Recorded) -> Path:
    """Writes a model of the starter's kind and tokenizer, of another size."""
    path = place / "model"
    source = PROGRAM_ROOT / "assets" / "starter-model"
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config.update(
        hidden_size=made.width,
        intermediate_size=2 * made.width,
        num_hidden_layers=made.blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["full_attention"] * made.blocks,
    )
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def config_of(made: Recorded, place: Path) -> TrainConfig:
    """Writes the model and the rows of a run to `place`, and returns its settings."""
    assets, source = PROGRAM_ROOT / "assets", place / "rows.jsonl"
    model, init = assets / (made.model or "starter-model"), "pretrained"
    if made.rows in ASSETS:
        rows = (assets / ASSETS[made.rows]).read_text(encoding="utf-8").splitlines()
        if made.rows == "starter" and made.count < FEW:
            rows = rows[made.first : made.first + made.count]
        if made.rows == "polite":
            rows = [json.dumps(_chosen_alone(json.loads(row))) for row in rows]
    else:
        model, init = _model(place, made), "random"
        draw = random.Random(made.seed)
        rows = [json.dumps(ROWS[made.rows](draw)) for _ in range(made.count)]
    source.write_text("\n".join(rows), encoding="utf-8")
    values = SETTINGS | {"data.source": str(source), "model.source": str(model)}
    values |= {"model.init": init, "train.micro_batch_size": "auto", "train.seed": made.seed}
    base = {"name": made.name, "model": {"source": "m"}, "data": {"source": "d"}}
    return TrainConfig.from_dict(base).with_values(values | made.settings)


def _make(made: Recorded, place: Path) -> Iterator[Record]:
    """Runs it, and yields its records."""
    limit, seconds = measurements.host_limit, measurements.POLL_SECONDS
    if made.limit:
        measurements.host_limit = lambda: made.limit
    measurements.POLL_SECONDS = 0.02  # these steps take milliseconds
    held: list[bytearray] = []
    run = start_run(config_of(made, place), place / "runs")

    def react(record: Record) -> None:
        if not isinstance(record.event, StepFinished):
            return
        step = record.event.step
        if made.leak is not None:
            taken = bytearray(made.leak(step))
            taken[::4096] = b"1" * len(taken[::4096])  # the pages are there once they are written
            held.append(taken)
        if step in made.changes:
            run.request(Change({"train.learning_rate": made.changes[step]}))
        if step == made.stop:
            run.request("stop")

    run.recorder.subscribe(react)
    try:
        run.execute()
    finally:
        measurements.host_limit, measurements.POLL_SECONDS = limit, seconds
    yield from replay(run.folder.events_path)


# ---------------------------------------------------------------------- files


def _short(value: Any) -> Any:
    """Returns a value of a record with numbers of five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items() if name not in LEFT_OUT}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return value


def write(made: Recorded, records: Iterator[Record], path: Path) -> None:
    """Writes what the verdict needs of a run's records."""
    kept = []
    start = None
    for record in records:
        if record.event.kind not in KINDS:
            continue
        start = record.time if start is None else start
        line = _short(record.to_json())
        kept.append(line | {"time": round(1e9 + record.time - start, 2), "run_id": made.name})
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in kept)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def read(which: str, name: str) -> list[Record]:
    """Returns the records of a run in the fixtures."""
    text = lzma.decompress((FOLDER / which / f"{name}.jsonl.xz").read_bytes()).decode()
    return [Record.from_json(json.loads(line)) for line in text.splitlines()]


def main(arguments: list[str]) -> None:
    """Makes the runs that are named, or all of them."""
    names = arguments[1:]
    for which in arguments[:1] or SETS:
        (FOLDER / which).mkdir(parents=True, exist_ok=True)
        for made in SETS[which]:
            if names and made.name not in names:
                continue
            with tempfile.TemporaryDirectory() as place:
                write(made, _make(made, Path(place)), FOLDER / which / f"{made.name}.jsonl.xz")
            print(which, made.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
