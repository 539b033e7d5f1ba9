"""Changes to what is learned from pairs of answers."""

from __future__ import annotations

from tests.support.changes.record import Change

LOSSES = "engine/runtime/step/preference.py"
HEAD = "engine/runtime/step/preference_head.py"
ROWS = "engine/data/batches/pair_rows.py"
REFERENCES = "engine/training/loop/reference_logps.py"
TRL = "tests/engine/training/loop/test_pairs_as_trl.py"
TOKENS = "tests/engine/data/test_pairs_as_trl.py"
RUNS = "tests/engine/training/loop/test_pair_runs.py"

PAIRS = (
    Change(
        "pairs-the-wrong-way-round",
        LOSSES,
        "    return -logsigmoid(margin)\n",
        "    return -logsigmoid(-margin)\n",
        "DPO prefers the rejected answers.",
        (f"{RUNS}::test_validation_pairs_are_evaluated",),
    ),
    Change(
        "pairs-without-the-loss-of-lines",
        HEAD,
        "-(of_line[:, 0] * self.pairs.answer + of_line[:, 1])",
        "-(of_line[:, 0] * self.pairs.answer)",
        "ORPO and the SFT term have a loss without a gradient.",
        (f"{TRL}::test_orpo",),
    ),
    Change(
        "pairs-of-a-micro-batch-as-those-of-the-step",
        ROWS,
        "replace(each, pairs=pairs, chosen_tokens=tokens)",
        "replace(each, chosen_tokens=tokens)",
        "The loss of a step grows with the number of its micro-batches.",
        (f"{RUNS}::test_micro_batches_change_roundings_alone",),
    ),
    Change(
        "pairs-with-references-of-others",
        REFERENCES,
        "values[rows.order_of_evaluation()] = ",
        "values[:] = ",
        "Answers are compared with those of other pairs.",
        (f"{RUNS}::test_validation_pairs_are_evaluated",),
    ),
    Change(
        "pairs-with-references-of-trained-weights",
        REFERENCES,
        "    if prepared.step:\n",
        "    if False:\n",
        "A resumed run that has lost its references makes new ones of the weights it has trained.",
        (f"{RUNS}::test_a_run_without_its_references_is_not_resumed",),
    ),
    Change(
        "pairs-with-one-token-of-the-prompt",
        ROWS,
        "answer[:-1] = loss_mask[1:]",
        "answer[:-1] = loss_mask[1:] | np.roll(loss_mask[1:], -1)",
        "With ORPO, the last token of the prompt counts as one of the answer.",
        (f"{TRL}::test_orpo",),
    ),
    Change(
        "pairs-without-the-divergence",
        REFERENCES,
        "replace(batch.pairs, divergence=divergence)",
        "replace(batch.pairs)",
        "KTO compares with the reference alone, as if no other answer had become likelier.",
        (f"{TRL}::test_kto",),
    ),
    Change(
        "pairs-twice-through-the-head",
        HEAD,
        "at_once = len(chunks) == 1",
        "at_once = False",
        "Every pair passes twice through the head.",
        ("tests/engine/runtime/test_pair_head.py::test_a_pair_that_fits_passes_once",),
    ),
    Change(
        "pairs-of-one-rank-in-the-figures",
        "engine/runtime/step/collective_ops.py",
        "of_node = context.process_group.all_reduce(sums)",
        "of_node = sums",
        "Figures of pairs have zeros for the answers of other ranks.",
        ("tests/engine/runtime/test_pairs_on_ranks.py",),
    ),
    Change(
        "strangers-of-the-whole-data",
        ROWS,
        "size = self._order.batch_size or len(self)",
        "size = len(self)",
        "The first row of a batch is asked for an answer of another batch.",
        (f"{TRL}::test_kto_in_the_order_of_the_data_takes_the_other_answers_that_trl_does",),
    ),
    Change(
        "pairs-without-the-line-end",
        "engine/data/tokens/render.py",
        "before = [chat.until(context) for chat, context in todo]\n        texts = zip(full, ",
        "before = [chat.until(context) for chat, context in todo]\n"
        "        full = [one.rstrip() if isinstance(one, str) else one for one in full]\n"
        "        texts = zip(full, ",
        "Preferences lack the line end behind an answer, which TRL sums.",
        (f"{TOKENS}::test_a_pair",),
    ),
    Change(
        "pairs-whose-prompt-ends-with-a-character",
        "engine/data/tokens/encode.py",
        "loss_mask = np.arange(len(tokens)) >= begin",
        "trained &= np.arange(len(tokens)) >= begin",
        "The prompt of a pair ends elsewhere than TRL's where a token reaches over its end.",
        (f"{TOKENS}::test_families_whose_prompts_end_otherwise_than_their_texts",),
    ),
    Change(
        "pairs-without-the-system-turn",
        "engine/data/tokens/render.py",
        "in_prompt.context >= in_text.context or not is_next",
        "True or not is_next",
        "Answers of a pair stand behind a prompt without the system turn that the model is asked "
        "with.",
        (
            "tests/engine/data/test_dropped_turns.py::"
            "test_answers_of_a_pair_stand_behind_a_prompt_with_the_system_turn",
        ),
    ),
    Change(
        "pairs-with-marks",
        "engine/data/formats/formats.py",
        'if reads == "labels" and made.read_pair is not None:',
        "if False:",
        "KTO trains the chosen answer of a pair with the mark of its row, good or bad.",
        ("tests/engine/data/test_pairs.py::test_pairs_are_no_answers_with_marks",),
    ),
)
