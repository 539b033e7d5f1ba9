"""What an earlier version wrote is still read: its run, its checkpoint, its tokens and its preset.

`fixtures/before` was written by version 0.1.0 as it was before its modules moved into packages, in
a working directory of its own: a model of some 6,000 parameters, its data, a preset, the run of it,
and the tokens of that run. `expected.json` is what that version said of them. Nothing there is ever
written again, or the proof would be gone.
"""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import launch
from engine.config.settings import TrainConfig
from engine.files import body_checksum
from engine.runs.record.following import replay
from engine.runs.record.snapshot import RunSnapshot

BEFORE = Path(__file__).parent / "fixtures" / "before"
EXPECTED = json.loads((BEFORE / "expected.json").read_text(encoding="utf-8"))
RUN = EXPECTED["listed"]["id"]
TAKEN_FROM = 6
"""The step of the checkpoint from which the run is resumed."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A copy of the fixture, as the working directory: its paths are relative."""
    folder = tmp_path / "before"
    shutil.copytree(BEFORE, folder)
    monkeypatch.chdir(folder)
    return folder


def lines_of(record: Path) -> list[dict]:
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def of_kind(lines: list[dict], kind: str) -> list[dict]:
    return [line for line in lines if line["kind"] == kind]


def cut_after_checkpoint(run: Path, step: int) -> None:
    """Leave what a process left that was killed once it had written this checkpoint."""
    kept = []
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        kept.append(line)
        values = json.loads(line)
        if (values["kind"], values.get("step")) == ("checkpoint_written", step):
            break
    (run / "events.jsonl").write_text("".join(kept), encoding="utf-8")
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name != f"step-{step}":
            shutil.rmtree(checkpoint)


def same_figures(found: list[float], before: list[float]) -> bool:
    """Equal but for the order of sums where torch and the instructions of the CPU are those of
    before, since its kernels differ among CPUs with the same instructions; elsewhere nearly equal.
    """
    alike = [torch.__version__, torch.backends.cpu.get_cpu_capability()] == EXPECTED["computed_by"]
    return found == pytest.approx(before, rel=1e-6 if alike else 1e-4)


def resumed(place: Path) -> list[dict]:
    """The lines that a resume from `TAKEN_FROM` has added to the record."""
    run = place / "runs" / RUN
    cut_after_checkpoint(run, TAKEN_FROM)
    known = len(lines_of(run / "events.jsonl"))
    assert launch.main(["train", "--resume", RUN, "--runs-dir", "runs"]) == 0
    return lines_of(run / "events.jsonl")[known:]


# ------------------------------------------------------------------ the record


def test_the_run_is_listed_as_before(place, capsys):
    assert launch.main(["runs", "--runs-dir", "runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed.pop("path") == str(Path("runs") / RUN)
    assert listed.pop("worse_than_before_training") is None, "it has learned"
    assert listed.pop("export_failed") == "", "its export did not fail"
    assert listed.pop("best") is None and listed.pop("tags") == [], "earlier versions kept none"
    assert listed == EXPECTED["listed"]


def test_the_record_adds_up_to_what_it_did_before():
    snapshot = RunSnapshot()
    for record in replay(BEFORE / "runs" / RUN / "events.jsonl"):
        snapshot.apply(record)
    before = EXPECTED["snapshot"]
    for name, value in before["values"].items():
        assert getattr(snapshot, name) == value, name
    for table, columns in before["columns"].items():
        for name, values in columns.items():
            assert list(getattr(getattr(snapshot, table), name)) == values, (table, name)
    assert [list(values) for values in snapshot.norms.norms.values()] == before["norms"]
    assert [
        [written.step, written.path, written.bytes] for written in snapshot.checkpoints
    ] == before["checkpoints"]
    assert [[asked.step, asked.correct, asked.total] for asked in snapshot.exact_matches] == before[
        "exact_matches"
    ]
    assert [[answered.step, answered.answers] for answered in snapshot.prompt_answers] == before[
        "prompt_answers"
    ]


def test_a_step_of_the_record_becomes_the_same_trace(place):
    assert (
        launch.main(["trace", RUN, "--step", "5", "--runs-dir", "runs", "--out", "step.json"]) == 0
    )
    assert json.loads((place / "step.json").read_text(encoding="utf-8")) == EXPECTED["trace"]


# ------------------------------------------------------------------ checkpoint and tokens


def test_the_checkpoint_resumes_to_the_same_losses(place):
    added = resumed(place)
    (started,) = of_kind(added, "run_started")
    assert (started["resumed_step"], started["total_steps"]) == (TAKEN_FROM, 12)
    before = of_kind(lines_of(BEFORE / "runs" / RUN / "events.jsonl"), "step_finished")[TAKEN_FROM:]
    steps = of_kind(added, "step_finished")
    for name in ("step", "tokens", "loss_tokens", "learning_rate"):
        assert [step[name] for step in steps] == [step[name] for step in before], name
    for name in ("loss", "grad_norm"):
        assert same_figures([step[name] for step in steps], [step[name] for step in before]), name
    assert added[-1]["state"] == "finished"


def test_the_tokens_are_made_as_before_and_those_of_before_are_read(place, own_cache):
    """A checkpoint holds the fingerprint of its data, and no other data are taken for a resume:
    that the run goes on shows that the fingerprint is the same. The name of the folder tells which
    code made the tokens, and may be another.
    """
    assert launch.main(["train", "preset.yaml", "--runs-dir", "new", "--set", "train.steps=1"]) == 0
    (made,) = (own_cache / "tokens").iterdir()
    (kept,) = (BEFORE / "cache" / "tokens").iterdir()
    assert {file.name for file in made.iterdir()} == {file.name for file in kept.iterdir()}
    for file in kept.iterdir():
        if file.name != "manifest.json":
            assert (made / file.name).read_bytes() == file.read_bytes(), file.name
    contents = [
        json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["body"]
        for folder in (made, kept)
    ]
    newer = {"notes": [], "classes": [], "pairs": False, "label": None}
    newer |= {"answer_flags": [], "roles": {}, "unused_flags": [], "possible_flags": []}
    newer |= {"figures": [], "between": None}
    columns = contents[0]["tally"]["columns"]
    newer |= {"known": [*columns["columns"].values(), *columns["unused"]]}
    for name, value in newer.items():
        assert contents[0]["tally"]["columns"].pop(name) == value
    assert contents[0]["tally"].pop("ends") is not None
    assert contents[0] | {"key": ""} == contents[1] | {"key": ""}

    shutil.rmtree(made)
    shutil.copytree(kept, made)
    body = contents[1] | {"key": made.name}  # the manifest names its folder
    manifest = {"checksum": body_checksum(body), "body": body}
    (made / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (prepared,) = of_kind(resumed(place), "data_prepared")
    assert prepared["summary"]["cached"] is True


def test_a_new_checkpoint_holds_the_fingerprint_of_before(place):
    assert (
        launch.main(
            [
                "train",
                "preset.yaml",
                "--runs-dir",
                "new",
                "--set",
                "train.steps=2",
                "--set",
                "output.checkpoint_every=1",
            ]
        )
        == 0
    )
    manifest, *_ = (place / "new").glob("*/checkpoints/step-2/manifest.json")
    state = json.loads(manifest.read_text(encoding="utf-8"))["state"]
    assert state["data"] == EXPECTED["fingerprint"]


def test_the_model_of_each_checkpoint_is_exported_to_the_bit(place):
    for step, weights in EXPECTED["exports"].items():
        assert (
            launch.main(
                ["export", RUN, f"export-{step}", "--checkpoint", step, "--runs-dir", "runs"]
            )
            == 0
        )
        assert (
            sha256((place / f"export-{step}" / "model.safetensors").read_bytes()).hexdigest()
            == weights
        ), step


# ------------------------------------------------------------------ the preset


SINCE_THEN = {
    "train.nonfinite": "stop",
    "model.start_from": None,
    "model.rope_scaling": "none",
    "model.rope_factor": 2.0,
    "data.add_tokens": [],
    "output.export_dtype": "auto",
    "output.checkpoint": "full",
    "output.keep_best": "loss",
    "output.export_from": "best",
    "train.patience": 0,
    "train.decay_steps": None,
    "train.min_learning_rate": 0.0,
    "train.label_smoothing": 0.0,
    "train.neftune_alpha": 0.0,
    "train.optimizer": "adamw",
    "train.method": "full",
    "train.part_names": [],
    "train.last_blocks": 0,
    "train.lora_rank": 16,
    "train.lora_alpha": 32.0,
    "train.lora_dropout": 0.0,
    "train.lora_rslora": False,
    "train.lora_targets": ["all-linear"],
    "train.lora_save_modules": [],
    "train.lora_target_parameters": [],
    "output.export_form": "model",
    "preference.objective": "sft",
    "preference.beta": 0.1,
    "preference.loss": "sigmoid",
    "preference.label_smoothing": 0.0,
    "preference.sft_weight": 0.0,
    "preference.desirable_weight": 1.0,
    "preference.undesirable_weight": 1.0,
    "engine.gradients": "auto",
    "engine.gpus": 1,
    "engine.across_hosts": "auto",
    "engine.states": "auto",
    "engine.disk": None,
    "data.lost_turns": "turn_by_turn",
    "data.typed_tokens": "text",
    "data.long_texts": "continue",
    "data.overlap": 0,
    "data.roles": [],
    "data.unused_flags": [],
    "data.columns.history": None,
    "data.columns.chosen": None,
    "data.columns.rejected": None,
    "output.trackers": [],
}
"""These settings are newer than the preset. They have the values with which nothing changes, but
for the best weights: they are kept and exported.
"""


def as_before(path: Path) -> dict:
    """The settings in a file, without those that are newer."""
    found = json.loads(json.dumps(TrainConfig.load(path).to_dict()))
    for dotted, value in SINCE_THEN.items():
        *sections, name = dotted.split(".")
        table = found
        for section in sections:
            table = table[section]
        assert table.pop(name) == value
    assert found.pop("preference") == {}
    return found


def test_the_preset_loads_to_the_same_values():
    assert as_before(BEFORE / "preset.yaml") == EXPECTED["preset"]


def test_the_settings_of_the_run_are_those_of_its_preset():
    assert as_before(BEFORE / "runs" / RUN / "config.yaml") == EXPECTED["preset"]


def test_settings_are_saved_byte_for_byte_as_before(tmp_path):
    """But for the lines of newer settings."""
    TrainConfig.load(BEFORE / "preset.yaml").save(tmp_path / "config.yaml")
    newer = {f"{name.split('.')[-1]}:" for name in SINCE_THEN} | {"preference:"}
    lines = (tmp_path / "config.yaml").read_text(encoding="utf-8").splitlines()
    lines.remove("  - all-linear")  # the value of a newer one
    kept = [line for line in lines if line.split()[0] not in newer]
    before = (BEFORE / "runs" / RUN / "config.yaml").read_text(encoding="utf-8")
    assert kept == before.splitlines()
