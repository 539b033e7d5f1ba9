"""Uploads and folders, among which a person may choose data, besides typing a path."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.session.data_folders import DataFolders
from app.session.uploads import UPLOADS_FOLDER, UploadLimits, Uploads


@dataclass(frozen=True)
class DataOptions:
    """Options of the command line about data."""

    limits: UploadLimits = field(default_factory=UploadLimits)
    """Limits of uploads."""
    folders: tuple[Path, ...] = ()
    """Folders that can be browsed."""


@dataclass(frozen=True)
class DataIn:
    """Uploads and folders of a server."""

    uploads: Uploads
    folders: DataFolders

    @classmethod
    def of_runs(cls, runs_dir: Path, options: DataOptions | None = None) -> DataIn:
        """Returns the uploads kept beside the runs, and the folders to browse.

        Raises RamstreamError for a folder that does not exist.
        """
        options = options or DataOptions()
        folders = DataFolders.named(options.folders)
        return cls(Uploads(runs_dir / UPLOADS_FOLDER, options.limits), folders)
