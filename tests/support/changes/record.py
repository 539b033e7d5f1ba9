"""A change as a record: what it replaces, what that breaks, and which tests ought to see it."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path


class DoesNotApply(Exception):
    """The change's old text is not in its file exactly once, or what it makes does not compile."""


@dataclass(frozen=True)
class Change:
    """One fault in one file."""

    name: str
    """The command line and the table call it by this name."""
    file: str
    """The fault is made in this file, which is named from the root of the tree."""
    old: str
    """This text stands in the file exactly once."""
    new: str
    """This text takes its place."""
    breaks: str
    """This sentence says what is wrong then."""
    tests: tuple[str, ...]
    """These files or tests are run first. The first one to fail has caught the change."""
    survives: str = ""
    """It says why no test can notice the change, and is empty where one must."""

    @property
    def digest(self) -> str:
        """Returns a checksum of what is changed and of which tests run."""
        parts = "\0".join((self.file, self.old, self.new, *self.tests))
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()

    def applied(self, text: str) -> str:
        """Returns the changed text of the file. Raises DoesNotApply."""
        found = text.count(self.old)
        if found != 1:
            raise DoesNotApply(
                f"{self.name}: its old text stands {found} times in {self.file}, not once; "
                "write the record anew."
            )
        changed = text.replace(self.old, self.new)
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise DoesNotApply(f"{self.name}: {self.file} does not compile: {error}.") from None
        return changed

    def apply(self, root: Path) -> None:
        """Makes the change in the tree at `root`. Raises DoesNotApply, and then changes nothing."""
        path = root / self.file
        changed = self.applied(path.read_text(encoding="utf-8"))
        path.write_text(changed, encoding="utf-8")
