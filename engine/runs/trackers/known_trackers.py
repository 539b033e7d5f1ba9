"""What each tracker needs and where curves then go. Nothing of the trackers' own packages is
imported here: a form asks this at every keystroke.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

PROJECT = "ramstream"
"""Project, or experiment, of runs where the tracker's own settings name no other."""
TENSORBOARD_FOLDER = "tensorboard"
"""Folder of TensorBoard's files in the folder of the run."""
STAYS = "They stay on this machine."
LEAVES = "These data leave this machine."


@dataclass(frozen=True)
class Place:
    """A place to which curves go, as text, and whether data leave this machine for it."""

    text: str
    leaves: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.text}. {LEAVES if self.leaves else STAYS}"


@dataclass(frozen=True)
class Kind:
    """A tracker, whose `name` stands in `output.trackers`."""

    name: str
    title: str
    module: str
    """Module by which Python finds the tracker."""
    place: Callable[[Mapping[str, str], Path], Place]
    """Returns where the curves of a run go, from the environment and the folder of runs."""
    remedy: str
    """Advice for a tracker that fails."""

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def not_installed(self) -> str:
        return (
            f"{self.title} is not installed, so it gets no curves: "
            f'pip install -e ".[{self.name}]" installs it.'
        )


def destinations(names: tuple[str, ...], runs_dir: str | os.PathLike[str]) -> list[str]:
    """Returns a sentence for each tracker: where curves also go, or that it is not installed."""
    sentences = []
    for name in names:
        kind = KINDS[name]
        if kind.is_installed:
            place = kind.place(os.environ, Path(runs_dir))
            sentences.append(f"Curves also go to {kind.title}: {place.sentence}")
        else:
            sentences.append(kind.not_installed)
    return sentences


def mlflow_address(variables: Mapping[str, str], runs_dir: Path) -> str:
    """Returns MLflow's own MLFLOW_TRACKING_URI, or else a database in the folder of runs."""
    return variables.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs_dir.absolute() / 'mlflow.db'}"


def project_of(variables: Mapping[str, str], variable: str) -> str:
    """Returns the project that an environment variable names, or `PROJECT`."""
    return variables.get(variable) or PROJECT


def _tensorboard(_: Mapping[str, str], runs_dir: Path) -> Place:
    return Place(
        f"the folder {TENSORBOARD_FOLDER} of the run (tensorboard --logdir {runs_dir} shows it)"
    )


def _trackio(variables: Mapping[str, str], _: Path) -> Place:
    space = variables.get("TRACKIO_SPACE_ID")
    if space:
        return Place(f"the Hugging Face Space {space}", leaves=True)
    server = variables.get("TRACKIO_SERVER_URL")
    if server:
        return _server(server)
    folder = variables.get("TRACKIO_DIR") or "its own folder"
    return Place(f"{folder}, project {PROJECT} (trackio show --project {PROJECT} shows it)")


def _wandb(variables: Mapping[str, str], _: Path) -> Place:
    project = project_of(variables, "WANDB_PROJECT")
    if variables.get("WANDB_MODE") in ("offline", "dryrun"):
        return Place("the folder wandb of the run (wandb sync sends it later)")
    address = variables.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    place = _server(address)
    return Place(f"{place.text}, project {project}", place.leaves)


def _mlflow(variables: Mapping[str, str], runs_dir: Path) -> Place:
    address = mlflow_address(variables, runs_dir)
    scheme = urlsplit(address).scheme
    if scheme in ("http", "https"):
        return _server(address)
    is_file = scheme in ("sqlite", "file") or (not scheme and "databricks" not in address)
    return Place(_without_password(address), leaves=not is_file)


def _server(address: str) -> Place:
    """Returns the place of a web address. Only a name of this machine keeps data here."""
    host = urlsplit(address).hostname or address
    return Place(host, leaves=host not in ("localhost", "127.0.0.1", "::1"))


def _without_password(address: str) -> str:
    user, at, rest = address.rpartition("@")
    return f"{user.partition('://')[0]}://{rest}" if at else address


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "tensorboard",
            "TensorBoard",
            "tensorboardX",
            _tensorboard,
            "check that the folder of runs has room and can be written to",
        ),
        Kind(
            "trackio",
            "Trackio",
            "trackio",
            _trackio,
            "check TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, and the login of the hub",
        ),
        Kind(
            "wandb",
            "Weights & Biases",
            "wandb",
            _wandb,
            "log in with `wandb login` or WANDB_API_KEY, or set WANDB_MODE=offline",
        ),
        Kind(
            "mlflow",
            "MLflow",
            "mlflow",
            _mlflow,
            "check MLFLOW_TRACKING_URI and that its server answers",
        ),
    )
}
"""Trackers by their names in `output.trackers`."""
