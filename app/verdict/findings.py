"""The verdict on a run: a main finding, and others. Each `Finding` has
its evidence and the name of the rule by which it was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from app.form.settings_form import as_labeled

Rule = Literal[
    "ended",
    "disk",
    "memory ends soon",
    "diverging",
    "worse than before training",
    "memorizes",
    "no better",
    "overfitting",
    "possibly overfitting",
    "not learning",
    "rate too high",
    "skipped steps",
    "memory in danger",
    "speed",
    "plateau",
    "too small",
    "rate too low",
    "few rows",
    "nothing exact",
    "doing well",
    "too early",
    "memory",
]
"""Rules by which a finding is made. The main finding is chosen in their order."""
Tone = Literal["good", "calm", "warn", "bad"]
"""Tones, each with a color in `base.css`. `warn` and `bad` are alarms."""

Place = Literal["first", "beside", "reasons"]
_PLACES: tuple[Place, ...] = ("first", "beside", "reasons")


@dataclass(frozen=True)
class Offer:
    """A change of the run's settings that a person can accept."""

    label: str
    """Description of the change."""
    changes: dict[str, Any]
    """New config values by dotted name."""


@dataclass(frozen=True)
class Finding:
    """One thing that is true of a run."""

    rule: Rule
    tone: Tone
    text: str
    """One sentence."""
    advice: str = ""
    """Another sentence, or empty."""
    evidence: str = ""
    """Sentence about the numbers that led to the finding, and the limit."""
    offer: Offer | None = None

    @property
    def is_alarm(self) -> bool:
        return self.tone in ("warn", "bad")

    @property
    def place(self) -> Place:
        """Where it is told, and the button of its offer stands: first of all for what is wrong with
        the learning, beside the others for what would learn better, and with the reasons for the
        speed.
        """
        if self.rule in ("rate too low", "few rows"):
            return "beside"
        return "first" if self.is_alarm and self.rule != "speed" else "reasons"

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding in the form that pages receive, with settings named by their labels
        in the form.
        """
        return {
            "rule": self.rule,
            "tone": self.tone,
            "text": as_labeled(self.text),
            "advice": as_labeled(self.advice),
            "evidence": as_labeled(self.evidence),
        }


@dataclass(frozen=True)
class Verdict:
    """The main finding on a run, and the others."""

    main: Finding
    also: tuple[Finding, ...] = ()

    @property
    def tone(self) -> Tone:
        """The tone of the main finding, unless a few validation rows are too few to be sure of it.
        What is bad is so by more than the noise of these.
        """
        is_certain = self.main.tone == "bad" or not self.rests_on_few
        return self.main.tone if is_certain else "calm"

    @property
    def rests_on_few(self) -> bool:
        """Whether its validation rows are too few to be sure of it."""
        return any(each.rule == "few rows" for each in self.also)

    @property
    def offer(self) -> Offer | None:
        """The first change that one of the findings offers; its label describes it."""
        return None if self._offering is None else self._offering.offer

    @property
    def _offering(self) -> Finding | None:
        found = [each for each in (self.main, *self.also) if each.offer is not None]
        return min(found, key=lambda each: _PLACES.index(each.place), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the verdict in the form that pages receive. The `place` of an offer is that of
        its finding; it `stops` where going on is a waste.
        """
        offer, by = None, self._offering
        if by is not None and by.offer is not None:
            offer = {
                "label": as_labeled(by.offer.label),
                "changes": by.offer.changes,
                "place": by.place,
                "stops": self.main.tone == "bad",
            }
        also = [found.to_dict() for found in self.also]
        return self.main.to_dict() | {"tone": self.tone, "offer": offer, "also": also}
