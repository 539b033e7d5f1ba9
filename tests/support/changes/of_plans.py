"""Changes to how a step is planned: slots, waits, their proof, and the search for the best plan."""

from __future__ import annotations

from tests.support.changes.record import Change

WAITS = "engine/planning/schedule/derive_waits.py"
VALIDATE = "engine/planning/schedule/verify_plan.py"
SLOTS = "engine/planning/schedule/prefetch_slots.py"
WRITE = "engine/planning/schedule/write_ops.py"
UPDATES = "engine/planning/schedule/device_updates.py"
SIZES = "engine/planning/fit/device_memory.py"
CHOOSE = "engine/planning/fit/choose.py"
FILL = "engine/planning/fit/fill_memory.py"
NEEDS = "engine/planning/fit/requirements.py"
LAWS = "tests/engine/planning/schedule/test_laws.py"
VALIDATOR = f"{LAWS}::test_dropping_any_single_wait_is_found"
GRID = f"{LAWS}::test_every_plan_of_a_size_grid_validates"
GOLDEN = "tests/engine/planning/schedule/test_golden_plans.py"
DEVICE_UPDATES = "tests/engine/runtime/test_plans_with_device_updates.py"
GPU_TESTS = "tests/engine/planning/fit/test_several_gpus.py"
SIZE_TESTS = "tests/engine/planning/fit/test_sizes.py"
CHOOSE_TESTS = "tests/engine/planning/fit/test_choose.py"
CONTINUED = "test_a_session_is_continued_on_a_cpu"
LIMIT_TESTS = "tests/engine/planning/fit/test_choose_limits.py"
ITEM_TESTS = "tests/engine/planning/fit/test_memory_items.py"
POOL, POOL_COSTS = "engine/planning/fit/pool.py", "engine/planning/fit/pool_costs.py"
POOL_TESTS = "tests/engine/planning/fit/test_pool.py"
POOL_COSTS_TESTS = "tests/engine/planning/fit/test_pool_costs.py"

PLANS = (
    Change(
        "pass-before-a-step-not-counted",
        "engine/planning/fit/simulate_step.py",
        "    if not micro_batch.has_pass:\n",
        "    if micro_batch is not None:\n",
        "The pass that KTO makes before each step is not in the seconds of a step.",
        ("tests/engine/planning/fit/test_extra_pass.py",),
    ),
    Change(
        "slot-overwritten-while-it-is-read",
        WAITS,
        "            needs.update(self._readers.get(buffer, ()))\n",
        "",
        "A prefetch does not wait for the ops that read its slot.",
        (GRID, LAWS),
    ),
    Change(
        "slot-read-before-it-is-filled",
        WAITS,
        "needs = {writer[buffer] for buffer in draft.reads if buffer in writer}",
        "needs = set()",
        "An op does not wait for the one that fills what it reads.",
        (GRID, LAWS),
    ),
    Change(
        "waits-that-others-imply",
        WAITS,
        "            if clock.get(self._lanes[need], -1) >= need:\n                continue\n",
        "",
        "A plan keeps waits that lane order or other waits imply.",
        (GOLDEN, VALIDATOR),
    ),
    Change(
        "ring-of-a-pair-not-read-by-its-backward",
        "engine/planning/schedule/unit_ops.py",
        "self._backward(first, micro_batch, round_, ring, recomputes=False)",
        "self._backward(first, micro_batch, round_, recomputes=False)",
        "The next block input overwrites what the backward of a pair still reads.",
        (f"{LAWS}::test_delays_in_any_lane_change_nothing", GOLDEN),
    ),
    Change(
        "writes-not-proved",
        VALIDATE,
        "        self._check_writes(op, clock)\n",
        "",
        "The proof does not see that a buffer is overwritten too early.",
        (VALIDATOR,),
    ),
    Change(
        "contents-not-proved",
        VALIDATE,
        "if found != content:",
        "if found is None:",
        "The proof does not see that a slot holds another block.",
        (f"{LAWS}::test_a_wrong_slot_is_found_and_shown", LAWS),
    ),
    Change(
        "one-step-proved",
        VALIDATE,
        "for step in (0, 1):",
        "for step in (0,):",
        "The proof does not look at waits for the step before.",
        (VALIDATOR,),
    ),
    Change(
        "later-ops-count-as-before",
        VALIDATE,
        "return clock.get(lane, -1) >= position",
        "return True",
        "The proof takes every op for one that has ended.",
        (VALIDATOR,),
    ),
    Change(
        "blocks-fetched-again",
        SLOTS,
        "fetch=content.get(slot) != unit",
        "fetch=True",
        "A block that is still in its slot is fetched again.",
        (GOLDEN,),
    ),
    Change(
        "slots-not-in-turn",
        SLOTS,
        "number=position % slots)",
        "number=min(position, slots - 1))",
        "All but the first streamed blocks take the last slot.",
        (GOLDEN, GRID),
    ),
    Change(
        "prefetch-too-late",
        WRITE,
        "last = min(self._current + self._choices.streaming.prefetch_depth, len(self._uses) - 1)",
        "last = min(self._current, len(self._uses) - 1)",
        "Blocks are fetched when they are needed, and not before.",
        (GOLDEN,),
    ),
    Change(
        "prefetch-into-a-slot-in-use",
        WRITE,
        "                if any(earlier.slot == use.slot for earlier in uses_before):\n"
        "                    return\n",
        "",
        "A prefetch is written before the ops that still need its slot.",
        (GRID, GOLDEN),
    ),
    Change(
        "clip-not-waited-for",
        WRITE,
        "self._emit(\n"
        "            Update,\n"
        "            unit,\n"
        "            {CLIP: READY} | gradient,\n"
        "            weights,\n"
        "            chunk=chunk,\n"
        "            after_weights=after_weights,\n"
        "        )",
        "self._emit(Update, unit, gradient, weights, chunk=chunk, after_weights=after_weights)",
        "An update does not wait for the clip factor, nor for the check of the norm.",
        (GOLDEN, LAWS),
    ),
    Change(
        "last-round-not-marked",
        WRITE,
        "is_last=number == rounds - 1)",
        "is_last=number == 0)",
        "The norm is taken of the first round alone.",
        (GOLDEN, "tests/engine/runtime/test_parity.py::test_rounds"),
    ),
    Change(
        "chunk-beyond-its-plane",
        "engine/planning/schedule/shards.py",
        "return [(begin, min(begin + chunk_numel, stop)) for begin in starts]",
        "return [(begin, begin + chunk_numel) for begin in starts]",
        "The last chunk of a plane reaches beyond it.",
        (DEVICE_UPDATES, GOLDEN),
    ),
    Change(
        "main-grads-and-states-in-one-place",
        UPDATES,
        "if not set(self._main_grads_of.get(self._buffer[chunk], ())) <= set(finished):",
        "if not finished:",
        "States are fetched over sums that are not complete.",
        (GOLDEN, DEVICE_UPDATES),
    ),
    Change(
        "rings-of-one-direction",
        "engine/planning/fit/buffer_sizes.py",
        "return 2 * activations.block_input_rings if",
        "return activations.block_input_rings if",
        "The report forgets the rings through which block inputs come back.",
        (SIZE_TESTS,),
    ),
    Change(
        "totals-of-other-main-grads",
        "engine/planning/fit/device_memory.py",
        "key = (rows, apart, not",
        "key = (rows, not",
        "The total of a plan is that of another one, whose sums are smaller.",
        ("tests/engine/planning/fit/test_totals.py",),
    ),
    Change(
        "block-inputs-of-kept-blocks",
        "engine/planning/fit/buffer_sizes.py",
        "forward_blocks - activations.blocks_without_recompute - seconds",
        "forward_blocks - seconds",
        "The report counts block inputs of blocks that keep their activations.",
        (f"{SIZE_TESTS}::test_host_block_inputs_are_the_engine_s_to_the_byte",),
    ),
    Change(
        "gaps-not-counted",
        SIZES,
        "ALLOCATOR_SLACK = 0.02",
        "ALLOCATOR_SLACK = 0.0",
        "The report leaves out the gaps between allocations.",
        (CHOOSE_TESTS, LIMIT_TESTS, ITEM_TESTS),
        survives="The share is a measurement. `tests/gpu/forecasts.py` compares it with the peaks "
        "of runs on a GPU; no run on the CPU has such gaps.",
    ),
    Change(
        "handed-values-of-one-row-counted",
        SIZES,
        "size * shape.handed_numel",
        "rotary_rows * shape.handed_numel",
        "The report counts what blocks hand on for one row where rows are not packed.",
        (LIMIT_TESTS,),
    ),
    Change(
        "one-copy-of-the-gradient-staged",
        "engine/planning/fit/buffer_sizes.py",
        "waiting + 2 * shape.block_sizes.largest_from(blocks)",
        "waiting + shape.block_sizes.largest_from(blocks)",
        "The report counts one of two staging buffers.",
        (f"{SIZE_TESTS}::test_fixed_buffers_are_the_device_state_to_the_byte",),
    ),
    Change(
        "slots-of-ranks-not-padded",
        "engine/planning/fit/buffer_sizes.py",
        "    shape = shape.padded(choices.sharding.ranks)\n    main_grads = 4 * (_main_grad_numel",
        "    main_grads = 4 * (_main_grad_numel",
        "The report counts slots and sums without the padding of shards.",
        (f"{GPU_TESTS}::test_fixed_buffers_of_each_rank_are_its_device_state_to_the_byte",),
    ),
    Change(
        "block-inputs-of-one-rank-alone",
        "engine/planning/fit/device_memory.py",
        "return choices.sharding.ranks_per_node * offloaded_input_bytes",
        "return offloaded_input_bytes",
        "The report counts the block inputs of one of several GPUs.",
        (f"{GPU_TESTS}::test_a_node_has_planes_once_and_the_rest_once_for_each_rank",),
    ),
    Change(
        "every-rank-has-all-rows",
        "engine/planning/fit/job.py",
        "return self.config.train.batch_size // self.world_size",
        "return self.config.train.batch_size",
        "Each of several GPUs is planned to compute the whole step.",
        (GPU_TESTS,),
    ),
    Change(
        "every-rank-has-all-cores",
        "engine/machine/link_rates.py",
        "adamw=rates.adamw / ranks,",
        "adamw=rates.adamw,",
        "Each of several GPUs is predicted to update its shards with all cores.",
        (GPU_TESTS,),
    ),
    Change(
        "pool-border-off-by-one",
        POOL,
        "    on_device = [name in gpu_resident for name in names]\n",
        "    on_device = [at <= choices.placement.gpu_resident_units for at in range(count)]\n",
        "The screens say that one unit more lives on the GPU than does.",
        (POOL_TESTS,),
    ),
    Change(
        "pool-counts-gradients-in-main-grads",
        POOL,
        "    return is_gpu_resident and are_kept\n",
        "    return False\n",
        "The pool counts gradients that are in the memory of their sums.",
        (POOL_TESTS,),
    ),
    Change(
        "pool-forgets-waits-for-the-step-before",
        POOL_COSTS,
        "        found += [(index, steps + 1) for index in op.waits_previous]\n",
        "",
        "What COMPUTE waits for updates of the step before is not told.",
        (POOL_COSTS_TESTS,),
    ),
    Change(
        "attention-not-halved",
        "engine/planning/shape/attention_shape.py",
        "return 2.0 * rows * row_length * seen * self.width",
        "return 4.0 * rows * row_length * seen * self.width",
        "Attention costs as much as if every token saw the later ones too.",
        ("tests/engine/planning/schedule/test_simulate.py", CHOOSE_TESTS),
    ),
    Change(
        "parameters-counted-with-recompute",
        "engine/planning/shape/active_parameters.py",
        "return 6 * active_parameters * tokens",
        "return 8 * active_parameters * tokens",
        "The rate that is shown counts the recompute as work.",
        (
            "tests/engine/planning/schedule/test_simulate.py",
            "tests/engine/tools/bench/test_bench.py",
        ),
    ),
    Change(
        "tied-head-without-backward",
        "engine/planning/shape/active_parameters.py",
        "[*layouts[:1], *layouts[first:]] if tied and first else layouts[first:]",
        "layouts[first:]",
        "FLOPs of adapters leave out the gradient that passes through a tied head.",
        (
            "tests/engine/tools/bench/test_step_flops.py"
            "::test_they_are_those_of_the_products_that_run",
        ),
    ),
    Change(
        "slowest-plan-taken",
        "engine/planning/fit/fastest.py",
        "return tuple(entry.timed for entry in sorted(simulated))",
        "return tuple(entry.timed for entry in sorted(simulated, reverse=True))",
        "Of the plans that are simulated, the slowest is taken.",
        (f"{CHOOSE_TESTS}::test_what_is_chosen_is_also_the_fastest_op_by_op", CHOOSE_TESTS),
    ),
    Change(
        "whole-model-preferred-with-long-units",
        "engine/planning/fit/fastest.py",
        "is_short = timed.seconds < SHORT_UNIT_SECONDS * uses",
        "is_short = True",
        "A whole model on the GPUs is preferred where units are long, and activations lack room.",
        (f"{GPU_TESTS}::test_a_whole_model_on_the_gpus_is_preferred_only_where_units_are_short",),
    ),
    Change(
        "first-plan-that-fits-taken",
        "engine/planning/fit/fastest.py",
        "score = expected * timed.seconds * self.handicap(timed)",
        "score = 0.0",
        "The plans are looked at in any order.",
        (CHOOSE_TESTS,),
    ),
    Change(
        "inexact-sums-without-asking",
        "engine/planning/fit/strategy.py",
        "if exact and candidate.choices.gradients.main_grad == MainGrad.HOST:",
        "if exact and not candidate.choices.gradients.main_grad:",
        "Sums that are rounded once a round are chosen although nobody asked for them.",
        (CHOOSE_TESTS, LIMIT_TESTS),
    ),
    Change(
        "continued-session-compiles-anew",
        CHOOSE,
        'compiled = job.rounding["compiled"] if job.rounding else _kernels_compiled(job, target)',
        "compiled = _kernels_compiled(job, target)",
        "A resumed run may round otherwise than before, since its kernels are chosen anew.",
        (
            f"{CHOOSE_TESTS}::{CONTINUED}",
            CHOOSE_TESTS,
        ),
    ),
    Change(
        "ram-filled-to-the-brim",
        FILL,
        "return self.sizer.fits(size, with_count(count), self.sizer.memory.keeping)",
        "return self.sizer.fits(size, with_count(count))",
        "On the CPU, blocks stay resident although that takes most of the RAM.",
        (CHOOSE_TESTS, LIMIT_TESTS),
    ),
    Change(
        "frozen-blocks-are-gpu-resident-side-by-side",
        "engine/planning/schedule/choices.py",
        "        if not self.gpu_resident_apart:\n            return range(count)\n",
        "        if self:\n            return range(count)\n",
        "Blocks of a frozen base that live on the device are the first ones.",
        ("tests/engine/planning/fit/test_gpu_resident_apart.py",),
    ),
    Change(
        "one-kept-block-too-few",
        FILL,
        "return with_count(counts[first]) if first < len(counts) else None",
        "return with_count(counts[min(first + 1, len(counts) - 1)])",
        "A block less than fits keeps its activations or stays resident.",
        (f"{CHOOSE_TESTS}::test_one_more_resident_block_would_not_have_fitted", CHOOSE_TESTS),
    ),
    Change(
        "too-much-counts-as-tight",
        NEEDS,
        "        if self.total > self.limit:\n            return FitStatus.DOES_NOT_FIT\n",
        "",
        "A job that does not fit is called tight.",
        ("tests/engine/planning/fit/test_fit_status.py",),
    ),
    Change(
        "loading-without-what-is-read",
        NEEDS,
        "loading = weights + ahead\n",
        "loading = weights\n",
        "The report forgets the weights that are read ahead of their planes.",
        ("tests/engine/planning/fit/test_loading.py",),
    ),
)
