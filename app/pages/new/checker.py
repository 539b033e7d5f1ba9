"""The form requests checks of a draft here before its start: whether it is valid, whether it
fits, and what its data look like.

Answers are plain data for `train.js`. No user input raises an exception here.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.form.derived_defaults import (
    DerivedDefaults,
    default_values,
    derived_defaults,
    with_even_rows,
)
from app.form.examples import EXAMPLES, example_of
from app.form.presets import PresetShelf
from app.form.settings_form import (
    as_labeled,
    describe_error,
    read_config,
    settings,
    shown_changes,
    shown_values,
)
from app.form.train_command import train_command
from app.pages.new.data_figures import lengths_figure, lengths_text, packing_text
from app.pages.new.download import beside_download, download_bytes, on_disk_of_runs, size_text
from app.pages.new.draft import Drafts
from app.pages.new.faults import unforeseen
from app.pages.new.fit_panel import (
    NO_FOLDER,
    NO_MODEL,
    TRY_AGAIN,
    Beside,
    fit_panel,
    unchecked,
)
from app.pages.new.fitting import fitting
from app.pages.new.fixes import best_suggestions, fix_of, fix_of_passes
from app.pages.new.known_models import is_offered, remark_on_example
from app.pages.new.machine_findings import slower_by, to_confirm
from app.pages.new.model_cards import model_cards, out_of_reach
from app.pages.new.receipt import job_lines
from app.pages.new.run_length import RunLength, Sample, run_length, run_length_text
from app.pages.new.usual_pace import Pace, usual_pace
from app.session.session import Session
from app.shared.steady_machine import free_on, steadied
from engine.config.data_settings import DataConfig
from engine.config.preference_settings import OBJECTIVE
from engine.config.setting_warnings import setting_warnings
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, DataError, RamstreamError, RunError
from engine.machine.device import refuse_unasked_cpu
from engine.machine.offload_folder import check_offload_folder
from engine.machine.rates import CPU, measured_at, rates_file
from engine.machine.read_machine import Machine, read_machine
from engine.model.build.added_tokens import add_tokens
from engine.model.build.find_shape import adapted_shape
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.fitting_machines import smaller_models
from engine.planning.fit.pool_costs import Costs, costs_of
from engine.planning.fit.report import FitReport, with_times
from engine.planning.fit.requirements import FitStatus
from engine.planning.shape.catalog import CatalogEntry, catalog_shape
from engine.runs.record import runs_root
from engine.runs.trackers.known_trackers import destinations
from engine.training.weights.usable_start import refuse_unusable

MACHINE_SECONDS = 10
"""Seconds after which free memory is read again; estimates are repeated if it has changed."""
PREVIEW_ROWS = 5
PREVIEW_CHARACTERS = 1200
"""Largest number of characters of a row in the preview."""
SMALLER_SHOWN = 3
"""Number of smaller models that are offered instead of one that does not fit."""
SAMPLES_KEPT = 32
"""Number of data sets whose measurements are kept."""
ANY_MODEL = "any/model"
"""Stands for a model of the hub whose own values do not matter."""
AFTER_TOKENIZER = "The first rows as they are. Their tokens are counted once the model is here."
NO_TOKENIZER = "The tokenizer of the model is missing."
QUESTIONS = {
    "pair": "Is “{prompt}” the prompt and “{completion}” the answer?",
    "conversation": "Is “{messages}” the conversation?",
    "preference": "Is “{chosen}” the better answer and “{rejected}” the worse one?",
    "text": "Is “{text}” the text to learn?",
}
"""What a person is asked about a guess of columns, by the kind of a row."""
WHICH = "Which column is which?"
LONGEST_COLUMN = 30
"""Characters of a column's name in such a question."""
CHOOSE_ANOTHER = "Choose another model."
NONE_FITS = "No other model that is known fits with these settings."
NONE_TO_BE_HAD = (
    "No other model that fits is on this machine, and this computer cannot reach Hugging Face."
)
WITHOUT_NETWORK = (
    "To train without a connection, give the folder of a model under Model. On a computer with a "
    "connection, `hf download {} --local-dir FOLDER` makes one."
)
"""What to do about a model that is not here and cannot be had, by its id."""
WRONG_SETTING = "A setting needs your attention"
UNUSED_FLAGS = "data.unused_flags"
TAKEN_OVER = (
    "source",
    "format",
    "format_detected",
    "rows_measured",
    "rows_cut",
    "rows_skipped",
    "percent_trained",
    "ends",
    "endless",
    "warnings",
)
"""Parts of the engine's preview that the page shows unchanged."""


class Checker:
    """Checks the drafts of one session, and keeps the latest one of each tab.

    Estimates and previews are cached by the values that they depend on. All pages share one
    checker, and so share these results.
    """

    def __init__(self, session: Session):
        self.drafts = Drafts(session.runs_dir)
        self.presets = PresetShelf(session.runs_dir)
        self._session = session
        self._read: tuple[float, Machine | None] = (0.0, None)
        """Time of the monotonic clock at which the machine was last read."""
        self._folder = (-math.inf, "")
        """When the folder of all runs was last checked, and why it could not be written then."""
        self._estimate = functools.lru_cache(maxsize=128)(self._estimate_now)
        self._costs = functools.lru_cache(maxsize=128)(self._costs_now)
        self._timed = functools.lru_cache(maxsize=128)(self._timed_now)
        self._preview = functools.lru_cache(maxsize=16)(self._preview_now)
        self._cards = functools.lru_cache(maxsize=32)(model_cards)
        self._smaller = functools.lru_cache(maxsize=64)(_smaller_than)
        self._samples: dict[tuple[str, DataConfig], Sample] = {}
        self._rows: dict[DataConfig, float | None] = {}
        """Number of rows of these data; None if that is not known before a run."""

    def opening(self, tab: str, other: str) -> dict[str, Any]:
        """Returns what the form of a tab begins with; see `app.pages.new.form_routes`."""
        listed = list(self.presets.listed().values())
        found: dict[str, Any] = {"choices": [(each.label, each.file) for each in listed]}
        draft = self.drafts.recall(tab, other)
        if draft is not None:
            file, shown = draft
            preset = self.presets.get(file)
            # Without a preset, these settings come from a run.
            named = (
                {"preset": file, "about": preset.about} if preset else {"preset": None, "about": ""}
            )
            return found | named | {"shown": shown, "fills": True}
        if self.drafts.problem:
            found["about"] = self.drafts.problem
        first = next(iter(listed), None)
        if first is not None and first.config is not None:
            found |= {"preset": first.file, "shown": shown_values(first.config), "fills": False}
        return found

    def fit_panel(
        self, shown: dict[str, Any], timed: bool = False, preset: str | None = None
    ) -> dict[str, Any]:
        """Returns the fit panel of component values by dotted name; see `app.pages.new.fit_panel`.
        timed: with the time of a step for each suggestion, and with models that fit instead, which
        may take as long again. preset: the one that the form began with.
        """
        given = shown
        shown, notes = with_even_rows(shown)
        free = free_on(self._machine())
        try:
            config = read_config(shown)
            asked = self._asked(config)
            estimated = self._timed(*asked) if timed else self._estimate(*asked)
            pace = self._pace(estimated, asked[1])
            report = replace(estimated, time=pace.counted_in(estimated.time))
        except ConfigError as error:
            sentence = as_labeled(describe_error(error))
            field = _component_id(error.field)
            return unchecked(WRONG_SETTING, sentence, field)
        except RamstreamError as error:
            field = _component_id(str(error).partition(":")[0])
            headline = WRONG_SETTING if field else "Cannot be checked yet"
            return unchecked(headline, as_labeled(str(error)), field)
        except Exception as error:  # noqa: BLE001  the page shows any fault of the program
            return unchecked("Cannot be checked", unforeseen(error))
        found = self._run_length(config)
        warnings = {as_labeled(each.text): each for each in setting_warnings(config)}
        fixes = {text: fix_of(warning, config) for text, warning in warnings.items()}
        if found is not None and found.warning:
            fixes[found.warning] = fix_of_passes(found)
        on_example = remark_on_example(config)
        if on_example:
            what, fix = self._other_model(preset, given) if timed else (CHOOSE_ANOTHER, None)
            fixes[f"{on_example} {what}"] = fix
        asks = to_confirm(config, asked[1])
        fixes |= slower_by(config, asked[1])
        remarks = [*notes, *fixes, *self._about_serving()]
        seconds = _run_seconds(report, found, pace)
        text = run_length_text(config, found, seconds)
        # These are asked outside the cached estimate: a package may be installed meanwhile.
        tracked = destinations(config.output.trackers, self._session.runs_dir)
        too_large = timed and report.status == FitStatus.DOES_NOT_FIT
        smaller = self._smaller(config, asked[1]) if too_large else ()
        costs = self._costs(*asked) if timed else None
        busy = self._session.why_not_start()
        waiting = len(self._session.queue.listed()) if busy else 0
        begins: float | None = 0.0
        if busy:  # how long those take that wait is not known
            begins = None if waiting else self._session.free_at()
        lacks, lacking = self._lacks(config)
        to_download, here = self._to_download(config), self._machine()
        beside = Beside(
            to_download=size_text(to_download) if to_download and not lacks else "",
            download=on_disk_of_runs(here, to_download),
            disk_free=here.disk_free,
            remarks=remarks,
            fixes=fixes,
            rate=config.train.learning_rate,
            tracked=tracked,
            job=job_lines(config, found),
            run_length=text,
            length=found,
            run_seconds=seconds,
            pace=pace.note,
            waiting=waiting,
            begins=begins,
            smaller=smaller,
            has_more=bool(on_example),
            costs=costs,
            lacks=lacks,
            lacking=lacking,
            remedy=WITHOUT_NETWORK.format(config.model.source) if lacking == NO_MODEL else "",
            asks=asks,
            free=free,
        )
        return fit_panel(report, busy, beside)

    def _about_serving(self) -> list[str]:
        """Returns that a run is served, whose memory a start takes; empty where none is."""
        served = self._session.served_id
        if served is None:
            return []
        name = self._session.name_of_run(served)
        return [f"{name} is served to other programs; serving ends when this training starts."]

    def derived(
        self, preset: str | None, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the `changes` of other settings that follow from what a person changed in a form
        that began with a preset, and `notes`, the sentences about them.
        """
        found = self._derived(preset, before, after)
        return {"changes": found.changes, "notes": list(found.notes)}

    def _derived(
        self, preset: str | None, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> DerivedDefaults:
        names = {each.name for each in self.presets.listed().values()}
        return derived_defaults(before, after, names, self._values_of(preset))

    def _values_of(self, preset: str | None) -> dict[str, Any] | None:
        """Returns the component values of a preset, or None where there are none."""
        found = self.presets.get(preset)
        return None if found is None or found.config is None else shown_values(found.config)

    def trains_as_preset(self, preset: str | None, shown: dict[str, Any]) -> bool:
        """Returns whether the form has the data and the model that its preset tells of."""
        own = self._values_of(preset)
        if own is None:
            return True
        return all(shown[name] == own[name] for name in ("data.source", "model.source"))

    def command(self, preset: str | None, shown: dict[str, Any]) -> str:
        """Returns the command that trains the form's settings without a browser. Raises RunError
        for invalid settings.
        """
        try:
            config = read_config(with_even_rows(shown)[0])
        except ConfigError as error:
            raise RunError(as_labeled(describe_error(error))) from None
        listed = self.presets.listed()
        bundled = [each for each in listed.values() if not each.is_own]
        return train_command(
            config, listed.get(preset or ""), bundled, Path(self._session.runs_dir)
        )

    def fitting(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Returns the `changes` of settings that fit a person's own data, once they can be read."""
        try:
            config = read_config(with_even_rows(shown)[0])
            found = self._read_rows(config.model.source, config.read_data)
        except RamstreamError:
            return {"changes": {}}
        if "format" not in found:
            return {"changes": {}}
        changes = fitting(config, found["format"], self._run_length(config))
        return {"changes": shown_changes(changes)}

    def models(self, preset: str | None, shown: dict[str, Any]) -> dict[str, Any]:
        """Returns `models` of the catalog as cards, those that fit first; see `model_cards`. Each
        has the settings that follow when a person chooses it. `free`: with what they were judged.
        `is_cut_off`: those that are not on this machine cannot be had now.
        """
        try:
            chosen = read_config(with_even_rows(shown)[0])
            job = self._with_model(preset, shown, ANY_MODEL)
            own = (self._values_of(preset) or {}).get("model.source", "")
            sources = (str(shown["model.source"]), str(own), EXAMPLES[0].source)
            example = next(found for each in sources if (found := example_of(each)) is not None)
            of_example = self._with_model(preset, shown, example.source)
            unnamed = {"name": ""}  # another name is no reason to plan again
            machine = self._machine()
            downloads = self._session.engine.downloads_weights
            of_models = (chosen.with_values(unnamed), of_example.with_values(unnamed))
            cards = self._cards(job.with_values(unnamed), machine, *of_models, downloads)
            to_download = next((card["id"] for card in cards if card["is_download"]), None)
            is_cut_off = to_download is not None and self._is_cut_off(job, to_download)
            return {
                "models": [*map(out_of_reach, cards)] if is_cut_off else list(cards),
                "free": free_on(machine),
                "is_cut_off": is_cut_off,
            }
        except RamstreamError:  # the fit panel says what is wrong
            return {"models": [], "free": "", "is_cut_off": False}

    def _is_cut_off(self, job: TrainConfig, source: str) -> bool:
        """Returns whether a model that is not on this machine cannot be had."""
        other = job.with_values({"model.source": source})
        refuse = self._session.engine.refuse_out_of_reach
        return bool(_refusal(lambda: refuse(other, waits=False)))

    def _with_model(self, preset: str | None, shown: dict[str, Any], source: str) -> TrainConfig:
        """Returns the form's settings with another model, and what follows from it."""
        after = {**shown, "model.source": source}
        follows = self._derived(preset, shown, after).changes
        return read_config(with_even_rows({**after, **follows})[0])

    def _other_model(
        self, preset: str | None, shown: dict[str, Any]
    ) -> tuple[str, dict[str, Any] | None]:
        """Returns what to do about the model of an example, and the button that takes another one:
        the largest that fits and is on this machine, else the largest that can be had.
        """
        found = self.models(preset, shown)["models"]
        cards = [each for each in reversed(found) if each["fits"] and not each["is_example"]]
        if not cards:
            return NONE_FITS, None
        engine = self._session.engine
        jobs = [self._with_model(preset, shown, card["id"]) for card in cards]
        are_here = [not engine.downloads_weights(job) for job in jobs]
        for place in sorted(range(len(cards)), key=lambda number: not are_here[number]):
            refuse = functools.partial(engine.refuse_out_of_reach, jobs[place], waits=False)
            if not _refusal(refuse):
                changes = {"model.source": cards[place]["id"]}
                return CHOOSE_ANOTHER, {
                    "label": f"Use {cards[place]['title']}",
                    "changes": changes,
                }
        return NONE_TO_BE_HAD, TRY_AGAIN

    def count_rows(self, shown: dict[str, Any]) -> None:
        """Counts the rows of the form's data, which later fit panels show. It reads all of them,
        and takes about a second for 100 MB; rows that cannot be read are not counted.
        """
        try:
            data = read_config(with_even_rows(shown)[0]).data
            sample = next((one for (_, of), one in self._samples.items() if of == data), None)
            if data not in self._rows and sample is not None and not sample.is_all:
                _keep(self._rows, data, self._session.engine.count_rows(data))
                # The count looked at the columns of all rows, which the next preview shows.
                self._preview.cache_clear()
        except RamstreamError:
            return  # the fit panel and the preview say what is wrong

    def _run_length(self, config: TrainConfig) -> RunLength | None:
        sample = self._samples.get((config.model.source, config.read_data))
        if sample is None:
            return None
        return run_length(config, sample, self._rows.get(config.data))

    def preview(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Returns the first rows with the trained parts marked, and how the data were interpreted.

        If the rows cannot be read, `error` has the reason, or `unread` where the Summary has it,
        because it is not about these rows; they are then shown as `texts`. In all cases, `given`
        holds the component values that the preview was made from, and `finding` whether a run
        could train on the data: None, or its `text` and whether it `blocks` a start. `confirm` is
        there where a person may confirm that keys are no flags.
        """
        given = {
            name: value
            for name, value in shown.items()
            if name in ("model.source", OBJECTIVE) or name.startswith("data.")
        }
        try:
            # What is wrong with other settings says nothing about the data.
            config = read_config({**default_values(), **given})
            found = self._read_rows(config.model.source, config.read_data)
        except ConfigError as error:
            unread = _unread(describe_error(error))
            if not given.get("data.source"):
                unread = {"unread": "", "finding": unread["finding"]}
            return unread | {"given": given}
        except DataError as error:
            return _unread(str(error)) | {"given": given}
        except RamstreamError as error:
            # The tokenizer cannot be read, which says nothing about the data.
            text = as_labeled(str(error))
            finding = {"text": text, "blocks": True, "headline": NO_TOKENIZER}
            unread = {"unread": AFTER_TOKENIZER, "finding": finding, "given": given}
            return unread | self._plain_rows(config.read_data)
        except BaseException as error:  # noqa: BLE001  a library in Rust raises no Exception
            return _unread(unforeseen(error)) | {"given": given}
        if found["finding"] is not None:
            self._rows.pop(config.data, None)
        return found | {"given": given}

    def _plain_rows(self, data: DataConfig) -> dict[str, Any]:
        """Returns the first rows as `texts`, for a model without a tokenizer, and the `mapping` of
        their columns; for rows that cannot be read, what `preview` says of them.
        """
        try:
            found = self._session.engine.preview(data, None, rows=PREVIEW_ROWS)
        except BaseException as error:  # noqa: BLE001  a library in Rust raises no Exception
            return _unread(unforeseen(error))
        mapping = {"mapping": _as_in_form(found["mapping"])}
        if "error" in found:
            return _unread(found["error"]) | mapping
        texts = [{**row, "text": row["text"][:PREVIEW_CHARACTERS]} for row in found["texts"]]
        return {"texts": texts} | mapping

    def read_trainable(self, shown: dict[str, Any]) -> TrainConfig:
        """Returns the config for component values by dotted name. Raises RamstreamError for an
        invalid value, for something that the run needs and lacks, and for a tokenizer or data that
        a run would refuse at once, with the sentence that the page shows.
        """
        config = read_config(with_even_rows(shown)[0])
        engine = self._session.engine
        runs_root.refuse_unusable(self._session.runs_dir.absolute())
        refuse_unusable(config)
        refuse_unasked_cpu(config, self._machine())
        engine.refuse_out_of_reach(config)
        engine.check_data(config.read_data)
        try:
            finding = self._read_rows(config.model.source, config.read_data)["finding"]
        except RamstreamError:
            raise
        except BaseException as error:  # noqa: BLE001  a library in Rust raises no Exception
            raise DataError(unforeseen(error)) from None
        if finding is not None and finding["blocks"]:
            raise DataError(finding["text"])
        return config

    def _lacks(self, config: TrainConfig) -> tuple[str, str]:
        """Returns a sentence on what a run needs and lacks now, and the same in a few words; both
        are empty if there is nothing.
        """
        surveyed, lacks = self._folder
        if time.monotonic() - surveyed >= MACHINE_SECONDS:
            lacks = _refusal(lambda: runs_root.refuse_unusable(self._session.runs_dir.absolute()))
            self._folder = (time.monotonic(), lacks)
        engine = self._session.engine
        if lacks:
            return lacks, NO_FOLDER
        lacks = _refusal(lambda: engine.refuse_out_of_reach(config, waits=False))
        return lacks, NO_MODEL if lacks else ""

    def _asked(self, config: TrainConfig) -> tuple[TrainConfig, Machine, int]:
        """Returns what estimates of a config depend on. Raises ConfigError for a folder of this
        machine that cannot take moments, and ModelError for weights of this machine with which no
        run could begin.
        """
        refuse_unusable(config)
        machine = beside_download(self._machine(), self._to_download(config))
        if config.engine.disk is not None and machine.here:
            check_offload_folder(config.engine.disk)
        return config, machine, _rates_written()

    def _pace(self, report: FitReport, machine: Machine) -> Pace:
        """Returns how runs on the device of `report` usually go."""
        device = CPU if report.choices["device"] == "cpu" else machine.gpus[0].name
        since = measured_at(device) or 0.0
        return usual_pace(self._session.runs(), report.model["source"], device, since)

    def _to_download(self, config: TrainConfig) -> int:
        """Returns the bytes of weights that a run would first download, or 0."""
        if not self._session.engine.downloads_weights(config):
            return 0
        return download_bytes(shape_of_run(config), config)

    def _machine(self) -> Machine:
        """Returns this machine as last read, at most `MACHINE_SECONDS` ago."""
        read_at, machine = self._read
        if machine is None or time.monotonic() - read_at >= MACHINE_SECONDS:
            machine = steadied(read_machine(self._session.runs_dir), machine)
            self._read = (time.monotonic(), machine)
        return machine

    def _estimate_now(self, config: TrainConfig, machine: Machine, _rates: int) -> FitReport:
        return self._session.engine.estimate(config, machine)

    def _timed_now(self, config: TrainConfig, machine: Machine, rates: int) -> FitReport:
        report = self._estimate(config, machine, rates)
        shown = replace(report, suggestions=best_suggestions(report.suggestions))
        shape = shape_of_run(config)
        return with_times(shown, config, machine, shape, adapted=adapted_shape)

    def _costs_now(self, config: TrainConfig, machine: Machine, rates: int) -> Costs | None:
        report = self._estimate(config, machine, rates)
        if report.status == FitStatus.DOES_NOT_FIT:
            return None
        shape = shape_of_run(config)
        return costs_of(report.chosen, config, machine, shape)

    def _read_rows(self, model: str, data: DataConfig) -> dict[str, Any]:
        """Returns the preview of the first rows; one with a finding is not kept, since the
        file is to be read again once it is corrected.
        """
        found = self._preview(model, data)
        if found["finding"] is not None:
            self._preview.cache_clear()
        return found

    def _preview_now(self, model: str, data: DataConfig) -> dict[str, Any]:
        engine = self._session.engine
        tokenizer = engine.load_tokenizer(model)
        add_tokens(tokenizer, data.add_tokens)
        found = engine.preview(data, tokenizer, rows=PREVIEW_ROWS)
        mapping = _as_in_form(found.get("mapping"))
        if "error" in found:
            unread = _unread(found["error"]) | {"mapping": mapping}
            return unread | _to_confirm(data, found.get("unused_flags"))
        _keep(self._samples, (model, data), Sample.of(found))
        columns = dict(found["columns"])
        return {name: found[name] for name in TAKEN_OVER} | {
            "mapping": mapping,
            "finding": _finding(found),
            "columns": [[str(name), str(meaning)] for name, meaning in columns.items()],
            "rows": [_shortened(row) for row in found["rows"]],
            "lengths": lengths_figure(found),
            "caption": lengths_text(found),
            "packing": packing_text(found),
        }


def _refusal(check: Callable[[], None]) -> str:
    """Returns the sentence with which `check` refuses something, or an empty text if it does
    not.
    """
    try:
        check()
    except RamstreamError as error:
        return as_labeled(str(error))
    return ""


def _run_seconds(report: FitReport, found: RunLength | None, pace: Pace) -> float | None:
    """Returns the seconds of a run, None where rates or the length of the run are not known."""
    of_run, of_step = report.time["run_seconds"], report.time["step_seconds"]
    if of_run or not of_step or found is None:
        return float(of_run) if of_run else None
    return float(of_step * found.steps * pace.times)


def _smaller_than(config: TrainConfig, machine: Machine) -> tuple[CatalogEntry, ...]:
    """Returns smaller models of the catalog that fit; none where no table is about the settings."""
    try:
        shape = catalog_shape(config.model.source, config.model.dtype) or shape_of_run(config)
        smaller = smaller_models(config, shape, machine, SMALLER_SHOWN, is_offered)
    except RamstreamError:
        return ()
    return tuple(smaller)


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds an entry to `known`, which loses its oldest one where it has `SAMPLES_KEPT`."""
    while len(known) >= SAMPLES_KEPT:
        known.pop(next(iter(known)), None)
    known[key] = value


def _rates_written() -> int:
    """Returns when rates of this machine were last stored (ns), or 0. Estimates depend on them."""
    try:
        return rates_file().stat().st_mtime_ns
    except OSError:
        return 0


def _unread(error: str) -> dict[str, Any]:
    """Returns a preview of rows that cannot be read."""
    text = as_labeled(error)
    return {"error": text, "finding": {"text": text, "blocks": True}}


def _to_confirm(data: DataConfig, names: list[str] | None) -> dict[str, Any]:
    """Returns `confirm` for keys that may be flags: how many are new, and what the form shows of
    `data.unused_flags` once a person has confirmed that they are none.
    """
    if names is None:
        return {}
    (setting,) = (setting for setting in settings() if setting.dotted == UNUSED_FLAGS)
    new = len(names) - len(data.unused_flags)
    return {"confirm": {"new": new, "shown": setting.show(tuple(names))}}


def _finding(found: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what stands against training on the data of an engine's preview, or None."""
    mapping = found["mapping"] or {}
    if mapping.get("refused"):
        return {"text": _question(mapping), "blocks": True, "asks": True}
    if not found["untrainable"]:
        return _endless(found["endless"])
    # Rows that were not read may have something to train on.
    return {"text": as_labeled(found["untrainable"]), "blocks": not found["has_more"]}


def _endless(sentence: str) -> dict[str, Any] | None:
    """Returns what stands against training answers that end with no token, or None."""
    if not sentence:
        return None
    headline = "Answers will not end by themselves."
    return {"text": as_labeled(sentence), "blocks": False, "headline": headline}


def _component_id(field: str) -> str | None:
    """Returns the id of the component that shows `field`, or None if there is no such component."""
    name = field.partition("[")[0]  # one component shows the whole list
    return next((setting.elem_id for setting in settings() if setting.dotted == name), None)


def _as_in_form(mapping: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the engine's mapping of columns with the form's values added.

    The `shown` value of each column is what its setting shows if the column is chosen. `question`
    is what a person is asked about a guess, in the preview as in the Summary.
    """
    if mapping is None:
        return None
    setting = next(setting for setting in settings() if setting.dotted == "data.columns.prompt")
    columns = [column | {"shown": setting.show(column["name"])} for column in mapping["columns"]]
    rest = {name: value for name, value in mapping.items() if name != "why"}
    return rest | {"question": _question(mapping), "columns": columns}


def _question(mapping: dict[str, Any]) -> str:
    """Returns what a person is asked about the engine's guess of columns; empty where it knows."""
    if mapping["state"] != "guess":
        return ""
    names = {role: _short(name) for role, name in mapping["chosen"].items()}
    try:
        question = QUESTIONS[mapping["kind"]].format(**names)
    except KeyError:
        question = WHICH
    return f"{as_labeled(mapping['why'])} {question}".strip()


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_COLUMN else f"{name[: LONGEST_COLUMN - 1]}…"


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with its documents joined, and cut off after `PREVIEW_CHARACTERS`."""
    spans: list[dict[str, Any]] = []
    left = PREVIEW_CHARACTERS
    for document in row["documents"]:
        if any("answer" in span for span in document):
            left = PREVIEW_CHARACTERS // 2  # both answers of a pair are seen
        for span in document:
            if left > 0:
                spans.append(span | {"text": span["text"][:left]})
            left -= len(span["text"])
        if left < 0 and "answer" in spans[-1]:
            spans.append({"text": " …", "trained": False})
            left = 0
    if left < 0:
        spans.append({"text": " …", "trained": False})
    return {
        "where": row["where"],
        "tokens": row["tokens"],
        "trained_tokens": row["trained_tokens"],
        "cut": row["cut"],
        "skipped": row["skipped"],
        "spans": spans,
    }
