"""Changes to steps that several ranks compute."""

from __future__ import annotations

from tests.support.changes.record import Change

OPS = "engine/runtime/step/collective_ops.py"
RANKS = "tests/engine/runtime/test_ranks.py"
SAME_BITS = "tests/engine/runtime/test_ranks_same_bits.py"
PLANS = "tests/engine/planning/schedule/test_plans_of_ranks.py"
REPORTS = "tests/engine/runtime/distributed/test_reports.py"
COLLECTIVE = "tests/engine/runtime/collectives/test_exchange.py"
NODES = "tests/engine/runtime/test_ranks_of_nodes.py"
HOST_PROCESSES = (
    "tests/engine/runtime/distributed/test_nodes.py::test_nodes_train_what_one_node_trains"
)
DIVIDED = (
    "tests/engine/runtime/distributed/test_nodes.py"
    "::test_nodes_that_divide_planes_have_the_bits_of_one_node"
)
FROZEN = (
    "tests/engine/model/lora/test_adapters_on_ranks.py"
    "::test_ranks_with_one_micro_batch_have_the_bits_of_one_rank"
)
ONE_EACH = f"{RANKS}::test_ranks_with_one_micro_batch_have_the_bits_of_one_rank"
AS_ONE_RANK = f"{RANKS}::test_ranks_train_what_one_rank_trains"

RANK_CHANGES = (
    Change(
        "weights-not-gathered",
        OPS,
        "        context.process_group.all_gather(slot[: shards.padded(layout.numel)])\n",
        "        pass\n",
        "A rank computes with its own shard and what a slot held before.",
        (ONE_EACH,),
    ),
    Change(
        "shards-of-earlier-rounds-forgotten",
        OPS,
        "            kept.copy_(shard) if op.first else kept.add_(shard)\n",
        "            kept.copy_(shard)\n",
        "Where each round adds up shards of sums, all rounds but the last two are lost.",
        (f"{RANKS}::test_so_they_do_where_each_round_adds_up_shards",),
    ),
    Change(
        "several-terms-added-in-bf16",
        "engine/planning/schedule/choices.py",
        "    is_one = batching.micro_batches == batching.rounds and not is_accumulated_later\n",
        "    is_one = not is_accumulated_later\n",
        "A rank adds the gradients of its micro-batches in bf16 before they are exchanged.",
        (f"{SAME_BITS}::test_so_do_plans_for_untied_models", RANKS),
    ),
    Change(
        "gradients-of-ranks-added-in-bf16",
        "engine/runtime/collectives/process_groups.py",
        "            _add_in_order(shards, own)\n",
        "            own.copy_(shards.sum(dim=0))\n",
        "What ranks collectives in bf16 is added in bf16.",
        (f"{COLLECTIVE}::test_sums_are_added_in_the_order_of_ranks_and_then_of_nodes",),
    ),
    Change(
        "moments-updated-from-the-next-gradient",
        "engine/planning/schedule/write_ops.py",
        "        self._emit(UpdateMoments, unit, {CLIP: READY} | gradient, {}, chunk=chunk)\n",
        "        self._emit(UpdateMoments, unit, {CLIP: READY}, {}, chunk=chunk)\n",
        "The next gradient may arrive before late moments are updated from this one.",
        (
            f"{SAME_BITS}::test_no_delay_changes_a_bit",
            "tests/engine/planning/schedule/test_golden_plans.py",
        ),
    ),
    Change(
        "late-moments-of-gradients-that-are-not-clipped",
        "engine/runtime/optimizer/two_pass_kernels.py",
        "    grad, exp_avg, exp_avg_sq = planes\n"
        "    for i in range(grad.size):\n"
        "        g = widen(grad[i]) * scalars[0]\n",
        "    grad, exp_avg, exp_avg_sq = planes\n"
        "    for i in range(grad.size):\n"
        "        g = widen(grad[i])\n",
        "Moments that are updated late forget the clip factor.",
        ("tests/engine/runtime/host/test_adamw.py::test_moments_may_be_updated_after_the_weights",),
    ),
    Change(
        "rank-0-of-a-bench-takes-all-cores",
        "engine/tools/bench/steps.py",
        "            threads = None if self.workers is None else self.workers.plan.threads\n",
        "            threads = None\n",
        "A bench measures ranks that do not have what they have in a run.",
        (
            "tests/engine/tools/bench/test_bench_ranks.py"
            "::test_each_rank_has_its_share_of_the_cores",
        ),
    ),
    Change(
        "frozen-weights-not-gathered",
        OPS,
        "        context.process_group.all_gather(slot[layout.numel : layout.numel + frozen])\n",
        "        pass\n",
        "Of the weights beside adapters, a rank has its own part alone.",
        (FROZEN,),
    ),
    Change(
        "exact-weights-not-gathered",
        OPS,
        "keep_in_fp32.low.copy_(context.process_group.all_reduce(low))",
        "context.process_group.all_reduce(low)",
        "A router has the low bits of this rank's shard alone.",
        (f"{RANKS}::test_so_they_have_where_weights_stay_in_fp32",),
    ),
    Change(
        "norm-of-one-rank",
        "engine/runtime/step/copy_ops.py",
        "norms = state.totals if context.plan.is_shared else state.norms",
        "norms = state.norms",
        "Each rank clips by the norm of its own shards.",
        (AS_ONE_RANK,),
    ),
    Change(
        "norm-of-the-first-shard-alone",
        OPS,
        "    add_squares(context, op.unit, shard, 0)\n",
        "    is_first = context.plan.shards.rank == 0\n"
        "    add_squares(context, op.unit, shard if is_first else shard[:0], 0)\n",
        "The norm of a step leaves out what all ranks but the first have.",
        (AS_ONE_RANK,),
    ),
    Change(
        "shards-rounded-before-they-are-added",
        OPS,
        "        context.process_group.reduce_scatter(total)\n",
        "        total.copy_(total.to(context.state.dtype))\n"
        "        context.process_group.reduce_scatter(total)\n",
        "The sum of each rank is rounded to bf16, and the sum over the ranks once more.",
        (f"{RANKS}::test_in_bf16_a_gradient_differs_by_its_last_bit_alone",),
    ),
    Change(
        "first-micro-batch-of-every-rank-alike",
        "engine/runtime/step/streaming_engine.py",
        "            first=shard.first,\n",
        "",
        "The rows of all ranks are masked alike by dropout.",
        (f"{RANKS}::test_so_they_have_with_dropout",),
    ),
    Change(
        "tokens-of-one-rank",
        "engine/runtime/step/step.py",
        "own, weight = batches[first : first + count], loss_weight_of(batches)",
        "own, weight = batches[first : first + count], loss_weight_of(batches[first:][:count])",
        "Each rank takes the mean over its own tokens.",
        (ONE_EACH,),
    ),
    Change(
        "staged-shard-read-as-a-whole-unit",
        "engine/runtime/step/optimizer_ops.py",
        "grad = context.state.stagings[op.staging][start - first : stop - first]",
        "grad = context.state.stagings[op.staging][start : start + (stop - start)]",
        "The device takes a gradient from where it is in the unit, not in the shard.",
        (f"{RANKS}::test_so_they_have_where_optimizers_run_on_the_device",),
    ),
    Change(
        "sent-shard-read-as-a-whole-unit",
        "engine/runtime/step/copy_ops.py",
        "gradient = context.state.stagings[op.staging][start - first : stop - first]",
        "gradient = context.state.stagings[op.staging][start + 0 * first : stop]",
        "A kept gradient is taken from where it is in the unit, not in the shard.",
        (f"{SAME_BITS}::test_any_plan_gives_the_same_bits",),
    ),
    Change(
        "shards-cut-blocks-of-codes",
        "engine/planning/schedule/shards.py",
        "SHARD_ELEMENTS = 256\n",
        "SHARD_ELEMENTS = 64\n",
        "A shard begins within a block of 8-bit codes.",
        (f"{PLANS}::test_no_border_cuts_a_block_of_codes",),
    ),
    Change(
        "weights-updated-in-the-slot-of-one-rank",
        "engine/planning/schedule/device_updates.py",
        "            self._slots = {}  # the other ranks need the updated weights, too\n",
        "            pass\n",
        "A rank updates its shard in a slot, and the others keep the old weights there.",
        (f"{PLANS}::test_every_plan_of_every_rank_is_sound", SAME_BITS),
    ),
    Change(
        "sum-taken-again-while-it-is-exchanged",
        "engine/planning/schedule/unit_ops.py",
        "        writes = {grad: Content(ContentKind.SHARD, unit)}\n",
        "        reads.pop(grad)\n        writes = {}\n",
        "The sum over the ranks does not wait for the backward, nor the next backward for it.",
        (f"{SAME_BITS}::test_no_delay_changes_a_bit",),
    ),
    Change(
        "gather-not-in-the-plan",
        "engine/planning/schedule/write_ops.py",
        "        self._emit(Prefetch, unit, planes, shard, slot=slot)\n"
        "        self._emit(AllGather, unit, shard, writes, slot=slot)",
        "        self._emit(Prefetch, unit, planes, writes, slot=slot)\n"
        "        self._emit(AllGather, unit, {}, {}, slot=slot)",
        "Nothing waits for the gather of weights: a block may be computed before it.",
        (f"{SAME_BITS}::test_no_delay_changes_a_bit",),
    ),
    Change(
        "sums-added-in-another-order",
        "engine/runtime/collectives/process_groups.py",
        "        _add_in_order(shards.view(self.place.local_world_size, -1), own)\n",
        "        local = self.place.local_rank, self.place.local_world_size\n"
        "        shards = shards.view(local[1], -1).roll(local[0], 0)\n"
        "        _add_in_order(shards, own)\n",
        "Each rank adds the shards in an order of its own.",
        (f"{COLLECTIVE}::test_sums_are_added_in_the_order_of_ranks_and_then_of_nodes",),
    ),
    Change(
        "a-rank-gives-up-later-than-the-others",
        "engine/runtime/step/streaming_engine.py",
        "            self._train.wait_for(OpKind.CLIP)\n",
        "            pass\n",
        "A rank is in the next step when it hears that this one has failed.",
        ("tests/engine/runtime/test_ranks_broken_off.py",),
    ),
    Change(
        "spans-of-no-rank",
        "engine/planning/schedule/stalls.py",
        'return {"rank": rank} if rank else {}',
        "return {}",
        "The record has the ops of all ranks as those of one.",
        (f"{REPORTS}::test_sampled_steps_have_the_ops_of_every_rank_on_one_clock",),
    ),
    Change(
        "spans-on-a-clock-of-each-rank",
        "engine/training/loop/measurements.py",
        "spans += records_of(timeline.ops, begin, rank)",
        "spans += records_of(timeline.ops, timeline.ops[0].start, rank)",
        "The first op of every rank is drawn at 0, whenever it began.",
        (f"{REPORTS}::test_sampled_steps_have_the_ops_of_every_rank_on_one_clock",),
    ),
    Change(
        "memory-of-other-ranks-left-out",
        "engine/training/loop/memory_watch.py",
        "            rss += sum(self._of_ranks().values())\n",
        "",
        "What the other processes of a run hold counts as that of other programs.",
        ("tests/engine/training/loop/test_oom_report.py",),
    ),
    Change(
        "several-gpus-resumed-in-the-server",
        "app/session/session.py",
        "            if _has_several_gpus(folder.config):\n",
        "            if False:\n",
        "A GPU that fails may take the app along.",
        ("tests/app/session/test_several_gpus.py",),
    ),
    Change(
        "nodes-keep-their-own-gradients",
        "engine/runtime/collectives/process_groups.py",
        "            chunk.copy_(self.all_reduce_nodes(chunk))\n",
        "            chunk.clone()\n",
        "Each node updates its planes with the gradients of its own rows.",
        (f"{COLLECTIVE}::test_sums_are_added_in_the_order_of_ranks_and_then_of_nodes",),
    ),
    Change(
        "nodes-report-their-own-loss",
        OPS,
        "    totals[-1:] = context.process_group.all_reduce_nodes(totals[-1:])\n",
        "",
        "The loss is that of the rows of one node.",
        (f"{NODES}::test_nodes_with_one_rank_have_the_bits_of_one_node",),
    ),
    Change(
        "nodes-count-the-norm-of-each",
        OPS,
        "    totals[-1:] = context.process_group.all_reduce_nodes(totals[-1:])\n",
        "    totals = context.process_group.all_reduce_nodes(totals)\n",
        "Every node has the whole norm, and all of them are added.",
        (f"{NODES}::test_nodes_that_clip_have_the_bits_of_one_node",),
    ),
    Change(
        "nodes-get-a-part-of-the-planes",
        "engine/runtime/distributed/plane_copies.py",
        "        if keeps(unit):\n",
        "        if keeps(unit) and begin == 0:\n",
        "Of each plane, another node gets the first chunk alone.",
        (HOST_PROCESSES,),
    ),
    Change(
        "nodes-get-weights-without-moments",
        "engine/runtime/distributed/plane_copies.py",
        "        if keeps(unit):\n",
        '        if keeps(unit) and not plane.startswith("exp"):\n',
        "A run that goes on has moments on the first node alone.",
        (HOST_PROCESSES,),
    ),
    Change(
        "nodes-start-with-other-settings",
        "engine/runtime/distributed/handshake.py",
        "        if own != found:\n",
        "        if own is found is None:\n",
        "Nodes that were started with other settings compute the same run.",
        ("tests/engine/runtime/distributed/test_handshake.py::test_what_differs_is_told",),
    ),
    Change(
        "nodes-hold-whole-planes",
        "engine/runtime/host/cross_node_planes.py",
        "        return self._held(key)\n",
        "        return 0, nbytes\n",
        "Planes are divided among nodes, and each of them has RAM for all.",
        (DIVIDED,),
    ),
    Change(
        "losses-that-fill-an-evaluation-counted",
        "engine/runtime/distributed/rank_zero_engine.py",
        "        return _joined(own, answers)[: len(batches)]\n",
        "        return _joined(own, answers)\n",
        "Rows that are evaluated twice, so that all nodes have as many, count twice.",
        (DIVIDED,),
    ),
    Change(
        "planes-of-other-nodes-left-out",
        "engine/runtime/host/cross_node_planes.py",
        "                found = self._others.read(node, key, first, last)\n",
        "                found = super().read(key, first, last)\n",
        "A checkpoint has zeros where other nodes have planes.",
        (DIVIDED,),
    ),
)
