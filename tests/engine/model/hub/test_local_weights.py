"""A folder of this machine whose weights cannot be loaded is told from its names, sizes and
headers; plain transformers says of which it loads.
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
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.model.build.library import no_progress_bars
from engine.model.build.pretrained_files import load_config
from engine.model.hub.hub import fetch
from engine.model.hub.local_weights import refuse_no_model, refuse_no_weights
from engine.paths import PROGRAM_ROOT
from tests.support.fake_hub import FakeHub, serve
from tests.support.folders import make_model
from tests.support.pickled_folders import pickle_weights

pytestmark = pytest.mark.computing

WEIGHTS = "model.safetensors"
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def gguf(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "tiny.Q4_K_M.gguf")


def gguf_alone(folder: Path) -> None:
    gguf(folder)
    (folder / "config.json").unlink()


def optimizer_alone(folder: Path) -> None:
    without_weights(folder)
    torch.save({}, folder / "optimizer.pt")
    torch.save({}, folder / "training_args.bin")


def original_alone(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "consolidated.00.pth")


def adapter_alone(folder: Path) -> None:
    without_weights(folder)
    (folder / "config.json").unlink()
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "base_model_name_or_path": "acme/base"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def adapter_with_config(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    adapter_alone(folder)
    (folder / "config.json").write_text(config)


def in_shards(folder: Path) -> list[Path]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    without_weights(folder)
    model.save_pretrained(folder, max_shard_size="30KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3
    return shards


def half_of_the_shards(folder: Path) -> None:
    for shard in in_shards(folder)[::2]:
        shard.unlink()


def one_shard_less(folder: Path) -> None:
    in_shards(folder)[-1].unlink()


def shards_without_index(folder: Path) -> None:
    in_shards(folder)
    (folder / f"{WEIGHTS}.index.json").unlink()


def index_cut_off(folder: Path) -> None:
    in_shards(folder)
    file = folder / f"{WEIGHTS}.index.json"
    file.write_text(file.read_text()[:100])


def index_leads_outside(folder: Path) -> None:
    """All shards are there, and could be read."""
    shards = in_shards(folder)
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    shards[0].rename(elsewhere / shards[0].name)
    file = folder / f"{WEIGHTS}.index.json"
    file.write_text(file.read_text().replace(shards[0].name, f"../elsewhere/{shards[0].name}"))


def cut_off(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def one_byte_less(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def header_cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])


def pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text(POINTER)


def pointer_in_a_shard(folder: Path) -> None:
    in_shards(folder)[1].write_text(POINTER)


def pointer_to_pickles(folder: Path) -> None:
    pickle_weights(folder)
    (folder / "pytorch_model.bin").write_text(POINTER)


def pickle_cut_off(folder: Path) -> None:
    pickle_weights(folder)
    content = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(content[: len(content) // 2])


def broken_link(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "gone")


BROKEN = {
    without_weights: "has no weights (model.safetensors); give the folder or Hugging Face id of",
    gguf: "has its weights in GGUF, the format of llama.cpp, which cannot be trained; give the",
    gguf_alone: "has its weights in GGUF, the format of llama.cpp",
    optimizer_alone: "has no weights (model.safetensors) and optimizer.pt, training_args.bin",
    original_alone: "has no weights (model.safetensors) and consolidated.00.pth cannot be loaded",
    adapter_alone: "holds an adapter and no whole model; set model.source to acme/base, its base",
    adapter_with_config: "set train.method to lora and model.start_from to this folder",
    half_of_the_shards: " lacks model-00001-of-000",
    one_shard_less: f" files that {WEIGHTS}.index.json lists; get the files again",
    shards_without_index: f" and lacks its index, {WEIGHTS}.index.json; get the files again",
    index_cut_off: f"{WEIGHTS}.index.json in ",
    index_leads_outside: "lists no weights of this folder; get the files again",
    cut_off: f"{WEIGHTS} is cut off: it has ",
    one_byte_less: f"{WEIGHTS} is cut off: it has ",
    header_cut_off: f"{WEIGHTS} is cut off: it ends after 100 bytes",
    pointer: f"{WEIGHTS} is a pointer of Git LFS in place of the weights; run `git lfs pull`",
    pointer_in_a_shard: "safetensors is a pointer of Git LFS",
    pointer_to_pickles: "pytorch_model.bin is a pointer of Git LFS",
    pickle_cut_off: "pytorch_model.bin is cut off",
    broken_link: f"{WEIGHTS} is a link to a file that is not there; get the files again",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_what_cannot_be_loaded_is_told_in_one_sentence(damage, tmp_path):
    folder = make_model(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError) as caught:
        refuse_no_model(str(folder), folder)
        refuse_no_weights(str(folder), folder)
    text = str(caught.value)
    assert text.startswith("model.source: ")
    assert text.endswith(".")
    assert "\n" not in text
    assert BROKEN[damage] in text
    with pytest.raises(Exception, match=r".") as caught, no_progress_bars():
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert not isinstance(caught.value, AssertionError)


def whole(folder: Path) -> None:
    pass


def pickled(folder: Path) -> None:
    pickle_weights(folder)


def pickled_shards(folder: Path) -> None:
    pickle_weights(folder, 3)


def both_forms(folder: Path) -> None:
    """safetensors are read, whatever stands beside them."""
    (folder / "pytorch_model.bin").write_text(POINTER)
    (folder / "other.gguf").write_text("GGUF")


def named_elsewhere(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "own.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "own.safetensors"
    (folder / "config.json").write_text(json.dumps(config))


def linked(folder: Path) -> None:
    """As the hub's own cache has them."""
    (folder / WEIGHTS).rename(folder.parent / "blob")
    (folder / WEIGHTS).symlink_to(folder.parent / "blob")


@pytest.mark.parametrize(
    "change",
    [whole, in_shards, pickled, pickled_shards, both_forms, named_elsewhere, linked],
    ids=lambda change: change.__name__,
)
def test_what_transformers_loads_is_not_refused(change, tmp_path):
    folder = make_model(tmp_path / "model")
    weights = load_file(folder / WEIGHTS)
    change(folder)
    refuse_no_model(str(folder), folder)
    refuse_no_weights(str(folder), folder)
    with no_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in weights.items():
        assert torch.equal(loaded.get_parameter(name), weight), name


def test_a_folder_that_is_put_right_is_no_longer_refused(tmp_path):
    folder = make_model(tmp_path / "model")
    content = (folder / WEIGHTS).read_bytes()
    cut_off(folder)
    with pytest.raises(ModelError, match="is cut off"):
        refuse_no_weights(str(folder), folder)
    (folder / WEIGHTS).write_bytes(content)
    refuse_no_weights(str(folder), folder)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_gguf_file_is_named_whether_or_not_it_is_there(is_there, tmp_path):
    file = tmp_path / "Tiny-Q4_K_M.GGUF"
    if is_there:
        file.write_bytes(b"GGUF")
    for refuse in (load_config, lambda source: refuse_no_model(source, file if is_there else None)):
        with pytest.raises(ModelError, match=r"is a file in GGUF, .* cannot be trained; give the"):
            refuse(str(file))


def test_a_file_of_weights_is_not_taken_for_a_model(tmp_path):
    folder = make_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"is a file of weights; give the folder that holds it"):
        load_config(str(folder / WEIGHTS))


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_that_has_gguf_alone_is_told_so(has_config, weights, tmp_path, monkeypatch):
    folder = make_model(tmp_path / "model")
    gguf(folder)
    if not has_config:
        (folder / "config.json").unlink()
    with serve(FakeHub({"acme/tiny-GGUF": folder})) as hub:
        for name, value in hub.variables(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        if has_config and not weights:  # the configuration can be had
            fetch("acme/tiny-GGUF", weights, lambda *_: None, lambda: None)
            return
        with pytest.raises(ModelError, match=r"acme/tiny-GGUF has its weights in GGUF, the format"):
            fetch("acme/tiny-GGUF", weights, lambda *_: None, lambda: None)


@pytest.mark.parametrize("command", ["check", "train"])
def test_it_is_told_before_torch_is_loaded(command, tmp_path):
    folder = make_model(tmp_path / "model")
    shutil.copy(PROGRAM_ROOT / "presets" / "starter.yaml", tmp_path / "preset.yaml")
    half_of_the_shards(folder)
    words = [command, str(tmp_path / "preset.yaml"), "--set", f"model.source={folder}"]
    words += ["--set", "model.init=pretrained"]
    words = ["--runs-dir", str(tmp_path / "runs"), *words]
    program = (
        f"import sys, launch; code = launch.main({words})\n"
        "sys.exit(9 if {'torch', 'transformers'} & set(sys.modules) else code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=PROGRAM_ROOT
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"ramstream: model.source: {folder} lacks model-00001-of-000")
    assert ended.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()
