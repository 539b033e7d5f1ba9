"""The routes and texts of Hardware are tested without a browser."""

from __future__ import annotations

import asyncio
import csv
import io
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette

from app.pages.frame.job_routes import job_routes
from app.pages.hardware import kept_rows
from app.pages.hardware.hardware import Hardware, read_settings
from app.pages.hardware.hardware_routes import hardware_routes
from app.pages.hardware.measuring import PARTS, _Asking, probe
from app.pages.new.known_models import machine_text
from app.server.guard import Guard, GuardPolicy
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.machine.findings import Check, Effect, Finding
from engine.machine.gpus import GpuInfo
from engine.machine.known_machines import machines
from engine.machine.rates import store_rates, stored_rates
from engine.machine.read_machine import Machine, read_machine
from engine.paths import PROGRAM_ROOT
from engine.planning.fit.model_table import HERE, columns, rows_of
from engine.planning.shape.catalog import catalog, entry_of
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from engine.runtime.measure import machine_rates
from engine.text import in_seconds
from tests.support.synthetic_run import run_events

GIB, MIB = 1 << 30, 1 << 20
HOSTILE = "<img src=x onerror=alert(1)>"
LLAMA = "meta-llama/Llama-3.1-8B"
CARD = GpuInfo(
    "NVIDIA GeForce RTX 4090",
    24 * GIB,
    23 * GIB,
    driver="575.1",
    pcie_generation=1,
    pcie_width=16,
    pcie_generation_max=4,
    pcie_width_max=16,
)
MACHINE = Machine(
    "A CPU",
    16,
    ram_total=256 * GIB,
    ram_limit=192 * GIB,
    ram_available=180 * GIB,
    gpus=(CARD,),
    disk_path="runs",
    disk_free=500 * GIB,
    here=True,
)


MODELS = (LLAMA, "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-2-70b-hf")


OFFERED = (
    "RTX 3060 12GB",
    "RTX 4090",
    "L40S",
    "RTX 6000 Ada",
    "RTX PRO 6000 Blackwell",
    "H200",
    "GB10",
)
"""Machines with cards of every size, and one whose memory is unified."""


@pytest.fixture(autouse=True)
def few_models_and_no_rates(tmp_path, monkeypatch):
    """Keeps the table to a few models, and offers to a few machines, so that they are made
    quickly.
    """
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "cache"))
    offered = tuple(known for known in machines() if known.name in OFFERED)
    monkeypatch.setattr("engine.planning.fit.fitting_machines.machines", lambda: offered)
    for file in ("model_table", "fitting_machines"):
        monkeypatch.setattr(
            f"engine.planning.fit.{file}.catalog", lambda: tuple(map(entry_of, MODELS))
        )


class Probe:
    """A `Probe` is a measurement that lasts until it is released or cancelled."""

    def __init__(self):
        self.may_end = threading.Event()

    def __call__(self, job, go_on):
        while not self.may_end.wait(0.005):
            go_on()
        return "Measured."


class Tab:
    """A `Tab` calls the routes behind the guard as the page does."""

    def __init__(self, folder, machine=MACHINE):
        self.session, self.probe, self.machine = Session(folder / "runs"), Probe(), machine
        self.hardware = Hardware(self.session, lambda path: self.machine, self.probe)
        routes = hardware_routes(self.hardware) + job_routes(self.session.jobs)
        self.app = Guard(Starlette(routes=routes), GuardPolicy.for_bind("127.0.0.1", None))

    def call(self, path, body=None, **headers):
        async def go():
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1:7860"
            ) as client:
                return await client.request(
                    "GET" if body is None else "POST", f"/api/{path}", json=body, headers=headers
                )

        return asyncio.run(go())

    def follow(self, job):
        end = time.monotonic() + 60
        while (found := self.call(f"jobs/{job['id']}").json())["state"] == "working":
            assert time.monotonic() < end
            time.sleep(0.005)
        return found


@pytest.fixture
def tab(tmp_path):
    return Tab(tmp_path)


def test_this_machine_is_told_with_its_real_limits(tab):
    about = tab.call("hardware").json()
    facts = dict(about["machine"]["pairs"])
    assert facts["Processor"] == "A CPU, 16 cores usable"
    assert facts["RAM"] == "180 of 192 GiB free"
    assert facts["GPU"] == (
        "NVIDIA GeForce RTX 4090, 23.0 of 24.0 GiB free; driver 575.1; PCIe 1.0 x16 now, PCIe "
        "4.0 x16 at most"
    )
    assert facts["Disk"] == "500 GiB free in runs"
    assert about["why_not_measure"] == "" and about["job"] is None


def test_rates_are_estimated_until_they_are_measured_and_speeds_follow_them(tab):
    before = tab.call("hardware").json()["rates"]
    assert before["origin"] == "estimated"
    assert "RTX 4090" in before["caption"]
    assert before["at"] is None
    asked = {"machine": HERE, "timed": True}
    estimated = tab.call("hardware/column", asked).json()["cells"][LLAMA]
    known = next(known for known in machines() if known.name == "RTX 4090").rates()
    store_rates(CARD.name, replace(known, matmul=known.matmul / 4, attention=known.attention / 4))
    after = tab.call("hardware").json()["rates"]
    assert after["origin"] == "measured" and after["at"] == pytest.approx(time.time(), abs=60)
    measured = tab.call("hardware/column", asked).json()["cells"][LLAMA]
    assert estimated["estimated"] and not measured["estimated"]
    assert measured["tokens_per_second"] < estimated["tokens_per_second"]
    assert "measured rates" in measured["detail"] and "specification" in estimated["detail"]


def test_without_a_gpu_nothing_is_estimated_and_no_plan_depends_on_it(tmp_path):
    slow = Finding(Check.DISK, "The disk is slow.", Effect.SLOWS, "mount another")
    bare = replace(MACHINE, gpus=(), notes=("There is no NVIDIA GPU.",), findings=(slow,))
    tab = Tab(tmp_path, bare)
    about = tab.call("hardware").json()
    assert about["rates"]["origin"] == "unknown"
    assert "Not measured yet" in about["rates"]["caption"]
    assert dict(about["machine"]["pairs"])["GPU"].startswith("none")
    assert about["machine"]["notes"] == [
        "There is no NVIDIA GPU.",
        "The disk is slow. To fix it: `mount another`",
    ]


def test_choices_name_the_catalog_and_the_supported_machines(tab):
    choices = tab.call("hardware/choices").json()
    assert [model["id"] for model in choices["models"]] == [entry.id for entry in catalog()]
    names = [machine["name"] for machine in choices["machines"]]
    assert names == [known.name for known in machines() if known.supported]
    assert set(choices["shown"]) <= set(names) and len(choices["shown"]) >= 3
    for machine in choices["machines"]:
        assert all(figure["sources"] for figure in machine["figures"]), machine["name"]


def test_a_column_is_the_engine_s_table(tab):
    settings = {"rows": 8, "tokens": 512}
    found = tab.call(
        "hardware/column", {"machine": "RTX 4090", "timed": False, "settings": settings}
    ).json()
    column = columns(["RTX 4090"], MACHINE)[1]
    rows = list(rows_of(read_settings(settings), (column,), timed=False))
    assert {row.entry.id: row.cells[0].host_bytes for row in rows} == {
        model: cell["host_bytes"] for model, cell in found["cells"].items()
    }
    words = {
        cell["verdict"]: (cell["labels"]["tone"], cell["labels"]["word"])
        for cell in found["cells"].values()
    }
    assert words["fits"] == ("good", "fits") and words["does_not_fit"] == ("bad", "too large")
    largest = max(found["cells"].values(), key=lambda cell: cell["host_bytes"])
    assert "Missing: " in largest["detail"] and largest["missing"] in largest["detail"]


def test_a_checkpoint_that_also_reads_images_is_told_with_both_parts(tab, monkeypatch):
    vision, entry = "Qwen/Qwen2.5-VL-7B-Instruct", entry_of("Qwen/Qwen2.5-VL-7B-Instruct")
    for file in ("model_table", "fitting_machines"):
        monkeypatch.setattr(f"engine.planning.fit.{file}.catalog", lambda: (entry,))
    counts = tab.call("hardware/column", {"machine": HERE, "timed": False}).json()["counts"]
    assert counts == {vision: {"parameters": 7615616512, "whole": 8292166656}}
    found = tab.call("hardware/largest", {}).json()
    assert found["id"] == vision
    assert found["sentences"][0].startswith(
        "Qwen2.5-VL 7B (7.62 of 8.29 billion parameters), 32 rows"
    )


def test_the_table_is_about_the_moments_that_are_asked_for(tab):
    tab.machine = replace(MACHINE, ram_available=65 * GIB)

    def cell_of(optimizer, model=LLAMA):
        settings = {"optimizer": optimizer}
        asked = {"machine": HERE, "timed": False, "settings": settings}
        return tab.call("hardware/column", asked).json()["cells"][model]

    assert cell_of("adamw")["labels"]["word"] == "too large"
    small = cell_of("adamw_8bit")
    assert small["labels"]["word"] in ("fits", "just fits")
    assert "with AdamW's moments in 8 bits" in small["detail"]
    best = cell_of("best")
    assert best["optimizer"] == "adamw_8bit" and best["host_bytes"] == small["host_bytes"]
    assert best["labels"]["word"] == small["labels"]["word"] + ", 8 bits"
    assert cell_of("best", "Qwen/Qwen3-0.6B")["labels"]["word"] == "fits, fp32"
    too_large = cell_of("best", "meta-llama/Llama-2-70b-hf")
    assert too_large["labels"]["word"] == "too large" and "8 bits" in too_large["detail"]


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_largest_model_and_offers_follow_the_moments(tab):
    tab.machine = replace(MACHINE, ram_available=65 * GIB)
    best = {"settings": {"optimizer": "best"}}
    found = tab.call("hardware/largest", best).json()
    assert found["id"] == LLAMA and "with AdamW's moments in 8 bits" in found["sentences"][0]
    assert tab.call("hardware/largest", {}).json()["id"] == "Qwen/Qwen3-0.6B"
    plain = tab.call("hardware/offers", {"model": LLAMA}).json()["offers"]
    assert not any(offer["moments"] for offer in plain)
    offers = tab.call("hardware/offers", {"model": LLAMA} | best).json()["offers"]
    # With moments in 8 bits, of which some live on a card of 48 GiB, as much RAM suffices.
    assert offers[0]["moments"] == "with AdamW's moments in 8 bits"
    assert offers[0]["ram"] == "48 GiB" and plain[0]["ram"] != "48 GiB"
    assert all(offer["moments"].startswith("with AdamW's moments in ") for offer in offers)


def test_what_was_computed_stays_until_the_machine_changes(tab, monkeypatch):
    """On a quiet machine, some hundred MiB of RAM come and go between two visits."""
    asked = {"machine": HERE, "timed": True, "settings": {"rows": 4}}

    def visit(machine=MACHINE, fresh=""):
        tab.machine = machine
        based_on = tab.call(f"hardware{fresh}").json()["table"]
        column = tab.call("hardware/column", asked).json()
        return based_on, column, tab.call("hardware/largest", {"settings": {"rows": 4}}).json()

    with monkeypatch.context() as quiet:
        first = visit()
        quiet.setattr("app.pages.hardware.hardware.rows_of", None)
        waver = replace(CARD, free=CARD.free - 300 * MIB, temperature=50, pcie_generation=4)
        for less in (-700 * MIB, 700 * MIB, 3 * GIB):
            free = MACHINE.ram_available - less
            other = replace(MACHINE, ram_available=free, disk_free=GIB, gpus=(waver,))
            assert visit(other) == first
    assert first[0]["memory"] == "180 GiB RAM and 23 GiB GPU memory"
    assert visit(other, "?fresh=true")[0]["memory"].startswith("177 GiB RAM and")
    last = visit(replace(MACHINE, ram_available=20 * GIB))
    assert last[0]["memory"].startswith("20 GiB RAM and")
    assert last[0]["at"] > first[0]["at"] and last[2] != first[2]


def test_the_column_of_a_known_machine_outlives_the_program(tmp_path, monkeypatch):
    """It is read from its file, unless it is damaged; this machine's is never kept."""
    asked = [{"machine": name, "timed": True, "settings": {"rows": 4}} for name in ("H200", HERE)]
    first, here = (Tab(tmp_path).call("hardware/column", each).json() for each in asked)
    (file,) = (tmp_path / "cache" / "tables").iterdir()
    computed = []

    def counting(*arguments, **more):
        computed.append(arguments[1])
        return rows_of(*arguments, **more)

    monkeypatch.setattr("app.pages.hardware.hardware.rows_of", counting)
    again = [Tab(tmp_path).call("hardware/column", each).json() for each in asked]
    assert again == [first, here] and [column.name for (column,) in computed] == [HERE]
    file.write_bytes(file.read_bytes()[:-40])
    assert Tab(tmp_path).call("hardware/column", asked[0]).json() == first
    assert [column.name for (column,) in computed] == [HERE, "H200"]
    monkeypatch.setattr(kept_rows._files(), "first", ["other code"])
    assert Tab(tmp_path).call("hardware/column", asked[0]).json() == first
    assert [column.name for (column,) in computed] == [HERE, "H200", "H200"]


def test_what_decides_a_kept_column_is_all_that_planning_imports():
    """Of the engine, these packages import each other and single files alone."""
    rooms = "|".join(kept_rows.ROOMS)
    for room in kept_rows.ROOMS:
        for file in (PROGRAM_ROOT / "engine" / room).rglob("*.py"):
            for name in re.findall(
                r"^\s*(?:from|import) engine\.([\w.]+)", file.read_text(), re.MULTILINE
            ):
                is_single = (PROGRAM_ROOT / "engine" / f"{name}.py").exists()
                assert is_single or re.match(rf"({rooms})\b", name), (file, name)


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_table_is_about_adapters_where_they_are_chosen(tab):
    """The model of 70 billion parameters fits the machine of 180 GiB with adapters alone."""
    large, lora = "meta-llama/Llama-2-70b-hf", {"settings": {"method": "lora"}}
    asked = {"machine": HERE, "timed": True}
    whole = tab.call("hardware/column", asked).json()
    column = tab.call("hardware/column", asked | lora).json()
    assert whole["cells"][large]["verdict"] == "does_not_fit"
    found = column["cells"][large]
    assert found["verdict"] != "does_not_fit" and found["method"] == "lora"
    assert column["counts"][large] == whole["counts"][large]
    seconds = found["step_seconds"]
    assert f"A step takes about {in_seconds(seconds)}." in found["detail"]
    assert seconds * found["tokens_per_second"] == pytest.approx(32 * 1024)
    largest = tab.call("hardware/largest", lora).json()
    assert largest["id"] == large and "adapters (LoRA) of rank 16" in largest["sentences"][1]
    assert "(69 billion parameters)" in largest["sentences"][1]
    assert " · 69B (LoRA), in batches of 32 rows of 1,024 tokens" in largest["text"]
    plain, offers = (
        tab.call("hardware/offers", {"model": large} | more).json()["offers"] for more in ({}, lora)
    )
    assert len(offers) > len(plain) and offers[0]["ram"] == "96 GiB" != plain[0]["ram"]
    question = {"machines": [HERE], "models": [large]} | lora
    (row,) = csv.DictReader(io.StringIO(tab.call("hardware/csv", question).json()["csv"]))
    assert row["method"] == "lora" and int(row["trained_parameters"]) < 1e9
    parts = tab.call("hardware/column", asked | {"settings": {"method": "parts"}})
    assert parts.status_code == 409 and "no parts are named" in parts.json()["error"]


def test_csv_has_the_rows_asked_for_in_their_order(tab):
    models = [LLAMA, "Qwen/Qwen2.5-7B"]
    text = tab.call(
        "hardware/csv", {"machines": ["H200", HERE], "models": models, "settings": {}}
    ).json()["csv"]
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["model"], row["machine"]) for row in rows] == [
        (model, name) for model in models for name in ("H200", HERE)
    ]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)


def test_the_largest_models_are_told_for_all_weights_and_for_adapters(tab, tmp_path):
    found = tab.call("hardware/largest", {}).json()
    whole, adapters = found["sentences"]
    assert entry_of(found["id"]).title in whole and "adapters (LoRA)" in adapters
    assert "of RAM and" in whole and "tokens/s (estimated)" in whole
    assert re.fullmatch(
        r"[\d.]+B \(all weights\) · [\d.]+B \(LoRA\), in batches of [\d,]+ rows of [\d,]+ tokens",
        found["text"],
    )
    small = Tab(tmp_path, replace(MACHINE, ram_available=GIB))
    assert small.call("hardware/largest", {}).json()["id"] is None
    nothing = small.call("hardware/largest", {}).json()
    assert "No model" in nothing["sentences"][0]
    assert nothing["text"].startswith("none (all weights)")


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_machines_are_offered_for_an_id_and_for_a_title(tab):
    found = tab.call("hardware/offers", {"model": LLAMA}).json()
    assert found == tab.call("hardware/offers", {"model": "llama 3.1 8b"}).json()
    ram = [int(offer["ram"].removesuffix(" GiB").replace(",", "")) for offer in found["offers"]]
    assert ram == sorted(ram) and ram[0] >= 96
    assert all("tokens/s" in offer["speed"] for offer in found["offers"])


@pytest.mark.parametrize(
    "path, body, text",
    [
        ("column", {"machine": HOSTILE, "timed": False}, "is not a known machine"),
        ("column", {}, "machine is missing"),
        ("column", {"machine": HERE, "settings": 3}, "not an object"),
        ("column", {"machine": HERE, "settings": {"rows": HOSTILE}}, "is not a whole number"),
        ("column", {"machine": HERE, "settings": {"rows": None}}, "Batch size"),
        ("column", {"machine": HERE, "settings": {"rows": 1 << 30}}, "too many"),
        ("column", {"machine": HERE, "settings": {"tokens": 0}}, "too small"),
        ("largest", {"settings": {"dtype": "int8"}}, "'int8'"),
        ("column", {"machine": HERE, "settings": {"optimizer": "sgd"}}, "Optimizer: 'sgd'"),
        ("offers", {"model": HOSTILE}, "is not in the catalog"),
        ("csv", {"machines": [HERE], "models": [HOSTILE]}, "no row of this table"),
        ("csv", {"machines": [], "models": []}, "0 machines"),
        ("csv", {"machines": HERE, "models": []}, "list of texts"),
        ("csv", {"machines": ["H200"] * 99, "models": []}, "99 machines"),
    ],
)
def test_bad_parameters_give_one_sentence(tab, path, body, text):
    answer = tab.call(f"hardware/{path}", body)
    error = answer.json()["error"]
    assert answer.status_code == 409
    assert text in error
    assert "\n" not in error
    # Text that a person typed stays text: the answer is JSON, and browsers must not interpret it as
    # anything else.
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


# ------------------------------------------------------------------ the measurement


def test_a_measurement_is_a_job_that_can_be_cancelled(tab):
    job = tab.call("hardware/measure", {}).json()
    assert tab.call("hardware").json()["job"]["id"] == job["id"]
    assert "still running" in tab.call("hardware/measure", {}).json()["error"]
    assert tab.call(f"jobs/{job['id']}/cancel", {}).json()["id"] == job["id"]
    found = tab.follow(job)
    assert found["state"] == "cancelled" and "was cancelled" in found["result"]
    assert tab.call("hardware").json()["job"] is None
    tab.probe.may_end.set()
    assert tab.follow(tab.call("hardware/measure", {}).json())["result"] == "Measured."


def test_a_measurement_computes_alone(tab, monkeypatch):
    """It waits until a column is computed, and can be cancelled then."""
    may_end, begun, computed = threading.Event(), threading.Event(), threading.Event()

    def slow_rows(*arguments, **more):
        begun.set()
        assert may_end.wait(60)
        found = list(rows_of(*arguments, **more))
        computed.set()
        return found

    monkeypatch.setattr("app.pages.hardware.hardware.rows_of", slow_rows)
    asked = {"machine": HERE, "timed": False}
    with ThreadPoolExecutor(2) as pool:
        column = pool.submit(tab.call, "hardware/column", asked)
        assert begun.wait(60)
        measured = []
        tab.hardware._measure = lambda job, go_on: measured.append(computed.is_set()) or "Measured."
        waiting = tab.call("hardware/measure", {}).json()
        tab.call(f"jobs/{waiting['id']}/cancel", {})
        assert tab.follow(waiting)["state"] == "cancelled"
        job = tab.call("hardware/measure", {}).json()
        may_end.set()
        assert tab.follow(job)["state"] == "done" and measured == [True]
        assert column.result().status_code == 200


def test_while_a_run_is_at_work_nothing_is_measured(tab, monkeypatch):
    job = tab.call("hardware/measure", {}).json()
    monkeypatch.setattr(Session, "active_id", "run-1")
    assert "A run was started" in tab.follow(job)["error"]
    about = tab.call("hardware").json()
    assert about["why_not_measure"].startswith("run-1 is training")
    assert "does not count as free" in about["machine"]["notes"][-1]
    answer = tab.call("hardware/measure", {})
    assert answer.status_code == 409 and "would slow" in answer.json()["error"]


def test_a_run_of_another_process_is_seen_too(tab):
    folder = create_run(
        tab.session.runs_dir,
        TrainConfig.from_dict({"name": "x", "model": {"source": "m"}, "data": {"source": "d"}}),
    )
    with folder.lock():
        recorder = RunRecorder(folder.path, folder.id)
        for event in run_events(3, ended=None):
            recorder.emit(event)
        assert tab.call("hardware").json()["why_not_measure"].startswith("x is training")
        recorder.close()


def test_the_probe_keeps_rates_and_ends_at_once_when_it_may_not_go_on(tab, monkeypatch):
    monkeypatch.setattr("app.pages.hardware.measuring.PROBE_SECONDS", 0.001)
    monkeypatch.setitem(machine_rates.PARAMETERS, "cpu", 1 << 16)
    tab.hardware._measure = probe
    found = tab.follow(tab.call("hardware/measure", {}).json())
    assert found["state"] == "done", found["error"]
    assert "GB/s" in found["result"] and found["done"] == len(PARTS) < found["total"]
    assert stored_rates("CPU") is not None

    class Backend:
        def submit(self, *_):
            raise AssertionError("work was begun")

    def stop():
        raise RunError("no")

    with pytest.raises(RunError, match="no"):
        _Asking(Backend(), stop).submit(None, (), None)


def test_the_line_of_every_page_names_nothing_that_changes_while_it_is_open(tmp_path):
    """It is drawn once. What is free of RAM and disk stands in Hardware, which asks again."""
    machine = read_machine(tmp_path)
    later = replace(machine, disk_free=1, ram_available=1, disk_path="elsewhere")
    assert machine_text(machine) == machine_text(later)
    assert "of RAM" in machine_text(machine) and "free" not in machine_text(machine)
