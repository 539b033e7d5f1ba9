"""Changes to what is kept of the best weights, exported and ended early."""

from __future__ import annotations

from tests.support.changes.record import Change

BEST_WEIGHTS = "engine/training/loop/best_weights.py"
LEARNING = "engine/training/loop/early_stopping.py"
VALIDATION = "engine/runs/record/validation.py"
ROWS = "engine/runtime/step/per_document.py"
BEST = "tests/engine/training/loop/test_best_weights.py"
FOLD = "tests/engine/runs/record/test_validation.py"
EVALUATION = "tests/engine/runtime/test_evaluation.py"

LEARNED = (
    Change(
        "rows-take-each-other-s-losses",
        ROWS,
        "np.repeat(np.arange(len(tokens)), tokens)",
        "np.repeat(np.arange(len(tokens)), tokens[::-1])",
        "The losses of single documents are added up for other ones.",
        (EVALUATION,),
    ),
    Change(
        "worse-weights-kept",
        BEST_WEIGHTS,
        "if not all(score.is_better_than(each, validation.by) for each in known):",
        "if all(score.is_better_than(each, validation.by) for each in known):",
        "Weights that are worse take the place of the best.",
        (BEST,),
    ),
    Change(
        "best-weights-not-protected",
        "engine/training/checkpoints/async_writer.py",
        "        if not self._states.held.read_by(step, snapshot):\n            return False\n",
        "        snapshot.arm()\n",
        "Updates of later steps change the best weights while they are written.",
        (BEST,),
    ),
    Change(
        "checkpoints-without-room",
        BEST_WEIGHTS,
        "if free >= needed + sum(others.values()):",
        "if free >= needed:",
        "The best weights take the room that a checkpoint or the export needs.",
        (BEST,),
    ),
    Change(
        "last-exported-as-the-best",
        LEARNING,
        "        if chosen.step != step and not self._take_up(chosen.step, step):\n",
        "        if False:\n",
        "The weights of the last step are exported and said to be the best.",
        (BEST,),
    ),
    Change(
        "best-before-training",
        VALIDATION,
        "            self.before = score\n            return\n",
        "            self.before = score\n",
        "The weights with which a run began count as its best.",
        (FOLD, BEST),
    ),
    Change(
        "best-though-worse-than-before",
        VALIDATION,
        "score.is_better_than(self.best or self.before, self.by)",
        "score.is_better_than(self.best, self.by)",
        "Weights that are worse than those before training count as the best.",
        (FOLD,),
    ),
    Change(
        "patience-counted-anew",
        VALIDATION,
        "                self._compare(Score(of, evals.loss[place], correct, total))\n",
        "                self._compare(Score(of, evals.loss[place], correct, total))\n"
        "        self.since_best = 0\n",
        "A resumed run has its whole patience again.",
        (FOLD, BEST),
    ),
    Change(
        "equal-shares-by-the-later",
        VALIDATION,
        "return (1.0 if score.share is None else -score.share), score.loss",
        "return (1.0 if score.share is None else -score.share), -score.loss",
        "Of weights that answer as many prompts exactly, those with the higher loss are kept.",
        (FOLD,),
    ),
)
