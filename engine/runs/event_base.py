"""Every event of a record has this base class. `engine.runs.events` has the list of all events."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from msgspec import Struct


def _kind_of(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(Struct, frozen=True, gc=False, tag=_kind_of, tag_field="kind"):
    """An `Event` records something that happened in a run; it is the base class of all kinds of
    events.

    `kind` is the class name in snake case. `gc=False` excludes events from Python's garbage
    collector, which would otherwise traverse the hundreds of thousands of events of a long record
    again and again. This is safe because an event holds JSON values, which form no reference
    cycles.
    """

    kind: ClassVar[str] = "event"

    def __init_subclass__(cls) -> None:
        cls.kind = _kind_of(cls.__name__)

    def fields(self) -> dict[str, Any]:
        """Returns the field values by the names that they have in the record."""
        return {
            recorded: getattr(self, name)
            for name, recorded in zip(self.__struct_fields__, self.__struct_encode_fields__)
        }
