"""An `Exactness` says what a change of settings does to results. No torch."""

from __future__ import annotations

from engine.planning.schedule.buffers import Word


class Exactness(Word):
    """What a change of settings does to the results of a run. The members are ordered from the
    change that costs results least, and their values are written to JSON.

    It is about the change alone. The plan of a new run also depends on the memory that is free, and
    may choose other micro-batches; a run that is resumed keeps what its results depend on.
    """

    SAME_BITS = "same_bits"
    OTHER_ORDER = "other_order"
    ROUNDED_GRADIENTS = "rounded_gradients"
    ROUNDED_MOMENTS = "rounded_moments"
    LOWER_PRECISION = "lower_precision"
    FEWER_TOKENS = "fewer_tokens"
    ADAPTERS_ALONE = "adapters_alone"

    @property
    def sentence(self) -> str:
        """What happens to results, in one sentence."""
        return _SENTENCES[self]


_SENTENCES = {
    Exactness.SAME_BITS: "The results have the same bits.",
    Exactness.OTHER_ORDER: "Sums are added in another order: the last bits change.",
    Exactness.ROUNDED_GRADIENTS: (
        "Gradients are rounded to bf16 once a round, where their accumulators do not fit on the "
        "GPU: "
        "results change slightly."
    ),
    Exactness.ROUNDED_MOMENTS: (
        "Moments are rounded: results change slightly; the fp32 masters stay."
    ),
    Exactness.LOWER_PRECISION: "Blocks compute in bf16: results change; the fp32 masters stay.",
    Exactness.FEWER_TOKENS: "A step sees fewer tokens.",
    Exactness.ADAPTERS_ALONE: (
        "Another training: the weights stay as they are, and adapters learn beside them, usually "
        "with about ten times the learning rate."
    ),
}


def sentences(kinds: tuple[Exactness, ...]) -> str:
    """Returns the sentences of all `kinds` in one line."""
    return " ".join(kind.sentence for kind in kinds)
