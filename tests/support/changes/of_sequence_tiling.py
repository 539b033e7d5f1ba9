"""Changes to parts of blocks that run in sequence chunks along a row."""

from __future__ import annotations

from tests.support.changes.record import Change

MODULE = "engine/model/blocks/tiled_module.py"
TRIAL = "engine/model/blocks/position_wise.py"
KEPT = "engine/model/blocks/saved_attention.py"
KEPT_TESTS = "tests/engine/model/blocks/test_saved_attention.py"
MODULE_TESTS = "tests/engine/model/blocks/test_tiled_module.py"
LONG_ROWS = "tests/engine/planning/fit/test_long_rows.py"

SEQUENCE_TILING: tuple[Change, ...] = (
    Change(
        "chunk-gradients-in-bf16",
        MODULE,
        "parameter_gradients[place] = gradient.to(torch.float32, copy=True)",
        "parameter_gradients[place] = gradient.clone()",
        "Gradients of parameters are added up over sequence chunks in bf16.",
        (f"{MODULE_TESTS}::test_bf16_is_no_further_from_float32_than_whole_rows",),
    ),
    Change(
        "last-chunk-lost",
        MODULE,
        "for start in range(0, given.shape[1], chunk_tokens):",
        "for start in range(0, given.shape[1] - chunk_tokens + 1, chunk_tokens):",
        "The last tokens of a row that do not fill a sequence chunk are left out.",
        (f"{MODULE_TESTS}::test_float32_is_equal_within_rounding",),
    ),
    Change(
        "buffers-of-another-block",
        MODULE,
        "part._buffers.update(buffers)",
        "part._buffers.update({})",
        "Backward computes sequence chunks again with the buffers of the block that ran last.",
        (f"{MODULE_TESTS}::test_backward_has_the_buffers_of_its_forward",),
    ),
    Change(
        "random-modules-tiled",
        TRIAL,
        "if _keeps_more_than_input(part) and not _is_random(part):",
        "if _keeps_more_than_input(part):",
        "Modules with dropout run in sequence chunks, which draw other numbers in backward.",
        (
            "tests/engine/model/blocks/test_position_wise.py"
            "::test_the_largest_ones_that_keep_more_than_their_input_are_tiled",
        ),
    ),
    Change(
        "parameters-not-compared-in-the-trial",
        TRIAL,
        "joined += [torch.stack(each).sum(0) for each in of_results[2:]]",
        "whole = whole[:2]",
        "A trial does not compare the gradients of parameters.",
        (
            "tests/engine/model/blocks/test_position_wise.py"
            "::test_gradients_of_parameters_must_add_up_over_chunks",
        ),
    ),
    Change(
        "tiling-where-memory-suffices",
        "engine/planning/fit/choose.py",
        "return (0, *sequence_chunks_for(job.row_length))",
        "return (*sequence_chunks_for(job.row_length), 0)",
        "Long rows run in sequence chunks although whole rows fit.",
        (f"{LONG_ROWS}::test_the_plan_is_unchanged_where_memory_suffices",),
    ),
    Change(
        "resumed-without-tiling",
        "engine/planning/fit/choose.py",
        'return (job.rounding["tile_tokens"],)',
        "return (0,)",
        "A resumed run forgets its sequence tiling, and rounds otherwise.",
        (f"{LONG_ROWS}::test_a_resumed_run_keeps_its_tiling",),
    ),
    Change(
        "tiling-computed-again-for-nothing",
        "engine/planning/fit/cost_model.py",
        "+ self._run_again(unit)",
        "",
        "Predictions leave out that backward computes sequence chunks again.",
        (f"{LONG_ROWS}::test_backward_computes_what_is_tiled_once_more",),
    ),
    Change(
        "attention-not-copied",
        KEPT,
        "region.of(self._room).copy_(tensor)",
        "region.of(self._room)",
        "What attention returned is not written to its room, and backward finds older numbers.",
        (f"{KEPT_TESTS}::test_no_bit_changes_whichever_blocks_keep_attention",),
    ),
    Change(
        "numbers-behind-kept-attention",
        KEPT,
        "_generator(args[0].device).set_state(call.random_state)",
        "pass",
        "Dropout behind attention that does not run again draws other numbers in the recompute.",
        (f"{KEPT_TESTS}::test_dropout_behind_attention_draws_the_numbers_of_forward",),
    ),
    Change(
        "kept-attention-without-ram",
        "engine/planning/fit/buffer_sizes.py",
        " + activations.attention_blocks * micro_batches * more",
        "",
        "The report leaves out the RAM of what attention returned.",
        (f"{KEPT_TESTS}::test_what_is_allocated_is_what_the_report_says",),
    ),
    Change(
        "kept-attention-saves-nothing",
        "engine/planning/fit/cost_model.py",
        "again -= activations.attention_blocks * cost.attention",
        "again -= 0.0",
        "The closed form counts attention that does not run again.",
        (f"{LONG_ROWS}::test_ram_that_is_free_keeps_what_attention_returned",),
    ),
)
