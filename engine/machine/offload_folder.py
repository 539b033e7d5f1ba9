"""The folder `engine.disk` takes moments and block inputs that fit nowhere else. This file says
which folders can, and which disk a folder is on. No torch.

- A file system that copies on write (btrfs, zfs, bcachefs) would write each chunk to a new place:
  it fills up, slows down and wears the drive faster than planned.
- A network file system moves every byte of every step over the network.
- A file system in RAM (tmpfs) takes the RAM that the folder is there to save.
- An overlay, as containers have for their root, is taken: what is written lies in its upper folder,
  which is on a local disk.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.errors import ConfigError

SETTING = "engine.disk"
_COPIES_ON_WRITE = ("btrfs", "zfs", "bcachefs")
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "afs", "ncpfs"),
    *("lustre", "gpfs", "beegfs", "ocfs2", "gfs2", "pvfs2", "glusterfs", "orangefs"),
)
_IN_RAM = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Mount:
    """A file system at its place in the tree of folders."""

    path: str
    kind: str
    """The name of the file system, such as ext4."""
    source: str
    """Device or server that the file system is on."""


def mount_of(folder: Path) -> Mount | None:
    """Returns the mount that a folder is on; None where the system does not report it."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    place = folder.resolve()
    above = [mount for mount in mounts if place.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place, the later one hides the earlier one.
    above.sort(key=lambda mount: len(mount.mountpoint))
    return Mount(above[-1].mountpoint, above[-1].fstype, above[-1].device) if above else None


def check_offload_folder(name: str) -> Path:
    """Returns the folder of this name. Raises ConfigError where it cannot take moments."""
    folder = Path(name).expanduser()
    if not folder.exists():
        raise ConfigError(SETTING, f"there is no folder {folder}; make it, or name another.")
    if not folder.is_dir():
        raise ConfigError(SETTING, f"{folder} is not a folder; name a folder on a local disk.")
    mount = mount_of(folder)
    if mount is not None:
        reason = _reason_against(mount.kind)
        if reason:
            raise ConfigError(
                SETTING,
                f"{folder} is on {mount.kind}, {reason}; name a folder on a local disk (ext4 or "
                "xfs).",
            )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            SETTING,
            f"nothing can be written in {folder} ({error.strerror}); name a folder that this user "
            "may write in.",
        ) from None
    return folder


def disk_name(folder: Path) -> str:
    """Returns the name under which the rates of a folder's disk are kept: its file system, and
    where that is.
    """
    mount = mount_of(folder)
    if mount is None:
        return f"disk of device {folder.stat().st_dev}"
    return f"disk {mount.source} ({mount.kind} at {mount.path})"


def _reason_against(kind: str) -> str:
    """Returns why a file system takes no moments, or an empty string if it does."""
    if kind in _COPIES_ON_WRITE:
        return "which writes each change to a new place (copy on write)"
    if kind in _NETWORK or kind == "fuse.sshfs":
        return "a file system of the network"
    if kind.startswith("fuse."):
        return "a file system that runs as a program (FUSE)"
    return "which keeps its files in RAM" if kind in _IN_RAM else ""
