"""Command lines that are wrong: each ends with an exit code and one plain sentence, compared to the
letter.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.support.behavior.commands import told
from tests.support.behavior.plain import each_text
from tests.support.behavior.sides import Side
from tests.support.behavior.small import recorded_runs, small_place

SETTINGS = (
    "steps",
    "=5",
    "nothing=1",
    "train=5",
    "train.steps=[",
    "train.learning_rat=1",
    "trian.steps=3",
    "train.steps.more=1",
    "name=[1, 2]",
    "name=null",
    "model.source=",
    "model.source=null",
    "model.source=[a]",
    "model.init=fresh",
    "model.dtype=float16",
    "model.attention=flash",
    "data.source=",
    "data.source=[]",
    "data.source=/nope.jsonl",
    "data.source=missing.jsonl",
    "data.source=[{source: data.jsonl, weight: 0}]",
    "data.source=[{source: data.jsonl, weight: 5000}]",
    "data.source=[{source: ''}]",
    "data.source=[{source: data.jsonl, color: red}]",
    "data.source=[5, 6]",
    "data.format=xml",
    "data.columns.prompt=",
    "data.columns={prompt: a, completion: a}",
    "data.columns={messages: a, prompt: b}",
    "data.columns={text: a, tools: b}",
    "data.columns.color=a",
    "data.columns=[a]",
    "data.split=[a]",
    "data.max_seq_len=1",
    "data.max_seq_len=99999999",
    "data.max_seq_len=many",
    "data.packing=perhaps",
    "data.train_on=nobody",
    "data.eval_fraction=0.95",
    "data.eval_fraction=-1",
    "data.shuffle=3",
    "train.steps=0",
    "train.steps=2.5",
    "train.steps=many",
    "train.steps=2000000000",
    "train.steps=true",
    "train.epochs=2",
    "train={epochs: 0}",
    "train={epochs: -1}",
    "train.batch_size=0",
    "train.batch_size=9999999",
    "train.micro_batch_size=3",
    "train.micro_batch_size=0",
    "train.micro_batch_size=some",
    "train.learning_rate=0",
    "train.learning_rate=-1",
    "train.learning_rate=.inf",
    "train.learning_rate=.nan",
    "train.schedule=square",
    "train.warmup_steps=-1",
    "train.weight_decay=-0.1",
    "train.beta1=1",
    "train.beta2=-0.5",
    "train.eps=0",
    "train.max_grad_norm=0",
    "train.max_grad_norm=no number",
    "train.label_smoothing=1",
    "train.neftune_alpha=-1",
    "train.seed=-1",
    "train.seed=4294967296",
    "engine.device=tpu",
    "engine.gpu_memory_gib=0",
    "engine.slots=0",
    "engine.slots=few",
    "engine.activation_checkpointing=some",
    "engine.blocks_kept_in_slots=-1",
    "engine.rounds=0",
    "engine.kernels=fast",
    "output.checkpoint_every=-1",
    "output.keep_checkpoints=0",
    "output.eval_every=-1",
    "output.exact_match_samples=-1",
    "output.sample_prompts=['']",
    "output.sample_prompts=[1]",
    "output.sample_prompts={a: b}",
    "output.sample_tokens=0",
    "output.timeline_every=0",
    "output.export=maybe",
    "output.price_per_kwh=cheap",
    "output.webhook=ftp://x",
    "output.webhook=nonsense",
    "output.webhook=http://",
    "output.webhook=http://a:99999/",
)
"""Given to `check`, which needs no torch to refuse them."""

PREPARED = (
    ("data.source=broken.jsonl",),
    ("data.columns.prompt=nothing",),
    ("model.source=/no/such/folder",),
    ("engine.rounds=3",),
    ("train.learning_rate=1e30", "train.max_grad_norm=null", "train.warmup_steps=0"),
)
"""Settings that only preparing a run finds to be wrong, or a step."""

PRESETS = {
    "unclosed.yaml": "train: [unclosed",
    "twice.yaml": "train: {steps: 2}\ntrain: {batch_size: 4}",
    "list.yaml": "- 1\n- 2\n",
    "empty.yaml": "",
    "text.yaml": "just a text",
    "date.yaml": "name: 2024-13-45\n",
    "tab.yaml": "train:\n\tsteps: 3\n",
    "unknown.yaml": "model: {source: model}\ndata: {source: data.jsonl}\nspeed: 9\n",
    "no-model.yaml": "data: {source: data.jsonl}\n",
    "no-data.yaml": "model: {source: model}\n",
    "alias.yaml": "a: &a [1, 2]\nmodel: *a\n",
    "tag.yaml": "model: !!python/object:os.system {}\n",
    "number.yaml": "42\n",
}


def gather(side: Side) -> dict[str, Any]:
    place = small_place(side, "mistakes")
    facts: dict[str, Any] = {}

    def run(
        *arguments: str, environment: dict[str, str] | None = None, measured: bool = False
    ) -> None:
        name = " ".join(
            [*(f"{key}={value}" for key, value in (environment or {}).items()), *arguments]
        )
        facts[side.plain(name)] = told(
            side, side.launch(*arguments, cwd=place, environment=environment), measured
        )

    _material(place)
    run("fly")
    run("--fly")
    run("train")
    for setting in SETTINGS:
        run("check", "preset.yaml", "--machine", "RTX 4090", "--set", setting)
    for preset in PRESETS:
        run("train", preset, "--runs-dir", "none")
    run("train", "binary.yaml", "--runs-dir", "none")
    run("train", "none.yaml", "--runs-dir", "none")
    run("train", ".", "--runs-dir", "none")
    run("train", "preset.yaml", "--runs-dir", "preset.yaml")
    run("train", "preset.yaml", "--set")
    run("train", "preset.yaml", "--resume")
    run("check", "none.yaml")
    run("check", "--model", "only-config")
    run("check", "--machine", "nope")
    run("check", "--machine", "RTX 4090", "--machine", "H200")
    run("check", "--csv")
    run("check", "--table", "--machine", "nope")
    run("check", "--ram-gib", "lots")
    run("check", "--ram-gib", "-3")
    run("check", "--disk-gib", "nan")
    run("bench", "none.yaml")
    run("bench", "preset.yaml", "--seconds", "some")
    run("bench", "preset.yaml", "--set", "train.steps=0")
    run("bench", "preset.yaml", "--then", "train.steps=0")
    _of_runs(place, run)
    _of_the_server(side, place, run, facts)
    facts["what they left"] = sorted(
        str(path.relative_to(place)) for path in (place / "none").rglob("*")
    )
    return facts


def _material(place: Path) -> None:
    for name, text in PRESETS.items():
        (place / name).write_text(text, encoding="utf-8")
    (place / "binary.yaml").write_bytes(b"\xff\xfe\x00model")
    (place / "broken.jsonl").write_text('{"messages": [\n', encoding="utf-8")
    (place / "only-config").mkdir()
    (place / "only-config" / "config.json").write_text(
        '{"model_type": "no-such-family"}', encoding="utf-8"
    )
    (place / "full").mkdir()
    (place / "full" / "something").touch()
    lines = (place / "data.jsonl").read_text(encoding="utf-8").splitlines()
    (place / "other.jsonl").write_text("\n".join(lines[5:]) + "\n", encoding="utf-8")


def _of_runs(place: Path, run: Any) -> None:
    """Mistakes about runs: those that are not there, those that cannot go on."""
    runs = place / "runs"
    runs.mkdir()
    ids = recorded_runs(runs)
    folder = ("--runs-dir", "runs")
    for number, settings in enumerate(PREPARED):
        run(
            "train",
            "preset.yaml",
            "--runs-dir",
            f"prepared-{number}",
            *(part for setting in settings for part in ("--set", setting)),
            measured=True,
        )
    for wrong in ("nobody", "../runs", ".", "", "a/b", "x" * 200):
        run("train", "--resume", wrong, *folder)
        run("trace", wrong, *folder)
    run("export", "nobody", "away", *folder)
    run("train", "preset.yaml", "--resume", ids["cut"], *folder)
    run("train", "--resume", ids["cut"], "--set", "train.steps=3", *folder)
    for name in ("finished", "broken-settings", "other-data", "fewer-steps"):
        run("train", "--resume", ids[name], *folder, measured=True)
    run("export", ids["finished"])
    run("export", ids["finished"], "full", *folder)
    run("export", ids["finished"], "preset.yaml", *folder)
    run("export", ids["finished"], "away", "--checkpoint", "9", *folder)
    run("export", ids["finished"], "away", "--checkpoint", "last", *folder)
    run("export", ids["odd-checkpoint"], "away", "--checkpoint", "12", *folder)
    run("export", ids["without-checkpoints"], "away", *folder)
    run("export", ids["broken-settings"], "away", *folder)
    run("trace", ids["finished"], "--step", "7", *folder)
    run("trace", ids["finished"], "--step", "-1", *folder)
    run("trace", ids["finished"], "--step", "first", *folder)
    run("trace", ids["damaged"], "--step", "5", *folder)
    run("trace", ids["empty"], *folder)
    run("trace", ids["preparing"], *folder)
    run("trace", ids["finished"], "--out", "no/where.json", *folder)
    run("trace", ids["finished"], "--out", "full", *folder)
    run("runs", "--runs-dir", "preset.yaml")


def _of_the_server(side: Side, place: Path, run: Any, facts: dict[str, Any]) -> None:
    """Mistakes that keep the app from starting."""
    none = ("--no-browser", "--runs-dir", "served")
    run(*none, "--port", "abc")
    run(*none, "--port", "99999")
    run(*none, "--host", "0.0.0.0")
    run(*none, "--login")
    run(*none, "--tls-cert", "cert.pem")
    run(*none, "--tls-cert", "none.pem", "--tls-key", "preset.yaml")
    run(*none, "--tls-cert", "preset.yaml", "--tls-key", "none.pem")
    run(*none, "--tls-cert", "preset.yaml", "--tls-key", "preset.yaml")
    for login in ("nobody", "user:"):
        run(*none, environment={"RAMSTREAM_LOGIN": login})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = side.launch(*none, "--port", port, cwd=place)
        facts["a port that is taken"] = each_text(
            told(side, ended), lambda text: text.replace(port, "PORT")
        )
