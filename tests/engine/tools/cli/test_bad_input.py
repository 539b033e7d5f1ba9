"""Wrong presets, models and data sets, each through the command line: exit code 2 and one sentence
that names it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.paths import PROGRAM_ROOT
from tests.support.failing import failed, refused
from tests.support.folders import make_config, make_data, make_model, make_tokenizer

ROOT = PROGRAM_ROOT


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "preset.yaml"
    make_config(
        tmp_path, **{"train.steps": 2, "output.checkpoint_every": 0, "output.eval_every": 0}
    ).save(path)
    return path


# ---------------------------------------------------------------------- presets: refused before the

BOMB = "name:\n- &a [x, x]\n" + "".join(
    f"- &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl")
)
PRESETS = {
    "empty": (b"", "model.source"),
    "tabs": (b"train:\n\tsteps: 2\n", "not valid YAML near line 2"),
    "not text": (b"\xff\xfe\x00train", "cannot be read"),
    "control characters": (b"name: a\x00b\n", "not valid YAML"),
    "a tag that makes objects": (b"name: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
    "endless aliases": (BOMB.encode(), "name"),
    "an alias of itself": (b"name: &a [*a]\n", "name"),
    "an unknown setting": (b"train: {learning_rat: 1}\n", "train.learning_rat"),
    "a section twice": (b"train: {steps: 2}\ntrain: {steps: 3}\n", "given twice"),
    "a setting twice": (b"train: {steps: 2, steps: 3}\n", "given twice"),
    "a key that is no word": (b"{1: 2}\n", "no such setting"),
}
VALUES = {
    "train.steps=many": "whole number",
    "train.steps=1e30": "too large",
    "train.batch_size=1000000000000": "too large",
    "train.schedule=cubic": "cosine",
    "train.seed=-1": "too small",
    "data.max_seq_len=1e11": "too large",
    "data.source=null": "data.source",
    "model.dtype=int8": "bfloat16",
    "engine.device=tpu": "cuda",
    "model.source=' '": "no model is given",
    "=1": "section.field=value",
}


@pytest.mark.parametrize("content, reported", PRESETS.values(), ids=PRESETS)
def test_a_wrong_preset_leaves_no_run(capsys, tmp_path, content, reported):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    sentence = refused(capsys, tmp_path / "runs", "train", path)
    assert reported in sentence and len(sentence) < 500


@pytest.mark.parametrize("setting, reported", VALUES.items(), ids=VALUES)
def test_a_wrong_value_leaves_no_run(capsys, tmp_path, preset, setting, reported):
    assert reported in refused(capsys, tmp_path / "runs", "train", preset, "--set", setting)


def test_presets_and_runs_that_are_not_there(capsys, tmp_path, preset):
    runs = tmp_path / "runs"
    assert "no such preset" in refused(capsys, runs, "train", tmp_path / "none.yaml")
    assert "this is a folder" in refused(capsys, runs, "train", tmp_path)
    assert "There is no run" in refused(capsys, runs, "train", "--resume", "20200101-000000-none")
    assert "not a run id" in refused(capsys, runs, "train", "--resume", "../../etc")


def test_a_data_file_that_is_not_there_is_told_before_anything_is_imported(tmp_path, preset):
    """Torch and transformers take seconds to import, and no run should begin."""
    words = ["--runs-dir", str(tmp_path / "runs"), "train", str(preset)]
    words += ["--set", f"data.source={tmp_path}/none.jsonl"]
    program = (
        f"import sys, launch; code = launch.main({words})\n"
        "sys.exit(9 if {'torch', 'transformers'} & set(sys.modules) else code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.returncode == 2 and not (tmp_path / "runs").exists()
    assert ended.stderr == (
        f"ramstream: There is no file {tmp_path}/none.jsonl; check data.source.\n"
    )


# ---------------------------------------------------------------------- models and data: the run fa


def config_only(folder: Path, **values) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    make_tokenizer().save_pretrained(folder)


def changed_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def wrong_shape(weights) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 5)


def cut(path: Path, share: float = 0.6) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def set_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8"
    )


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


MODELS = {
    "a config without a type": (lambda f: set_config(f, model_type=None), "model.source"),
    "an unknown type": (lambda f: set_config(f, model_type="marvel"), "model.source"),
    "an encoder-decoder": (
        lambda f: (shutil.rmtree(f), config_only(f, model_type="t5")),
        "encoder-decoder",
    ),
    "no language model": (
        lambda f: (shutil.rmtree(f), config_only(f, model_type="vit")),
        "no causal language model",
    ),
    "a quantized model": (
        lambda f: set_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantized",
    ),
    "a width of another kind": (lambda f: set_config(f, hidden_size="wide"), "model.source"),
    "pickled weights with an object": (
        lambda f: (
            torch.save(load_file(f / "model.safetensors") | {"at": f}, f / "pytorch_model.bin"),
            (f / "model.safetensors").unlink(),
        ),
        "pytorch_model.bin holds pickled objects that are not tensors (pathlib.PosixPath)",
    ),
    "a tensor of another shape": (lambda f: changed_weights(f, wrong_shape), "up_proj"),
    "a tensor that is missing": (
        lambda f: changed_weights(f, lambda w: w.pop("model.norm.weight")),
        "model.norm.weight",
    ),
    "no tokenizer": (no_tokenizer, "tokenizer"),
    "a tokenizer cut off": (lambda f: cut(f / "tokenizer.json"), "tokenizer"),
    "a chat template that is broken": (
        lambda f: (f / "chat_template.jinja").write_text("{% for %}", encoding="utf-8"),
        "chat template",
    ),
}

REFUSED = {
    "an empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "has no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
}


@pytest.mark.parametrize("damage, reported", REFUSED.values(), ids=REFUSED)
def test_a_model_whose_files_are_not_whole_is_refused(capsys, tmp_path, preset, damage, reported):
    """Before there is a run, and by `check` too."""
    damage(tmp_path / "model")
    sentence = refused(capsys, tmp_path / "runs", "train", preset)
    assert sentence.startswith(f"model.source: {tmp_path / 'model'}") and reported in sentence
    assert refused(capsys, tmp_path / "runs", "check", preset) == sentence


@pytest.mark.parametrize("damage, reported", MODELS.values(), ids=MODELS)
def test_a_wrong_model_fails_the_run_by_name(capsys, tmp_path, preset, damage, reported):
    damage(tmp_path / "model")
    assert reported in failed(capsys, tmp_path / "runs", preset, code=2)


def test_a_vocabulary_that_is_too_small_for_the_tokenizer(capsys, tmp_path, preset):
    make_model(tmp_path / "model", vocab_size=11)
    sentence = failed(capsys, tmp_path / "runs", preset, code=1)
    assert "makes token" in sentence and "knows only 11" in sentence


def test_weights_that_are_not_numbers(capsys, tmp_path, preset):
    changed_weights(tmp_path / "model", lambda w: w["model.norm.weight"].fill_(float("nan")))
    assert "not a finite number" in failed(capsys, tmp_path / "runs", preset, code=1)


def turns(*pairs) -> str:
    return (
        json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]})
        + "\n"
    )


GOOD = turns(("user", "say after one"), ("assistant", "two"))
DATA = {
    "no bytes": (lambda p: p.write_bytes(b""), "data.jsonl"),
    "a line that is no JSON": (
        lambda p: p.write_text(GOOD * 3 + "{'a': 1}\n" + GOOD, encoding="utf-8"),
        "4",
    ),
    "other columns": (
        lambda p: p.write_text('{"a": 1}\n' * 4, encoding="utf-8"),
        "fit no known format",
    ),
    "nothing to train on": (
        lambda p: p.write_text(turns(("user", "one")) * 9, encoding="utf-8"),
        "",
    ),
    "rows that are all empty": (lambda p: p.write_text('{"text": ""}\n' * 9, encoding="utf-8"), ""),
    "another encoding": (
        lambda p: p.write_bytes(GOOD.replace("one", "né").encode("latin-1")),
        "data.jsonl",
    ),
}


def test_what_is_not_there_is_refused_before_a_run_is_made(capsys, tmp_path, preset):
    source, model = tmp_path / "data.jsonl", tmp_path / "model"
    rows = source.read_bytes()
    source.unlink()
    sentence = refused(capsys, tmp_path / "runs", "train", preset)
    assert sentence == f"There is no file {source}; check data.source."
    source.write_bytes(rows)
    shutil.rmtree(model)
    sentence = refused(capsys, tmp_path / "runs", "train", preset)
    assert sentence == f"model.source: the folder {model} does not exist; check the path."
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage, reported", DATA.values(), ids=DATA)
def test_wrong_data_fails_the_run_by_name(capsys, tmp_path, preset, damage, reported):
    damage(tmp_path / "data.jsonl")
    assert reported in failed(capsys, tmp_path / "runs", preset, code=2)


@pytest.mark.parametrize(
    "name, content",
    [
        ("data.parquet", b"PAR1 not parquet PAR1"),
        ("data.json", b'{"a": '),
        ("data.json", b'"text"'),
        ("data.xyz", b"one two"),
        ("data.jsonl.gz", b"\x1f\x8b"),
    ],
)
def test_files_of_a_kind_that_they_are_not(capsys, tmp_path, preset, name, content):
    (tmp_path / name).write_bytes(content)
    assert name in failed(
        capsys, tmp_path / "runs", preset, "--set", f"data.source={tmp_path / name}", code=2
    )


def test_rows_whose_answers_are_all_cut_off(capsys, tmp_path, preset):
    make_data(tmp_path / "data.jsonl")
    failed(capsys, tmp_path / "runs", preset, "--set", "data.max_seq_len=4", code=2)
