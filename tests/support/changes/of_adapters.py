"""Changes to what is done for adapters."""

from __future__ import annotations

from tests.support.changes.record import Change

PARITY = "tests/engine/model/lora/test_parity_with_peft.py"
RUNS = "tests/engine/model/lora/test_runs_of_adapters.py"
PLANS = "tests/engine/model/lora/test_plans_with_adapters.py"
FROZEN = "tests/engine/training/checkpoints/test_frozen_files.py"

ADAPTER_CHANGES = (
    Change(
        "adapters-not-scaled",
        "engine/model/lora/lora_layer.py",
        "second.t(), alpha=self.lora_scaling)",
        "second.t())",
        "What an adapter adds is not multiplied by alpha / rank.",
        (f"{PARITY}::test_adapters_of_all_linear_layers",),
    ),
    Change(
        "merged-the-other-way",
        "engine/model/lora/lora_layer.py",
        "(product if isinstance(layer, nn.Linear) else product.t())",
        "product.reshape(weight.shape)",
        "An adapter of a transposed layer is merged as if it were none.",
        (f"{PARITY}::test_adapters_of_all_linear_layers",),
    ),
    Change(
        "experts-one-after-the-other-in-both-factors",
        "engine/planning/layout/adapter_layout.py",
        "second.reshape(second.shape[0], -1, self.experts).permute(2, 0, 1)",
        "second.reshape(second.shape[0], self.experts, -1).permute(1, 0, 2)",
        "Adapters of stacked experts take the columns of others, and PEFT reads them otherwise.",
        (f"{PARITY}::test_adapters_of_stacked_experts",),
    ),
    Change(
        "stacks-of-transposed-experts",
        "engine/model/lora/parametrized.py",
        'bool(getattr(module, "is_transposed", False))',
        "False",
        "Families whose experts have their features the other way round get other adapters.",
        (f"{PARITY}::test_adapters_of_stacked_experts",),
    ),
    Change(
        "patterns-as-parts-of-names",
        "engine/model/lora/targets.py",
        'return fnmatchcase(name, target) if "*" in target else is_named(name, target)',
        'return target in name if "*" in target else is_named(name, target)',
        "A pattern of layers is taken for a part of their names.",
        (f"{PARITY}::test_adapters_by_name",),
    ),
    Change(
        "adapters-begin-alike",
        "engine/training/weights/adapter_weights.py",
        "bound = 1.0 / math.sqrt(spec.shape[1])",
        "bound = 1.0 / math.sqrt(spec.shape[0])",
        "The first weights of an adapter are bounded by its rank.",
        (f"{RUNS}::test_adapters_begin_as_the_seed_says_and_the_base_stays",),
    ),
    Change(
        "frozen-files-of-another-size",
        "engine/training/checkpoints/frozen_files.py",
        "if _size_of(file) == entry.bytes:",
        "if _size_of(file):",
        "A checkpoint shares a file that is cut off.",
        (FROZEN,),
    ),
    Change(
        "frozen-weights-not-verified",
        "engine/training/checkpoints/frozen_files.py",
        "if chunk_checksum(chunk.data) != checksum:",
        "if not checksum:",
        "Damage in weights that are not trained is not found.",
        (FROZEN,),
    ),
    Change(
        "other-adapters-after-a-resume",
        "engine/training/loop/resume.py",
        "return tuple((name, settings[name]) for name in _OF_ADAPTERS)",
        "return ((_OF_ADAPTERS[0], 0),)",
        "A resume that is to train other adapters is not refused by name.",
        (f"{RUNS}::test_a_resume_trains_the_same_adapters",),
    ),
)
