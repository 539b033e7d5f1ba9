"""Events of a run that is drawn at random."""

from __future__ import annotations

import random

from engine.runs.record.events import (
    BestKept,
    CheckpointWritten,
    ControlReceived,
    DataPrepared,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    FitReported,
    ForecastChecked,
    JobProgressed,
    LogLine,
    MemorySampled,
    PlanBuilt,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
    StepTimeline,
    Unknown,
)


def random_run(seed: int):
    """Yields the events of a run with several sessions, each of which resumes at an earlier step or
    starts over.
    """
    rng = random.Random(seed)
    step = 0
    for session in range(rng.randint(1, 4)):
        resumed = rng.choice([None, rng.randint(0, step)]) if session else None
        step = resumed or 0
        if rng.random() < 0.7:
            yield StateChanged("preparing")
            yield PlanBuilt({"rounds": session}, "grid")
        yield RunStarted(name="n", total_steps=50, units=["embed", "head"], resumed_step=resumed)
        for _ in range(rng.randint(0, 60)):
            kind = rng.randrange(12)
            if kind < 5:
                step += 1
                yield StepFinished(
                    step,
                    rng.random(),
                    rng.random(),
                    1e-4,
                    100,
                    50,
                    rng.random(),
                    1e3,
                    0.5,
                    {
                        cause: rng.random()
                        for cause in rng.sample(["h2d", "d2h", "other", "new"], 2)
                    },
                )
            elif kind == 5:
                yield StepTimeline(
                    step,
                    [
                        {
                            "unit": "block 0",
                            "op": "prefetch",
                            "lane": "H2D",
                            "start": 0.0,
                            "end": rng.random(),
                        }
                    ],
                )
            elif kind == 6:
                yield MemorySampled(step, *(rng.randrange(10**12) for _ in range(8)))
            elif kind == 7:
                loss = rng.random()
                yield EvalFinished(step, loss, 10, 0.1, [loss, rng.random()], [6, 4])
                if rng.random() < 0.5:
                    yield BestKept(step, loss, f"best/step-{step}", 9, 0.1)
            elif kind == 8:
                yield JobProgressed(rng.choice(["export", "checkpoint"]), rng.randint(0, 4), 4, "m")
            elif kind == 9:
                yield rng.choice(
                    [
                        StateChanged("running"),
                        LogLine("warning", "w"),
                        ControlReceived("save"),
                        Unknown("newer", {"a": 1}),
                        DataPrepared({"rows": 5}),
                        FitReported({"verdict": "fits"}),
                        PlanBuilt({"rounds": 1}, "grid"),
                        ForecastChecked(
                            step,
                            "running",
                            {
                                "step_seconds": {
                                    "predicted": None,
                                    "measured": rng.random(),
                                    "error": None,
                                }
                            },
                        ),
                    ]
                )
            elif kind == 10:
                yield CheckpointWritten(step, "p", 12, 0.5)
            else:
                yield rng.choice(
                    [
                        ExactMatchMeasured(step, "after", 1, 2, [{"prompt": "p"}]),
                        ExportWritten(step, "e", 9),
                    ]
                )
        if rng.random() < 0.5:
            yield RunEnded(rng.choice(["finished", "stopped", "failed"]), "why", "Error")
