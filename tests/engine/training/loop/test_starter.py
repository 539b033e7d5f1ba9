"""The bundled starter equals the output of its script and learns what it should, and every bundled
preset is a valid configuration.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

import launch
from engine.config.settings import TrainConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.rows import batches
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import ExactMatchMeasured, StepFinished
from engine.runs.record.following import replay
from engine.runs.record.run_folder import open_run
from engine.runs.summaries.listing import list_runs
from tests.support.soak import growth_after, train_on_the_command_line

ASSETS, PRESETS = PROGRAM_ROOT / "assets", PROGRAM_ROOT / "presets"
WHOLE_STEPS = 450
WHOLE_SECONDS = "a process of its own trains the whole starter, for 50 seconds"
LEVEL_STEPS = 240
"""After so many steps, a process that grows with them has grown for more than a hundred."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_starter", ASSETS / "make" / "starter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def starter():
    config = TrainConfig.load(PRESETS / "starter.yaml")
    tokenizer = AutoTokenizer.from_pretrained(PROGRAM_ROOT / config.model.source)
    return config, tokenizer, prepare_data(config.data, tokenizer, config.train.seed)


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid(path: Path):
    config = TrainConfig.load(path)
    assert config.name != "Untitled" and TrainConfig.from_dict(config.to_dict()) == config


def test_the_data_are_what_the_script_makes(script):
    rows = [
        json.loads(line)
        for line in (ASSETS / "starter.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert rows == script.conversations()
    answers = [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"]
    assert len(answers) == len(set(answers)) == script.LARGEST
    assert [script.roman(n) for n in (1, 4, 9, 14, 40, 90, 400, 1994, 2021, 3999)] == [
        "I",
        "IV",
        "IX",
        "XIV",
        "XL",
        "XC",
        "CD",
        "MCMXCIV",
        "MMXXI",
        "MMMCMXCIX",
    ]


def test_the_tokenizer_is_what_the_script_makes_and_loads_unchanged(script, starter):
    _, tokenizer, _ = starter
    made = script.make_tokenizer(script.conversations())
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    text = "How did Romans write 1994? MCMXCIV, naturally: ünïcode 日 too"
    assert made(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert "generation %}" not in tokenizer.chat_template
    assert AutoConfig.from_pretrained(ASSETS / "starter-model").vocab_size == len(tokenizer)


def test_the_starter_is_small(starter):
    config, _, data = starter
    bundled = [*(ASSETS / "starter-model").iterdir(), ASSETS / "starter.jsonl"]
    assert sum(path.stat().st_size for path in bundled) < 4 * 2**20
    tokens = sum(
        batch.tokens
        for step in range(1, config.train.steps + 1)
        for batch in batches(
            data.train,
            config.train.batch_size,
            config.train.batch_size,
            step,
        )
    )
    assert tokens < 450_000 and max(data.train.row_lengths) <= 128


def test_the_validation_questions_are_enough_and_new(starter):
    config, tokenizer, data = starter
    prompts = data.eval_prompts(config.output.exact_match_samples)
    assert len(prompts) == config.output.exact_match_samples
    assert data.summary["warnings"] == []
    assert data.summary["rows_skipped"] == data.summary["rows_cut"] == 0
    taught = "".join(tokenizer.convert_ids_to_tokens(data.train.ids.tolist())).split(
        "<|assistant|>"
    )
    known = {answer.split("<|end|>")[0] for answer in taught}
    assert not known & {prompt.expected_text for prompt in prompts}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """Returns a folder with the run of the whole starter, which a process of its own trains, with
    evaluations and checkpoints.
    """
    folder = tmp_path_factory.mktemp("whole")
    settings = ("output.eval_every=40", "output.checkpoint_every=60")
    train_on_the_command_line(WHOLE_STEPS, folder, *settings)
    return folder


@pytest.mark.parametrize(
    "steps, questions, right, loss",
    [
        pytest.param(120, 20, 4, 0.5, id="short"),
        pytest.param(WHOLE_STEPS, 100, 80, 0.2, id="whole", marks=pytest.mark.slow(WHOLE_SECONDS)),
    ],
)
def test_the_starter_learns_roman_numerals(tmp_path, request, steps, questions, right, loss):
    """No validation question is answered exactly before training, and at least `right` of
    `questions` are after it.
    """
    if steps == WHOLE_STEPS:
        folder = request.getfixturevalue("whole_run")
    elif request.config.option.everything:
        pytest.skip("the whole run shows what the short one does")
    else:
        folder = tmp_path
        changes = (f"train.steps={steps}", f"output.exact_match_samples={questions}")
        arguments = [word for change in changes for word in ("--set", change)]
        starter = PRESETS / "starter.yaml"
        assert launch.main(["train", str(starter), "--runs-dir", str(folder), *arguments]) == 0
    (run,) = list_runs(folder)
    assert run.state == "finished"
    events = [record.event for record in replay(open_run(folder, run.id).events_path)]
    before, after = [event for event in events if isinstance(event, ExactMatchMeasured)]
    assert (before.correct, before.total, after.total) == (0, questions, questions)
    assert after.correct >= right
    losses = [event.loss for event in events if isinstance(event, StepFinished)]
    assert len(losses) == steps and losses[-1] < loss < 1 < losses[0]


@pytest.mark.slow("a process of its own trains the starter, for 20 seconds")
def test_memory_does_not_grow_with_the_steps_of_packed_rows(tmp_path):
    # When each update left 200 bytes, these steps took 270 KiB more each. The heap of a young
    # process still spreads, by up to 90 KiB a step here. `tests.browser.soak` measures an older
    # one, and test_a_kernel_gives_back_every_array_that_it_was_given finds the cause itself.
    settings = ("output.eval_every=0", "output.checkpoint_every=0", "output.exact_match_samples=0")
    growth = growth_after(train_on_the_command_line(LEVEL_STEPS, tmp_path, *settings), 100)
    assert growth.steps > 100
    assert growth.nbytes / growth.steps < 128 << 10


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_the_starter_with_adapters_learns_and_leaves_its_adapter(tmp_path):
    preset = str(PRESETS / "starter-lora.yaml")
    assert launch.main(["train", preset, "--runs-dir", str(tmp_path / "runs")]) == 0
    (listed,) = list_runs(tmp_path / "runs")
    folder = open_run(tmp_path / "runs", listed.id)
    events = list(replay(folder.path / "events.jsonl"))
    before, after = (e.event for e in events if isinstance(e.event, ExactMatchMeasured))
    assert before.correct == 0 and after.correct >= 0.9 * after.total
    exported = folder.path / "export"
    assert (exported / "adapter_model.safetensors").is_file()
    settings = json.loads((exported / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["r"] == 8 and settings["lora_alpha"] == 16
