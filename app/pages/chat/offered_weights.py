"""The weights that Chat offers: those of a run, its export, a folder, and the model
before training.
"""

from __future__ import annotations

import traceback
from typing import Any

from app.pages.chat.turns import CURRENT, Choice
from app.session.engine_calls import ChatCalls
from app.session.session import Session
from engine import safe_files
from engine.errors import ConfigError, RamstreamError, RunError
from engine.runs.record.run_folder import RunFolder, open_run
from engine.runs.summaries.about import read_about
from engine.tools.chat.conversation import Source, base_of, best_of, checkpoint_of
from engine.training.checkpoints.checkpoint import folders_by_step


class OfferedWeights:
    """Finds the available weights, and those of a choice. It loads none."""

    def __init__(self, session: Session, engine: ChatCalls):
        self._session = session
        self._engine = engine

    def runs(self) -> list[dict[str, Any]]:
        """Returns the runs that have weights for a chat, newest first, each with its weights."""
        runs = []
        for run in self._session.runs():
            try:
                found = self._of_run(run.id)
            except (RamstreamError, OSError):  # the list of runs says why
                continue
            except Exception:  # noqa: BLE001  whatever is in that folder, the others are offered
                traceback.print_exc()
                continue
            weights = [{"value": value, "label": label} for value, label in found.items()]
            if weights:
                runs.append(
                    {"id": run.id, "name": run.name, "model": run.model, "weights": weights}
                )
        return runs

    def sides(self, choice: Choice, compare: bool) -> dict[str, Source]:
        """Returns the weights that answer: `tuned`, preceded by `base` if both are compared.

        Raises RamstreamError if there are none, and as `paused_run` does.
        """
        self.paused_run()
        if choice.folder:
            return {"tuned": self._engine.folder_of(choice.folder)}
        folder = open_run(self._session.runs_dir, choice.run_id)
        weights = self._of_run(choice.run_id)
        value = choice.weights
        if value == "newest":
            value = next(iter(weights), "")
        if value not in weights:
            there_are = ", ".join(weights.values()) or "none yet: save a checkpoint first"
            raise RunError(f"Run {choice.run_id} has no such weights; it has {there_are}.")
        sides = {"base": base_of(folder.config)} if compare else {}
        return sides | {"tuned": self._source(folder, choice.run_id, value, weights[value])}

    def paused_run(self) -> Any:
        """Returns the calls of the run that is paused here, or None if no run is active here.

        Raises RunError while a run is training here, and while another process is preparing one.
        """
        if self._session.active_id is None:
            preparing = self._session.preparing_elsewhere
            if preparing is not None:  # the memory that it will allocate still looks free
                raise RunError(
                    f"{preparing} is getting ready in a process of its own and needs the memory: "
                    "try again once it trains."
                )
            return None
        paused = self._paused_calls()
        if paused is None:
            raise RunError(
                f"{self._session.active_id} is training here and needs the machine: pause it to "
                "chat, or wait until it ends."
            )
        return paused

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
            weights["export"] = "Its export"
        return weights

    def _source(self, folder: RunFolder, run_id: str, value: str, words: str) -> Source:
        """Returns the weights that `value` names, labeled with the run's name and `words`."""
        name = read_about(folder.path).name or folder.config.name
        label = f"{name}, {words[0].lower()}{words[1:]}"
        if value == "export":
            return self._engine.folder_of(str(folder.checked_export()), label)
        if value.startswith("best-"):
            best = int(value.removeprefix("best-"))
            return best_of(self._session.runs_dir, run_id, folder.config, best, label)
        step = None if value == CURRENT else int(value.removeprefix("step-"))
        return checkpoint_of(self._session.runs_dir, run_id, folder.config, step, label)
