"""A folder of a model may come from a stranger. Under names that transformers reads, it may hold
pipes, devices, folders, gigabytes, or JSON that no parser likes; its weights may say what cannot
be. Each is told in one sentence in seconds, and nothing waits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from app.form.own_precision import own_precision
from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.find_shape import shape_from_source
from engine.model.build.library import no_progress_bars
from engine.model.build.pretrained_files import load_config, load_generation_config, load_tokenizer
from engine.model.hub.hub_cache import cached_config, cached_weights
from engine.model.hub.local_weights import refuse_no_model, refuse_no_weights
from engine.model.hub.model_files import most_bytes
from engine.model.hub.tensor_files import files_with_weights, reading_dtype, tensors_in
from engine.model.hub.torch_pickle import open_pickled
from engine.training.weights.weights import load_pretrained
from tests.support.folders import make_model

pytestmark = pytest.mark.computing
SECONDS = 5.0
"""A sentence takes less of a core's time."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def pipe(file: Path) -> None:
    os.mkfifo(file)


def linked_pipe(file: Path) -> None:
    os.mkfifo(file.parent.parent / "pipe")
    file.symlink_to(file.parent.parent / "pipe")


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def folder(file: Path) -> None:
    file.mkdir()


def gigabyte(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(1 << 30)


def deep(file: Path) -> None:
    file.write_text('{"a": ' * 600_000)


KINDS = {
    pipe: "is a pipe, not a file; get the file",
    linked_pipe: "is a pipe, not a file; get the file",
    device: "is a device, not a file; get the file",
    folder: "is a folder, not a file; get the file",
    gigabyte: "has 1,073,741,824 bytes; at most ",
}
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/more.jinja",
    "adapter_config.json",
    "vocab.json",
    "merges.txt",
    INDEX,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def said(ask: Callable[[], object], begins: str = "model.source: ") -> str:
    """Returns the one sentence with which `ask` refuses."""
    began = time.process_time()
    with pytest.raises(ModelError) as caught, no_progress_bars():
        ask()
    assert time.process_time() - began < SECONDS
    text = str(caught.value)
    assert text.startswith(begins)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_no_small_file_is_told_and_not_opened(kind, model):
    for name in NAMES:
        file = model / name
        file.parent.mkdir(exist_ok=True)
        file.rename(file.with_suffix(".kept")) if file.exists() else None
        kind(file)
        asked = [
            lambda: refuse_no_model(str(model), model),
            lambda: load_config(str(model)),
            lambda: load_tokenizer(str(model)),
            lambda: load_generation_config(str(model)),
        ]
        for ask in asked:
            assert f"{file} {KINDS[kind]}" in said(ask)
        if name == "config.json":
            said(lambda: shape_from_source(ModelConfig(source=str(model))))
            assert own_precision(str(model)) == "bfloat16"
        if name == INDEX:
            (model / WEIGHTS).rename(model / "kept")
            assert files_with_weights(model) == []
            (model / "kept").rename(model / WEIGHTS)
        file.rmdir() if kind is folder else file.unlink()
        shutil.rmtree(model.parent / "pipe") if (model.parent / "pipe").is_dir() else None
        (model.parent / "pipe").unlink(missing_ok=True)
        kept = file.with_suffix(".kept")
        kept.rename(file) if kept.exists() else None
    refuse_no_model(str(model), model)


def test_a_configuration_that_is_a_pipe_itself_is_told(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "is a pipe, not a file" in said(lambda: load_config(str(tmp_path / "config.json")))


@pytest.mark.parametrize("kind", [pipe, device, folder], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [WEIGHTS, "pytorch_model.bin"])
def test_weights_that_are_no_file_are_told_and_not_opened(kind, name, model):
    (model / WEIGHTS).unlink()
    kind(model / name)
    assert KINDS[kind] in said(lambda: refuse_no_weights(str(model), model))
    nothing: Any = None
    assert KINDS[kind] in said(lambda: load_pretrained(nothing, str(model), nothing))
    if name == WEIGHTS:
        assert reading_dtype(model) is torch.float32
    else:
        assert "cannot be loaded" in said(lambda: reading_dtype(model))


READ_ALWAYS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    INDEX,
)


@pytest.mark.parametrize("name", READ_ALWAYS)
def test_json_that_is_nested_without_end_is_told(name, model):
    if name == INDEX:
        (model / WEIGHTS).unlink()
    deep(model / name)

    def read() -> None:
        refuse_no_model(str(model), model)
        refuse_no_weights(str(model), model)
        load_config(str(model))
        load_tokenizer(str(model))

    said(read)
    if name == "config.json":
        assert own_precision(str(model)) == "bfloat16"


# ---------------------------------------------------------------------- links

PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


def refused_link(file: Path, model: Path) -> None:
    """All that reads the small files of `model` refuses to follow the link at `file`."""
    for ask in (
        lambda: refuse_no_model(str(model), model),
        lambda: load_config(str(model)),
        lambda: load_tokenizer(str(model)),
        lambda: load_generation_config(str(model)),
    ):
        assert said(ask) == (
            f"model.source: {file} is a link to a file outside of the model's folder, and would be "
            "copied into the export; put the file itself there, or remove the link."
        )


@pytest.fixture
def private(tmp_path: Path) -> Path:
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "id_rsa").write_text(PRIVATE)
    return tmp_path / "home" / ".ssh" / "id_rsa"


@pytest.mark.parametrize("name", [*NAMES, "tokenizer.model", "processor_config.json"])
def test_a_link_to_a_private_file_is_not_followed(name, model, private):
    """A stranger who gives the folder of a model may know the name of a private file."""
    file = model / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(private)
    refused_link(file, model)
    file.unlink()
    file.symlink_to(os.path.relpath(private, file.parent))
    refused_link(file, model)


def test_a_folder_of_templates_that_is_a_link_is_not_followed(model, private):
    (private.parent / "id.jinja").write_text(PRIVATE)
    (model / "additional_chat_templates").symlink_to(private.parent)
    refused_link(model / "additional_chat_templates" / "id.jinja", model)


def to_weights(model: Path, private: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to(private)


def to_settings_of_others(model: Path, private: Path) -> None:
    (private.parent / "config.json").write_text('{"auths": {"hub": {"auth": "secret"}}}')
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(private.parent / "config.json")


def to_an_own_file_in_the_home_folder(model: Path, private: Path) -> None:
    home = private.parents[1]
    (model / "config.json").rename(home / "config.json")
    (model / "config.json").symlink_to(home / "config.json")


def as_in_a_cache(model: Path, private: Path) -> None:
    blobs = private.parents[1] / "models--acme--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (model / "tokenizer_config.json").rename(blobs / "tokenizer_config.json")
    (model / "tokenizer_config.json").symlink_to(blobs / "tokenizer_config.json")


@pytest.mark.parametrize(
    "prepare",
    [to_weights, to_settings_of_others, to_an_own_file_in_the_home_folder, as_in_a_cache],
    ids=lambda prepare: prepare.__name__,
)
def test_no_other_link_makes_a_private_folder_one_of_the_model(prepare, model, private):
    """Where the configuration and the weights lie, links may lead, unless they are none."""
    prepare(model, private)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to(private)
    with pytest.raises(ModelError, match="is a link to a file outside of the model's folder"):
        load_tokenizer(str(model))


# ---------------------------------------------------------------------- headers


def entry(begin: int, end: int, shape: object = None, dtype: str = "F32") -> str:
    sizes = [(end - begin) // 4] if shape is None else shape
    return json.dumps({"dtype": dtype, "shape": sizes, "data_offsets": [begin, end]})


def header(*parts: str) -> str:
    return "{" + ",".join(f'"{name}": {part}' for name, part in zip("abcdef", parts)) + "}"


SAME_TWICE = f'{{"a": {entry(0, 8)}, "a": {entry(0, 8)}}}'
HEADERS = {
    "overlapping": header(entry(0, 8), entry(4, 16)),
    "with a hole": header(entry(0, 4), entry(8, 16)),
    "backward": header(entry(8, 0, [2])),
    "beyond the file": header(entry(0, 16), entry(16, 1 << 40)),
    "beyond numbers": header(entry(0, 1 << 70)),
    "not at the beginning": header(entry(8, 16)),
    "negative offsets": header(entry(-8, 8)),
    "negative shape": header(entry(0, 16, [-2, -2])),
    "another shape": header(entry(0, 16, [5])),
    "a shape of a million sizes": header(entry(0, 16, [1 << 60] * 1_000_000)),
    "less than the file": header(entry(0, 8)),
    "no shape": '{"a": {"dtype": "F32", "data_offsets": [0, 16]}}',
    "the same name twice": SAME_TWICE,
    "a list": "[1, 2]",
    "no JSON": "{" * 1000,
    "nested": '{"a": ' + "[" * 1_000_000,
    "metadata that is a list": '{"__metadata__": [1], "a": ' + entry(0, 16) + "}",
    "nothing of a tensor": '{"a": {}}',
    "no type": '{"a": {"shape": [4], "data_offsets": [0, 16]}}',
}


def write_weights(file: Path, text: str, length: int | None = None, values: int = 16) -> None:
    content = text.encode()
    size = len(content) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + content + bytes(values))


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_cannot_be_is_told(what, model):
    file = model / WEIGHTS
    write_weights(file, HEADERS[what], values=8 if what == "the same name twice" else 16)
    text = said(lambda: refuse_no_weights(str(model), model))
    assert f"{file} is no file of safetensors (" in text or f"{file} is cut off: it has" in text
    began = time.process_time()
    with pytest.raises(ValueError, match="."):
        tensors_in(file)
    assert reading_dtype(model) is torch.float32
    assert time.process_time() - began < SECONDS
    if what != "the same name twice":  # the library takes the last of the two
        with pytest.raises(SafetensorError), safe_open(file, framework="pt"):
            pass


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, (100 << 20) + 1])
def test_a_header_that_says_it_is_huge_is_not_read(length, model):
    write_weights(model / WEIGHTS, "{}", length)
    text = said(lambda: refuse_no_weights(str(model), model))
    assert "its header is longer than safetensors allows" in text


@pytest.mark.slow("a header of 30 MB is decoded, for a second")
def test_a_header_of_very_many_tensors_takes_seconds(model):
    same = entry(0, 0)
    names = ",".join(f'"{number}":{same}' for number in range(400_000))
    write_weights(model / WEIGHTS, f"{{{names}}}", values=0)
    began = time.process_time()
    refuse_no_weights(str(model), model)
    assert time.process_time() - began < SECONDS


def test_headers_of_every_type_are_read(tmp_path):
    """torch writes them, with sizes of none and of one value."""
    file = tmp_path / WEIGHTS
    kinds = ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"]
    kinds += ["float8_e4m3fn", "float8_e5m2", "uint16", "int8"]
    tensors = {kind: torch.zeros(3, 5).to(getattr(torch, kind)) for kind in kinds}
    tensors |= {"none": torch.zeros(0, 4), "one": torch.zeros(())}
    save_file(tensors, file, {"format": "pt"})
    assert {name: each.bytes for name, each in tensors_in(file).items()} == {
        name: tensor.nbytes for name, tensor in tensors.items()
    }


def test_an_index_of_very_many_files_is_none(model):
    (model / WEIGHTS).unlink()
    names = {str(number): f"{number}.safetensors" for number in range(20_000)}
    (model / INDEX).write_text(json.dumps({"weight_map": names}))
    text = said(lambda: refuse_no_weights(str(model), model))
    assert "lists no weights of this folder" in text


def test_a_pickle_that_is_compressed_is_not_unpacked(model):
    """torch would unpack it in memory, a thousand times its size."""
    torch.save({"a": torch.zeros(4)}, model / "pytorch_model.bin")
    with zipfile.ZipFile(model / "pytorch_model.bin") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(model / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as made:
        for name, part in parts.items():
            made.writestr(name, part)
    assert "torch.save would not compress" in said(
        lambda: open_pickled(model / "pytorch_model.bin")
    )


# ---------------------------------------------------------------------- what must keep working


def test_a_cache_of_links_keeps_working(model, tmp_path, monkeypatch):
    """Snapshots of the hub's cache link each name to a blob."""
    cached = tmp_path / "hub" / "models--acme--tiny"
    snapshot = cached / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cached / "blobs").mkdir()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(cached / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cached_config("acme/tiny") == snapshot / "config.json"
    assert cached_weights("acme/tiny") == snapshot
    refuse_no_model(str(snapshot), snapshot)
    refuse_no_weights(str(snapshot), snapshot)
    assert load_config(str(snapshot)).vocab_size > 0
    assert load_tokenizer(str(snapshot)) is not None
    assert tensors_in(snapshot / WEIGHTS)


def reads_unsharded(folder: Path) -> None:
    """A model is read from a folder, with its chat templates."""
    refuse_no_model(str(folder), folder)
    refuse_no_weights(str(folder), folder)
    assert load_config(str(folder)).vocab_size > 0
    assert set(load_tokenizer(str(folder)).chat_template) == {"default", "more"}
    load_generation_config(str(folder))


def with_more_templates(model: Path) -> Path:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "more.jinja").write_text("more")
    return model


def test_a_folder_that_is_a_link_keeps_working(model, tmp_path):
    (tmp_path / "link").symlink_to(with_more_templates(model))
    reads_unsharded(tmp_path / "link")


@pytest.mark.parametrize("own", [(), ("config.json",), ("config.json", "tokenizer_config.json")])
def test_a_folder_of_links_to_another_model_keeps_working(model, tmp_path, own):
    """Each name is a link to the model on a bigger disk, but for those that were edited."""
    folder = tmp_path / "edited"
    folder.mkdir()
    for file in with_more_templates(model).iterdir():
        if file.name in own:
            shutil.copy(file, folder)
        else:
            (folder / file.name).symlink_to(file)
    reads_unsharded(folder)


def test_links_into_the_hubs_cache_keep_working(model, tmp_path):
    """Older versions of the hub's library downloaded small files and linked large ones so."""
    blobs = tmp_path / "hub" / "models--acme--tiny" / "blobs"
    blobs.mkdir(parents=True)
    for name, digits in ((WEIGHTS, 64), ("tokenizer.json", 64), ("tokenizer_config.json", 40)):
        blob = blobs / name.encode().hex().ljust(digits, "0")[:digits]
        (model / name).rename(blob)
        (model / name).symlink_to(blob)
    reads_unsharded(with_more_templates(model))


def test_other_files_of_any_size_may_lie_beside_a_model(model):
    gigabyte(model / "train.json")
    gigabyte(model / "consolidated.safetensors")
    (model / "onnx.json").symlink_to(model / "gone")
    refuse_no_model(str(model), model)
    refuse_no_weights(str(model), model)
    load_tokenizer(str(model))


def test_each_file_of_a_tokenizer_has_a_limit():
    """The names that the tokenizers of transformers read."""
    found = set()
    for file in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for names in re.findall(r"VOCAB_FILES_NAMES *= *(\{.*?\})", file.read_text(), re.DOTALL):
            found |= set(re.findall(r': *"([^"]+)"', names))
    assert len(found) > 10
    assert [name for name in sorted(found) if most_bytes(name) is None] == []
