"""Presets are refused in plain words, take overrides, and come back the same when they are
saved.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest

from engine.config.export_choice import ExportChoice
from engine.config.help_texts import field_docs
from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError

SOURCES = {"model": {"source": "m"}, "data": {"source": "d.jsonl"}}


def config_with(dotted: str, value: object) -> TrainConfig:
    return TrainConfig.from_dict(SOURCES).with_values({dotted: value})


def refused(dotted: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config_with(dotted, value)
    assert caught.value.field == dotted
    message = str(caught.value)
    assert message.startswith(f"{dotted}: ")
    assert message.endswith(".")
    assert "\n" not in message
    return message


def preset(tmp_path, text: str):
    path = tmp_path / "preset.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------------- building


def test_only_the_sources_are_needed():
    config = TrainConfig.from_dict(SOURCES)
    assert config.train.learning_rate == 1e-5
    assert config.engine.slots == AUTO
    assert config.train.steps is None
    for missing in ("model", "data"):
        with pytest.raises(ConfigError, match=rf"^{missing}\.source: "):
            TrainConfig.from_dict(
                {name: value for name, value in SOURCES.items() if name != missing}
            )
    refused("model.source", "  ")


def test_unknown_keys_are_named_with_the_nearest_known_one():
    for tree, field, near in (
        ({"trian": {}}, "trian", "train"),
        ({"train": {"learning_rat": 1}}, "train.learning_rat", "learning_rate"),
        ({"engine": {"zzz": 1}}, "engine.zzz", "slots"),
    ):
        with pytest.raises(ConfigError) as caught:
            TrainConfig.from_dict({**SOURCES, **tree})
        assert caught.value.field == field and near in str(caught.value)
    with pytest.raises(ConfigError, match="^7: there is no such setting"):
        TrainConfig.from_dict({7: 1})


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("train.batch_size", "many"),
        ("train.batch_size", 1.5),
        ("train.batch_size", True),
        ("train.batch_size", None),
        ("train.batch_size", [1]),
        ("train.steps", "auto"),
        ("train.micro_batch_size", "half"),
        ("train.micro_batch_size", None),
        ("train.learning_rate", "fast"),
        ("train.learning_rate", False),
        ("train.learning_rate", {}),
        ("data.packing", "yes"),
        ("data.packing", 1),
        ("data.format", "csv"),
        ("data.format", None),
        ("data.format", ["text"]),
        ("model.dtype", "float16"),
        ("model.source", True),
        ("name", None),
        ("name", {"a": 1}),
        ("engine.activation_checkpointing", 0),
    ],
)
def test_wrong_types_are_refused(dotted, value):
    assert " is not " in refused(dotted, value)


def test_a_type_error_is_worded_as_in_a_preset():
    assert refused("data.packing", None) == "data.packing: null is not true or false."
    assert refused("name", True) == "name: true is not text."
    assert refused("model.init", "x") == "model.init: 'x' is not pretrained or random."
    assert refused("train.steps", 0.5) == "train.steps: 0.5 is not a whole number or null."


def test_numbers_are_taken_in_the_forms_that_yaml_gives_them():
    assert config_with("train.learning_rate", "3e-4").train.learning_rate == 3e-4
    assert config_with("train.learning_rate", 1).train.learning_rate == 1.0
    steps = config_with("train.steps", "1e3").train.steps
    assert steps == 1000 and isinstance(steps, int)
    assert config_with("train.steps", 20.0).train.steps == 20
    assert config_with("name", 7).name == "7"


@pytest.mark.parametrize(
    "dotted",
    [
        "train.learning_rate",
        "train.weight_decay",
        "train.eps",
        "train.epochs",
        "train.max_grad_norm",
        "train.label_smoothing",
        "train.neftune_alpha",
        "train.beta1",
        "data.eval_fraction",
        "engine.gpu_memory_gib",
    ],
)
def test_numbers_that_are_not_finite_are_refused_everywhere(dotted):
    for value in (math.nan, math.inf, -math.inf, "nan", ".inf", "inf", 10**400):
        refused(dotted, value)


# ---------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("dotted", "bad", "good"),
    [
        ("data.max_seq_len", [1, 0, -3], [2]),
        ("data.eval_fraction", [-0.1, 0.91, 1], [0, 0.9]),
        ("train.steps", [0, -1], [1, None]),
        ("train.epochs", [0, -0.5], [0.01, None]),
        ("train.batch_size", [0], [1]),
        ("train.micro_batch_size", [0, 5, 64], [AUTO, 1, 8, 32]),
        ("train.learning_rate", [0, -1e-5], [1e-9]),
        ("train.warmup_steps", [-1], [0]),
        ("train.weight_decay", [-0.01], [0]),
        ("train.beta1", [-0.1, 1.0], [0.0, 0.9999]),
        ("train.beta2", [-0.1, 1.0], [0.0, 0.9999]),
        ("train.eps", [0, -1e-8], [1e-5]),
        ("train.max_grad_norm", [0, -1], [0.5, None]),
        ("train.seed", [-1, 2**32], [0, 2**32 - 1]),
        ("train.label_smoothing", [-0.1, 1, 1.5], [0, 0.1, 0.999]),
        ("train.neftune_alpha", [-1, -1e-9], [0, 5, 15.5]),
        ("train.patience", [-1, 3], [0]),
        ("engine.gpu_memory_gib", [0, -4], [0.5, None]),
        ("engine.gpus", [0, -1, 3, 64, 65], [AUTO, 1, 2, 32]),
        ("engine.slots", [0], [AUTO, 1]),
        ("engine.blocks_kept_in_slots", [-1], [AUTO, 0]),
        ("engine.rounds", [0], [AUTO, 1]),
        ("output.checkpoint_every", [-1], [0]),
        ("output.eval_every", [-1], [0]),
        ("output.exact_match_samples", [-1], [0]),
        ("output.keep_checkpoints", [0], [1]),
        ("output.timeline_every", [0], [1]),
        ("output.sample_tokens", [0], [1]),
        ("train.decay_steps", [0], [1, None]),
        ("train.last_blocks", [-1], [0, 2]),
        ("preference.beta", [0, -1, 1001], [0.01]),
        ("preference.label_smoothing", [-0.1, 0.5], [0]),
        ("preference.sft_weight", [-1, 1001], [0]),
        ("preference.desirable_weight", [-1, 1001], [1]),
    ],
)
def test_every_range(dotted, bad, good):
    for value in bad:
        refused(dotted, value)
    section, name = dotted.split(".")
    for value in good:
        assert getattr(getattr(config_with(dotted, value), section), name) == value


@pytest.mark.parametrize(
    ("dotted", "value", "problem"),
    [
        ("train.steps", 0, "0 is too small; the least is 1."),
        ("data.max_seq_len", 10**8, "100,000,000 is too large; the most is 16,777,216."),
        ("train.seed", -1, "-1 is too small; the least is 0."),
        ("train.learning_rate", 0, "0.0 is not above 0; 1e-5 is usual."),
        ("train.weight_decay", -0.01, "-0.01 is below 0; give 0 or more."),
        ("train.beta1", 1, "1.0 is outside 0 to 1 (1 excluded)."),
        ("data.eval_fraction", 0.91, "0.91 is outside 0 to 0.9."),
        ("preference.beta", 0, "0.0 is outside 0 to 1,000 (0 excluded); 0.1 is usual."),
    ],
)
def test_a_number_that_is_outside_is_told_with_the_range(dotted, value, problem):
    assert refused(dotted, value) == f"{dotted}: {problem}"


def test_a_step_is_divided_among_gpus_evenly():
    asked = TrainConfig.from_dict({**SOURCES, "train": {"batch_size": 12, "micro_batch_size": 3}})
    assert asked.with_values({"engine.gpus": 4}).engine.gpus == 4
    with pytest.raises(ConfigError) as caught:
        asked.with_values({"engine.gpus": 6})
    assert str(caught.value) == (
        "train.micro_batch_size: 3 does not divide the 2 rows that each of 6 GPUs gets "
        "(train.batch_size / engine.gpus); choose a divisor of 2."
    )
    with pytest.raises(ConfigError, match="^engine.gpus: 5 does not divide train.batch_size 12"):
        asked.with_values({"engine.gpus": 5})


def test_several_gpus_have_no_disk_for_moments():
    on_disk = config_with("engine.disk", "/scratch")
    assert on_disk.with_values({"engine.gpus": 1}).engine.disk == "/scratch"
    with pytest.raises(ConfigError, match="^engine.disk: .* set engine.disk to null, or .* to 1"):
        on_disk.with_values({"engine.gpus": 2})


def test_a_patience_needs_evaluations():
    with pytest.raises(ConfigError, match=r"train\.patience: 3 .* set output\.eval_every"):
        config_with("train.patience", 3)
    tree = {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"patience": 3}}
    config = TrainConfig.from_dict(tree | {"output": {"eval_every": 10}})
    assert config.train.patience == 3 and config.output.keeps_best
    assert not config.with_values({"output.keep_best": "none"}).output.keeps_best


def test_exact_match_needs_prompts_to_compare():
    with pytest.raises(ConfigError, match="exact_match compares .*exact_match_samples, or"):
        config_with("output.keep_best", "exact_match")
    with pytest.raises(ConfigError, match="keep_best"):
        config_with("output.keep_best", "accuracy")
    tree = {"model": {"source": "m"}, "data": {"source": "d"}}
    output = {"keep_best": "exact_match", "exact_match_samples": 1, "eval_every": 5}
    found = TrainConfig.from_dict(tree | {"output": output}).output
    assert found.best_by == "exact_match" and found.keeps_best
    assert TrainConfig.from_dict(tree | {"output": {"keep_best": "none"}}).output.best_by == "loss"


def test_one_export_is_of_one_step():
    with pytest.raises(ConfigError, match="step 3 and the best weights are both asked for"):
        ExportChoice(3, weights="best")
    with pytest.raises(ConfigError, match=r"output\.export_from: 'first' is unknown"):
        ExportChoice(weights="first")


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(ConfigError, match="^train.steps: steps and epochs are both given"):
        TrainConfig.from_dict({**SOURCES, "train": {"steps": 10, "epochs": 1}})


# ---------------------------------------------------------------------- files and overrides


def test_a_saved_preset_loads_as_the_same_configuration(tmp_path):
    config = TrainConfig.from_dict(
        {
            "name": "Zwölf: 'quotes' # and 한국어 🦙",
            "model": {"source": "a b/ü", "init": "random", "dtype": "float32"},
            "data": {"source": "2024-01-01", "packing": False, "eval_fraction": 0},
            "train": {
                "steps": 3,
                "micro_batch_size": 4,
                "learning_rate": 3e-4,
                "eps": 1e-12,
                "max_grad_norm": None,
            },
            "engine": {"slots": 3, "gpu_memory_gib": 7.5},
            "output": {"export": False},
        }
    )
    path = tmp_path / "preset.yaml"
    config.save(path)
    assert TrainConfig.load(path) == config
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.load(path, ["name=x"]) == dataclasses.replace(config, name="x")


def test_empty_sections_and_an_empty_preset(tmp_path):
    path = preset(tmp_path, "model: {source: m}\ndata: {source: d}\ntrain:\nengine:\noutput: {}\n")
    assert TrainConfig.load(path) == TrainConfig.from_dict(
        {"model": {"source": "m"}, "data": {"source": "d"}}
    )
    for text in ("", "# only a comment\n", "model:\n"):
        with pytest.raises(ConfigError, match="^model.source: no model is given"):
            TrainConfig.load(preset(tmp_path, text))


def test_overrides_set_fields_that_the_preset_has_or_lacks(tmp_path):
    path = preset(tmp_path, "model: {source: m}\ndata: {source: d}\ntrain: {epochs: 2}\nengine:\n")
    config = TrainConfig.load(
        path,
        [
            "train.epochs=null",
            "train.steps=7",
            "train.learning_rate=3e-4",
            "engine.slots=3",
            "data.packing=false",
            "train.max_grad_norm=",
            "name=a=b",
            " output.export = no ",
            "train.steps=8",
        ],
    )
    assert (config.train.epochs, config.train.steps, config.train.learning_rate) == (None, 8, 3e-4)
    assert (config.engine.slots, config.data.packing, config.output.export) == (3, False, False)
    assert config.train.max_grad_norm is None and config.name == "a=b"


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.steps", "--set"),
        ("=5", "--set"),
        ("", "--set"),
        ("train.stepz=5", "train.stepz"),
        ("steps=5", "steps"),
        ("train=5", "train"),
        ("train.steps.more=5", "train.steps.more"),
        ("name.first=x", "name.first"),
        ("train..steps=5", "train."),
        ("train.steps=[1", "train.steps"),
        ("train.steps=many", "train.steps"),
        ("name=2024-13-45", "name"),
        ("name=!!int x", "name"),
        ("name=!!timestamp x", "name"),
        ("name=!!bool x", "name"),
    ],
)
def test_bad_overrides_name_the_field(tmp_path, override, field):
    path = preset(tmp_path, "name: n\nmodel: {source: m}\ndata: {source: d}\ntrain: {steps: 1}\n")
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path, [override])
    assert caught.value.field == field and "\n" not in str(caught.value)


def test_a_date_is_a_name_too(tmp_path):
    path = preset(tmp_path, "name: 2024-01-31\nmodel: {source: m}\ndata: {source: d}")
    assert TrainConfig.load(path).name == "2024-01-31"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {source: m\n", "not valid YAML near line"),
        ("a\tb: [", "not valid YAML"),
        ("name: 2024-13-45", "not valid YAML"),
        ("- model\n- data\n", "is a mapping of sections"),
        ("just text", "is a mapping of sections"),
    ],
)
def test_files_that_are_no_preset(tmp_path, text, says):
    path = preset(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        TrainConfig.load(path)
    assert caught.value.field == str(path) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    for path, says in (
        (tmp_path / "none.yaml", "no such preset"),
        (tmp_path, "this is a folder"),
        (tmp_path / "binary.yaml", "cannot be read"),
        (tmp_path / "binary.yaml" / "x", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            TrainConfig.load(path)


def test_with_values_leaves_the_original_and_refuses_unknown_fields():
    config = TrainConfig.from_dict(SOURCES)
    other = config.with_values({"train.steps": 5, "name": "n"})
    assert (other.train.steps, other.name, config.train.steps) == (5, "n", None)
    with pytest.raises(ConfigError, match="^train.nothing: "):
        config.with_values({"train.nothing": 1})


def test_a_section_that_is_no_mapping_is_named():
    for value in (5, "x", [1], True):
        with pytest.raises(ConfigError, match="^train: expected a mapping"):
            TrainConfig.from_dict({**SOURCES, "train": value})
    with pytest.raises(ConfigError, match="^preset: expected a mapping of settings, found null"):
        TrainConfig.from_dict(None)


def test_every_setting_is_documented():
    def leaves(value: object, prefix: str = "") -> set[str]:
        if not dataclasses.is_dataclass(value):
            return {prefix}
        return set().union(
            *(
                leaves(getattr(value, f.name), f"{prefix}.{f.name}".lstrip("."))
                for f in dataclasses.fields(value)
            )
        )

    docs = field_docs()
    assert set(docs) == leaves(TrainConfig()) and all(docs.values())


def test_no_torch_is_imported():
    code = (
        "import sys, engine.config.settings, engine.runs.record.run_folder, "
        "engine.training.checkpoints.checkpoint; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
