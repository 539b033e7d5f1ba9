"""The weights that can answer: those of a run, of its export, of a folder, and the base model."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from app.session.engine_calls import ChatCalls
from app.session.session import Session
from app.shared.run_names import distinct_names
from engine import safe_files
from engine.errors import ConfigError, RamstreamError, RunError
from engine.runs.record.run_folder import RunFolder, open_run
from engine.runs.summaries.names import shown_name
from engine.tools.chat.conversation import Source, base_of, best_of, checkpoint_of
from engine.training.checkpoints.checkpoint import folders_by_step

CURRENT = "current"
"""Value of a choice for the current weights of a paused run."""


@dataclass(frozen=True)
class Choice:
    """The weights that answer: those of a run, or a model in a folder."""

    run_id: str = ""
    """Empty if a folder is chosen."""
    weights: str = "newest"
    """Weights of the run: "current" (while it is paused), "newest", "best-N", "step-N" or "export".
    """
    folder: str = ""
    """Empty if a run is chosen."""


@dataclass(frozen=True)
class Busy:
    """A run that needs the machine, so that no other weights can answer."""

    sentence: str
    remedy: str
    """What a person can do about it, in a sentence."""
    run_id: str = ""
    """The run, if it can be paused for a chat."""


class OfferedWeights:
    """Finds the available weights, and those of a choice. It loads none."""

    def __init__(self, session: Session, engine: ChatCalls):
        self._session = session
        self._engine = engine

    def runs(self, kept: str = "") -> list[dict[str, Any]]:
        """Returns the runs that have weights for a chat, newest first, each with its weights. The
        active run and the run `kept` are there without weights, too.
        """
        runs = []
        without = {kept, self._session.active_id}
        listed = self._session.runs()
        labels = distinct_names([(run.name, run.created) for run in listed])
        for run, label in zip(listed, labels):
            try:
                found = self._of_run(run.id)
            except (RamstreamError, OSError):  # the list of runs says why
                continue
            except Exception:  # noqa: BLE001  whatever is in that folder, the others are offered
                traceback.print_exc()
                continue
            weights = [{"value": value, "label": words} for value, words in found.items()]
            if weights or run.id in without:
                runs.append({"id": run.id, "name": label, "model": run.model, "weights": weights})
        return runs

    def sides(self, choice: Choice, compare: bool) -> dict[str, Source]:
        """Returns the weights that answer: `tuned`, preceded by `base` if both are compared.

        Raises RamstreamError if there are none.
        """
        if choice.folder:
            return {"tuned": self._engine.folder_of(choice.folder)}
        folder = open_run(self._session.runs_dir, choice.run_id)
        weights = self._of_run(choice.run_id)
        value = choice.weights
        if value == "newest":
            value = self.newest(choice.run_id)
        if value not in weights:
            there_are = ", ".join(weights.values()) or "none yet: save a checkpoint first"
            raise RunError(f"{shown_name(folder)} has no such weights; it has {there_are}.")
        sides = {"base": base_of(folder.config)} if compare else {}
        return sides | {"tuned": self._source(folder, choice.run_id, value, weights[value])}

    def newest(self, run_id: str) -> str:
        """Returns the value of the weights that a run would export, or those of now while it is
        paused; empty if it has none.
        """
        return next(iter(self._of_run(run_id)), "")

    def paused_run(self) -> Any:
        """Returns the calls of the run that is paused here, or None if no run is active here.

        Raises RunError while a run needs the machine.
        """
        busy = self.busy()
        if busy is not None:
            raise RunError(f"{busy.sentence} {busy.remedy}")
        return None if self._session.active_id is None else self._paused_calls()

    def busy(self) -> Busy | None:
        """Returns the run that is training here or that another process is preparing, if there is
        one.
        """
        active = self._session.active_id
        if active is not None:
            if self._paused_calls() is not None:
                return None
            name = self._session.name_of_run(active)
            return Busy(f"{name} is training.", "Pause it first, or wait until it ends.", active)
        preparing = self._session.preparing_elsewhere
        if preparing is None:
            return None
        # The memory that it will allocate still looks free.
        name = self._session.name_of_run(preparing)
        return Busy(f"{name} is starting and needs the memory.", "Try again once it trains.")

    def _paused_calls(self) -> Any:
        """Returns the calls of the active run while it is paused, or else None."""
        paused = getattr(self._session.active_run, "paused", None)
        return paused if paused is not None and paused.is_open else None

    def _of_run(self, run_id: str) -> dict[str, str]:
        """Returns the weights of a run that a chat can use: a label for each choice value. There
        are none where the run's settings cannot be read, since its model is built from them.
        """
        try:
            folder = open_run(self._session.runs_dir, run_id)
            is_best = folder.config.output.export_from == "best"
        except (RunError, ConfigError):
            return {}
        steps = sorted(folders_by_step(folder.checkpoints_path), reverse=True)
        weights: dict[str, str] = {}
        if self._session.active_id == run_id and self._paused_calls() is not None:
            run: Any = self._session.active_run
            weights[CURRENT] = f"Now, paused after step {run.recorder.snapshot.step:,}"
        best = {
            f"best-{step}": f"Best, step {step:,}" for step in folders_by_step(folder.best_path)
        }
        saved = {f"step-{step}": f"Step {step:,}" for step in steps}
        if steps:
            saved[f"step-{steps[0]}"] += ", the newest"
        # What is exported comes first: who only wants to ask gets its answers.
        weights |= {**best, **saved} if is_best else {**saved, **best}
        if safe_files.is_file(folder.export_path / "config.json", folder.root):
            weights["export"] = "Exported model"
        return weights

    def _source(self, folder: RunFolder, run_id: str, value: str, words: str) -> Source:
        """Returns the weights that `value` names, labeled with the run's name and `words`."""
        label = f"{shown_name(folder)}, {words[0].lower()}{words[1:]}"
        if value == "export":
            return self._engine.folder_of(str(folder.checked_export()), label)
        if value.startswith("best-"):
            best = int(value.removeprefix("best-"))
            return best_of(self._session.runs_dir, run_id, folder.config, best, label)
        step = None if value == CURRENT else int(value.removeprefix("step-"))
        return checkpoint_of(self._session.runs_dir, run_id, folder.config, step, label)
