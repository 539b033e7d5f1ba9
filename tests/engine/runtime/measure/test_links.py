"""The link between GPUs is measured by another process, whose answer is kept with the rates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.machine.rates import stored_rates
from engine.runtime.measure import links
from engine.runtime.measure.links import link_rate
from engine.training.loop import planning
from tests.support.chosen import FAST_RATES

pytestmark = pytest.mark.computing

ANSWERS = "from engine.helper_process import take_output; take_output().write(b'{line}\\n')"


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(links.torch.cuda, "device_count", lambda: 2)


def test_one_gpu_has_no_link(monkeypatch):
    monkeypatch.setattr(links, "_PROGRAM", "raise SystemExit('not to be started')")
    assert link_rate() == 0.0


@pytest.mark.parametrize(
    "program, rate",
    [
        (ANSWERS.replace("{line}", '{"rate": 2.5e10}'), 2.5e10),
        ("raise RuntimeError('CUDA out of memory')", 0.0),
    ],
    ids=["answers", "fails"],
)
def test_another_process_measures_the_link(two_gpus, monkeypatch, program, rate):
    monkeypatch.setattr(links, "_PROGRAM", program)
    assert link_rate() == rate


@pytest.mark.parametrize("gpus, expected", [(1, 0.0), (2, 3e10), ("auto", 3e10)])
def test_a_plan_for_several_gpus_asks_for_the_link_once(monkeypatch, gpus, expected):
    asked = []
    monkeypatch.setattr(planning, "link_rate", lambda: asked.append(1) or 3e10)
    backend = SimpleNamespace(device=SimpleNamespace(type="cuda"), device_name=f"a card {gpus}")
    session = SimpleNamespace(
        config=SimpleNamespace(engine=SimpleNamespace(gpus=gpus)), log=lambda *_: None
    )
    job = SimpleNamespace(backend=backend, network=0.0)
    planning.store_rates(backend.device_name, FAST_RATES)
    for _ in range(2):
        found = planning._rates_of_machine(session, job, lambda: None)
        assert found.link == expected
    assert len(asked) == (expected > 0)
    assert stored_rates(backend.device_name).link == expected
    job.network = 2e9  # of several nodes, as was measured before
    assert planning._rates_of_machine(session, job, lambda: None).network == 2e9
    assert stored_rates(backend.device_name).network == 2e9
