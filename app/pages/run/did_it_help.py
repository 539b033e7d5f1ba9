"""Whether training helped, in a word and its reason, from the figures of the base model and the
trained one. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from app.verdict.few_rows import FEWEST_ROWS
from app.verdict.findings import Tone
from app.verdict.outcome import CANNOT_TELL
from engine.runs.summaries.evaluation_figures import AHEAD, LOSS, RIGHT, Figure

ORDER = (RIGHT, AHEAD, LOSS)
"""Figures of the validation rows, what a person wants most first."""
YES, NO = "Yes, against the base model", "No, against the base model"
UNKNOWN = CANNOT_TELL
MORE_ROWS = "Set a larger “Validation share” in New, or add a benchmark below."


@dataclass(frozen=True)
class Answer:
    """Whether it helped."""

    word: str
    tone: Tone
    text: str
    """The reason and, where something can be done, what."""


def did_it_help(
    figures: Sequence[Figure],
    as_text: Callable[[Figure, float | None], str],
    began_with: str = "",
    loss_before: float | None = None,
) -> Answer | None:
    """Returns the answer, or None where nothing was evaluated. `as_text` writes a value of a
    figure. `began_with` names the run that this one continues, if it does: elsewhere, *before
    training* is of its weights, which had the validation loss `loss_before`, if that is known.
    """
    if not figures:
        return None
    found = _answer(figures, as_text)
    if not began_with:
        return found
    trained = next((each for each in figures if each.name == LOSS), None)
    if trained is None or trained.trained is None or loss_before is None:
        other = f"Overview compares it with {began_with}, the run that it continues."
        return replace(found, text=f"{found.text} {other}")
    went = f"{as_text(trained, loss_before)} → {as_text(trained, trained.trained)}"
    against = f"Against {began_with}, the run that it continues: validation loss {went}."
    is_good = found.tone == "good" and trained.trained < loss_before
    tone: Tone = found.tone if found.tone != "good" or is_good else "calm"
    return replace(found, tone=tone, text=f"{found.text} {against}")


def _answer(figures: Sequence[Figure], as_text: Callable[[Figure, float | None], str]) -> Answer:
    ranked = sorted(figures, key=_rank)
    known = [each for each in ranked if each.difference is not None]
    if not known:
        lacks = "trained" if all(each.trained is None for each in figures) else "base"
        return Answer(UNKNOWN, "calm", f"The {lacks} model is not evaluated yet.")
    decided = [each for each in known if each.is_better is not None]
    if not decided:
        return _unknown(known)
    first, *others = decided
    sentences = [_compared(first, as_text)]
    against = [each.name for each in others if each.is_better != first.is_better]
    if against:
        sentences.append(f"But {'worse' if first.is_better else 'better'}: {', '.join(against)}.")
    if first.is_better and any(each.name == RIGHT and not each.trained for each in known):
        sentences.append("No answer is right yet.")
    if first.is_better:
        return Answer(YES, "calm" if against else "good", " ".join(sentences))
    sentences.append("Try a lower learning rate first.")
    return Answer(NO, "bad", " ".join(sentences))


def _rank(figure: Figure) -> int:
    return ORDER.index(figure.name) if figure.name in ORDER else len(ORDER)


def _compared(figure: Figure, as_text: Callable[[Figure, float | None], str]) -> str:
    base, trained = as_text(figure, figure.base), as_text(figure, figure.trained)
    return f"{figure.name}: base model {base}, trained {trained}."


def _unknown(known: Sequence[Figure]) -> Answer:
    """Returns that the figures of both models do not tell which one is better, and why."""
    judged = [each for each in known if each.interval is not None]
    most = max(judged or known, key=lambda each: (each.count or 0, each.of == "rows"))
    count, of = most.count or 0, most.of
    if judged:
        text = f"With {count:,} {of}, a difference this small may be chance. {MORE_ROWS}"
    elif count < FEWEST_ROWS:
        of_rows = "validation row" if of == "rows" else of.removesuffix("s")
        few = f"1 {of_rows}" if count == 1 else f"{count:,} {of_rows}s"
        text = f"Only {few}: {FEWEST_ROWS} are needed to be sure. {MORE_ROWS}"
    else:
        text = "Both models were evaluated on different rows. Evaluate again."
    return Answer(UNKNOWN, "calm", text)
