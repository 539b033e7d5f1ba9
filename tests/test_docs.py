"""The documents are true: their hops run in the order given, their examples are read as they say,
their laws name tests that exist, and the README's commands parse.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import get_args

import pytest
import yaml

import launch
from app.form.presets import FIRST_PRESET, read_presets
from app.form.settings_form import settings, shown_values
from app.pages.frame.page import build_page
from app.pages.new.checker import Checker
from app.session.session import Session
from engine.config.data_settings import DataConfig, DataFormat
from engine.config.settings import TrainConfig
from engine.config.tree import build
from engine.data.batches.preview import preview
from engine.machine.read_machine import read_machine
from engine.paths import PROGRAM_ROOT
from engine.planning.fit.model_table import columns, counts_text, rows_of
from engine.text import GIB
from tests.support import references as reference

DOCS = PROGRAM_ROOT / "docs"
README_LINES = 160
EXAMPLE = re.compile(
    r"^```\w+ (\S+)\n(.*?)^```\n\n(?:Read as `(\w+)`; trained: ((?:`.+?`(?:, )?)+))?",
    re.MULTILINE | re.DOTALL,
)
HOP = re.compile(r"^\d+\. `(\S+?\.py):([\w.]+)`", re.MULTILINE)
MOST_HOPS = 12
PLENTY = ("--ram-gib", "2048", "--disk-gib", "4000")


def between(page: str, name: str) -> str:
    """Returns the text of a page between the marks of `name`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]


def hops() -> list[tuple[str, str]]:
    """Returns (file, qualified name) of each hop from the click to the kernel."""
    return HOP.findall(between("architecture.md", "hops"))


def examples() -> dict[str, tuple[str, str, str]]:
    """Returns by file name: its content, the format it is read as, and the trained texts, each in
    backquotes.
    """
    found = EXAMPLE.findall((DOCS / "data.md").read_text(encoding="utf-8"))
    return {name: (content, form, trained) for name, content, form, trained in found}


@pytest.fixture(scope="module")
def tokenizer():
    return reference.tokenizer("qwen")


@pytest.mark.parametrize("name", [name for name, (_, form, _) in examples().items() if form])
def test_an_example_of_data_is_read_as_it_says(tmp_path, tokenizer, name):
    content, form, trained = examples()[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    shown = preview(DataConfig(source=str(tmp_path / name), max_seq_len=512), tokenizer)
    assert shown["format"] == form and shown["format_detected"]
    pieces = [piece for row in shown["rows"] for document in row["documents"] for piece in document]
    found = "".join(piece["text"] for piece in pieces if piece["trained"])
    for text in re.findall(r"`(.+?)`", trained):
        assert text in found


@pytest.mark.parametrize("name", [name for name in examples() if name.endswith(".yaml")])
def test_an_example_of_settings_is_valid(name):
    values = yaml.safe_load(examples()[name][0])
    assert build(TrainConfig, values, "").data.source


def test_the_registry_of_the_example_is_read(tmp_path, tokenizer):
    for name in ("dataset_info.json", "chat.jsonl"):
        (tmp_path / name).write_text(examples()[name][0], encoding="utf-8")
    source = f"{tmp_path / 'dataset_info.json'}:rivers"
    shown = preview(DataConfig(source=source, max_seq_len=512), tokenizer)
    assert shown["rows"][0]["trained_tokens"]


def test_data_has_an_example_of_every_format():
    assert {form for _, form, _ in examples().values() if form} == {
        *get_args(DataFormat),
    } - {"auto", "tokens"}


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_counts_of_models_on_desktops_are_those_of_the_table():
    (line,) = between("performance.md", "counts").strip().splitlines()
    names = [pair.rpartition(" ")[0] for pair in line.partition(": ")[2].split(", ")]
    shown = columns(names, read_machine())[1:]
    job = {"name": "table", "model": {"source": "m"}, "data": {"source": "d"}}
    rows = list(rows_of(TrainConfig.from_dict(job), shown, timed=False, any_optimizer=True))
    assert counts_text(rows, shown) == line


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_counts_of_models_with_adapters_are_those_of_the_table():
    lines = between("lora.md", "adapters").strip().splitlines()
    names = [pair.rpartition(" ")[0] for pair in lines[0].split(": ")[2].split(", ")]
    shown = columns(names, read_machine())[1:]
    found = []
    for words, method in (("All weights", "full"), ("Adapters", "lora")):
        job = {"name": "table", "model": {"source": "m"}, "data": {"source": "d"}}
        config = TrainConfig.from_dict(job | {"train": {"method": method}})
        rows = list(rows_of(config, shown, timed=False))
        found.append(f"{words}: {counts_text(rows, shown)}")
    assert found == lines


def test_laws_name_tests_that_exist():
    named = re.findall(r"`(tests/\S+?\.py)(?:::(\w+))?`", between("architecture.md", "laws"))
    assert len(named) >= 8
    for file, test in named:
        source = (PROGRAM_ROOT / file).read_text(encoding="utf-8")
        assert f"def {test}(" in source if test else True


def test_the_readme_is_short():
    text = (PROGRAM_ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES


@pytest.fixture
def pressed(tmp_path):
    """Presses Start with ten steps of the starter in the form, and returns the functions of the
    house that ran, as (file, qualified name) in the order of their first calls.
    """
    config = read_presets()[FIRST_PRESET].config.with_values({"train.steps": 10})
    session = Session(tmp_path / "runs")
    page = build_page(session, Checker(session))
    start = next(event for event in page.fns.values() if event.name == "start")
    by_id = {setting.elem_id: setting.dotted for setting in settings()}
    shown = shown_values(config)
    other = {"preset": FIRST_PRESET, "detached": False}
    values = {
        box: shown[by_id[box.elem_id]] if box.elem_id in by_id else other[box.elem_id]
        for box in start.inputs
    }
    called: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PROGRAM_ROOT)):
            file = Path(code.co_filename).relative_to(PROGRAM_ROOT).as_posix()
            called.setdefault((file, code.co_qualname.split(".<locals>")[0]))

    threading.setprofile(note)  # for the worker thread, which is not there yet
    sys.setprofile(note)
    try:
        start.fn(values)
        sys.setprofile(None)
        while session.active_id is not None:
            time.sleep(0.05)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # a thread reads it after `start` has returned
    session.close()
    return list(called)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_the_hops_from_the_click_to_the_kernel_run_in_this_order(pressed):
    named = hops()
    assert 1 < len(named) <= MOST_HOPS
    assert [hop for hop in named if hop not in pressed] == []
    places = [pressed.index(hop) for hop in named]
    assert places == sorted(places)


def readme_commands() -> list[list[str]]:
    """Returns the arguments of each command of the README, without what is said beside it."""
    text = (PROGRAM_ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python launch\.py (.*)$", text, re.MULTILINE)
    return [shlex.split(re.split(r"  +", line)[0]) for line in lines]


def test_the_readme_shows_the_commands():
    assert {command[0] for command in readme_commands()} >= {"train", "check", "runs", "export"}


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    "command",
    [command for command in readme_commands() if command[0] in ("check", "runs")],
    ids=str,
)
def test_a_command_of_the_readme_runs(tmp_path, monkeypatch, command):
    monkeypatch.chdir(PROGRAM_ROOT)
    does_not_fit = 1
    assert launch.main([*command, "--runs-dir", str(tmp_path)]) in (0, does_not_fit)


@pytest.mark.parametrize(
    "command",
    [command for command in readme_commands() if command[0] not in ("check", "runs")],
    ids=str,
)
def test_a_command_of_the_readme_is_understood(monkeypatch, command):
    asked: list[object] = []
    monkeypatch.setattr(launch, f"_{command[0]}", lambda arguments: asked.append(arguments) or 0)
    assert launch.main(command) == 0 and len(asked) == 1


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_readme_says_what_check_says(capsys):
    text = (PROGRAM_ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("<!-- fit -->\n")[1].split("<!-- /fit -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    assert len(rows) == 6
    for model, ram, disk, *seconds in rows:
        for machine, shown in zip(("RTX 4090", "H200"), seconds, strict=True):
            launch.main(["check", "--model", model, "--machine", machine, *PLENTY, "--json"])
            report = json.loads(capsys.readouterr().out)
            assert f"{report['time']['step_seconds']:.1f} s" == shown
            if machine == "RTX 4090":
                assert f"{report['host']['total'] / GIB:.0f} GiB" == ram
                assert f"{report['disk']['total'] / GIB:.0f} GiB" == disk
