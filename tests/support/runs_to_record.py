"""`tests/support/recorded_runs.py` records these runs, and the verdict is judged by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Recorded:
    """A `Recorded` is a run to be made, and what the verdict should say of it at its end."""

    name: str
    expected: str
    """The rule of the headline; several are separated by a bar where each is right."""
    rows: str = "sums"
    """The rows are made by this function of `ROWS`."""
    count: int = 400
    width: int = 32
    blocks: int = 2
    seed: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    """These values are set by dotted name over `SETTINGS`."""
    changes: dict[int, float] = field(default_factory=dict)
    """After this step, a person sets this learning rate."""
    stop: int | None = None
    """After this step, a person stops the run."""
    leak: Callable[[int], int] | None = None
    """So many bytes are taken, and never freed, after each step."""
    model: str = ""
    """The run begins with the weights of this model in `assets`; an empty text means a random model
    of `width` and `blocks`, or the starter's for its rows.
    """
    first: int = 0
    """Of the starter's rows, so many are left out, and the next `count` taken if they are few."""
    limit: int = 0
    """The run believes that it may use this many bytes of RAM; 0 means as many as there are."""
    missed: str = ""
    """This is said instead, where the verdict does not say what it should."""


SETTINGS: dict[str, Any] = {
    "model.init": "random",
    "model.dtype": "float32",
    "data.max_seq_len": 64,
    "data.eval_fraction": 0.1,
    "train.steps": 300,
    "train.batch_size": 8,
    "train.learning_rate": 3e-3,
    "train.warmup_steps": 20,
    "output.eval_every": 25,
    "output.export": False,
    "output.checkpoint": "none",
    "output.timeline_every": 100_000,
    "engine.device": "cpu",
}


def _steady_leak(_: int) -> int:
    return 8 * MIB


def _small_leak(_: int) -> int:
    return 3 * MIB


def _warming_up_slowly(step: int) -> int:
    return int(30 * MIB * 0.985**step)


def _warming_up(step: int) -> int:
    """A server that fills its caches: much at first, then less and less."""
    return int(200 * MIB * 0.97**step)


FREE = {"train.max_grad_norm": None, "train.schedule": "constant"}
"""The rate stays as high as it is set, and no gradient is clipped."""

TUNED = (
    Recorded("sums", "doing well"),
    Recorded("sums-noisy", "doing well", settings={"train.batch_size": 2}),
    Recorded("sums-wide", "doing well", width=64, blocks=3, settings={"train.schedule": "linear"}),
    Recorded("reversed", "doing well", "reversed", 800),
    Recorded("copied", "doing well", "copied", 800, settings={"train.schedule": "constant"}),
    Recorded("mixed", "doing well", "mixed", 1500, settings={"train.batch_size": 4}),
    Recorded(
        "mixed-unpacked",
        "doing well",
        "mixed",
        1500,
        settings={"data.packing": False, "train.batch_size": 2},
    ),
    Recorded("all-tokens", "doing well", settings={"data.train_on": "all"}),
    Recorded("no-evaluation", "doing well", settings={"output.eval_every": 0}),
    Recorded("no-warm-up", "doing well", "copied", settings={"train.warmup_steps": 0}),
    Recorded("short", "doing well", settings={"train.steps": 12}),
    Recorded(
        "starter",
        "doing well",
        "starter",
        settings={"train.steps": 120, "train.learning_rate": 4e-3, "train.beta2": 0.98}
        | {"data.max_seq_len": 128, "output.exact_match_samples": 20},
    ),
    Recorded("by-heart-24", "overfitting", "unrelated", 24, settings={"train.learning_rate": 5e-3}),
    Recorded("by-heart-80", "overfitting", "unrelated", 80, 64, settings={"train.steps": 500}),
    Recorded("by-heart-sums", "overfitting", "sums", 40, 48, settings={"train.steps": 400}),
    Recorded("by-heart-words", "overfitting", "reversed", 60, settings={"train.steps": 500}),
    Recorded(
        "raised-rate",
        "diverging",
        settings={"train.max_grad_norm": None, "train.schedule": "constant"},
        changes={150: 1.0},
    ),
    Recorded(
        "rate-1",
        "rate too high",
        settings=FREE | {"train.learning_rate": 1.0, "train.warmup_steps": 100},
    ),
    Recorded(
        "late-peak",
        "doing well",
        "copied",
        800,
        64,
        3,
        settings=FREE | {"train.learning_rate": 0.1, "train.warmup_steps": 150},
    ),
    Recorded(
        "rate-0.03",
        "doing well",
        width=64,
        blocks=3,
        settings=FREE | {"train.learning_rate": 0.03, "train.warmup_steps": 0},
    ),
    Recorded(
        "raised-rate-0.3",
        "diverging",
        "copied",
        800,
        64,
        3,
        settings=FREE | {"train.steps": 250},
        changes={120: 0.3},
    ),
    Recorded(
        "rate-0.3",
        "plateau",
        "copied",
        settings=FREE | {"train.learning_rate": 0.3, "train.warmup_steps": 150},
    ),
    Recorded("rate-1000", "ended", settings=FREE | {"train.learning_rate": 1000.0}),
    Recorded("rate-1e-7", "not learning", settings={"train.learning_rate": 1e-7}),
    Recorded("rate-3e-5", "rate too low", settings={"train.learning_rate": 3e-5}),
    Recorded(
        "nothing-exact",
        "nothing exact",
        "products",
        400,
        settings={"output.exact_match_samples": 20, "train.steps": 150},
    ),
    Recorded(
        "leak",
        "memory",
        settings={"train.steps": 2000, "output.eval_every": 0},
        stop=150,
        leak=_steady_leak,
        limit=4096 * MIB,
    ),
    Recorded(
        "warming-up",
        "doing well",
        settings={"train.steps": 300},
        leak=_warming_up,
        limit=9500 * MIB,
    ),
)
"""The rules were tuned on these."""

HELD = (
    Recorded(
        "starter-whole",
        "doing well",
        "starter",
        settings={"train.steps": 450, "train.learning_rate": 4e-3, "train.beta2": 0.98}
        | {"data.max_seq_len": 128, "data.eval_fraction": 0.04, "output.eval_every": 75}
        | {"output.exact_match_samples": 20},
    ),
    Recorded("sorted", "doing well", "sorted", 900, 40, seed=11, settings={"train.beta2": 0.98}),
    Recorded(
        "counted", "doing well", "counted", 600, seed=12, settings={"train.learning_rate": 4e-3}
    ),
    Recorded(
        "sorted-noisy",
        "doing well",
        "sorted",
        900,
        seed=13,
        settings={"train.batch_size": 1, "train.learning_rate": 1e-3},
    ),
    Recorded(
        "none-exact",
        "nothing exact",
        "products",
        2000,
        40,
        seed=14,
        settings={"train.steps": 200, "output.exact_match_samples": 20},
    ),
    Recorded(
        "by-heart-sorted",
        "overfitting",
        "sorted",
        50,
        48,
        seed=15,
        settings={"train.steps": 500, "train.learning_rate": 4e-3},
    ),
    Recorded(
        "by-heart-products",
        "overfitting",
        "products",
        30,
        64,
        seed=16,
        settings={"train.steps": 400, "output.eval_every": 20},
    ),
    Recorded(
        "by-heart-slowly",
        "overfitting",
        "unrelated",
        120,
        48,
        seed=17,
        settings={"train.steps": 600, "train.learning_rate": 1.5e-3, "output.eval_every": 40},
    ),
    Recorded(
        "raised-to-0.1",
        "diverging",
        "sorted",
        900,
        40,
        seed=18,
        settings=FREE | {"train.steps": 250},
        changes={100: 0.1},
        missed="rate too high",
    ),
    Recorded(
        "raised-to-3", "diverging", "counted", 600, seed=19, settings=FREE, changes={180: 3.0}
    ),
    Recorded(
        "raised-and-clipped",
        "diverging",
        "copied",
        600,
        seed=20,
        settings={"train.schedule": "constant", "train.steps": 250},
        changes={120: 0.5},
    ),
    Recorded(
        "peak-0.5",
        "diverging|rate too high",
        "reversed",
        800,
        48,
        seed=21,
        settings=FREE | {"train.learning_rate": 0.5, "train.warmup_steps": 150},
    ),
    Recorded(
        "rate-3e-8", "not learning", "sorted", seed=22, settings={"train.learning_rate": 3e-8}
    ),
    Recorded(
        "rate-2e-5", "rate too low", "counted", seed=23, settings={"train.learning_rate": 2e-5}
    ),
    Recorded("rate-1e5", "ended", "sorted", seed=24, settings=FREE | {"train.learning_rate": 1e5}),
    Recorded(
        "small-leak",
        "memory",
        "sorted",
        seed=25,
        settings={"train.steps": 4000, "output.eval_every": 0},
        stop=250,
        leak=_small_leak,
        limit=2048 * MIB,
    ),
    Recorded(
        "slow-warming-up",
        "doing well",
        "sorted",
        900,
        seed=26,
        settings={"train.steps": 400},
        leak=_warming_up_slowly,
        limit=6144 * MIB,
    ),
)
"""These were made once the rules were frozen."""
STARTER = {
    "train.learning_rate": 4e-3,
    "train.beta2": 0.98,
    "data.max_seq_len": 128,
    "data.eval_fraction": 0.04,
    "output.exact_match_samples": 16,
}
SIX_ROWS = STARTER | {
    "train.steps": 200,
    "data.eval_fraction": 0.2,
    "train.batch_size": 5,
}
POLITE: dict[str, Any] = {
    "train.steps": 120,
    "train.warmup_steps": 10,
    "train.schedule": "linear",
    "output.eval_every": 20,
}
ENDS = (
    Recorded(
        "rate-5",
        "diverging|worse than before training",
        "starter",
        settings=STARTER
        | {"train.learning_rate": 5.0, "train.schedule": "constant", "train.steps": 150}
        | {"output.eval_every": 30},
    ),
    Recorded(
        "six-rows",
        "memorizes",
        "starter",
        6,
        first=21,
        settings=SIX_ROWS,
    ),
    Recorded(
        "six-other-rows",
        "worse than before training",
        "starter",
        6,
        settings=SIX_ROWS,
    ),
    Recorded(
        "healthy",
        "doing well",
        "starter",
        settings=STARTER | {"train.steps": 250, "output.eval_every": 50},
    ),
    Recorded(
        "lora",
        "doing well",
        "polite",
        model="preference-model",
        settings=POLITE | {"train.method": "lora", "train.learning_rate": 5e-3},
    ),
    Recorded("noisy", "doing well", "mixed", 900, seed=31, settings={"train.batch_size": 1}),
    Recorded("rate-0", "not learning", "copied", seed=32, settings={"train.learning_rate": 1e-9}),
    Recorded(
        "drift",
        "overfitting",
        "unrelated",
        160,
        48,
        seed=33,
        settings={"train.steps": 400, "train.learning_rate": 1e-3, "output.eval_every": 40}
        | {"data.eval_fraction": 0.2},
    ),
    Recorded(
        "diverges-late",
        "diverging",
        "counted",
        600,
        seed=34,
        settings=FREE | {"train.steps": 250},
        changes={180: 1.0},
    ),
    Recorded(
        "spike",
        "doing well",
        "counted",
        600,
        seed=35,
        settings={"train.schedule": "constant"},
        changes={120: 0.05, 124: 3e-3},
    ),
    Recorded(
        "pairs",
        "doing well",
        "preferences",
        model="preference-model",
        settings=POLITE
        | {"train.learning_rate": 2e-4, "train.objective": "dpo", "output.eval_every": 20},
    ),
    Recorded(
        "no-validation",
        "doing well",
        "sorted",
        600,
        seed=36,
        settings={"output.eval_every": 0, "data.eval_fraction": 0.0},
    ),
)
"""These have an end that is known, and that a person would name as the verdict should."""
SETS = {"tuned": TUNED, "held": HELD, "ends": ENDS}
