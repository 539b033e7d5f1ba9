"""Law 1 for every decoder-only family that transformers has: streamed training equals plain
transformers + clip_grad_norm_ + torch.optim.AdamW in float32. What cannot be right is refused by
name before anything is allocated.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import launch
from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.build import build_model
from engine.model.build.skeleton import find_layers
from engine.paths import PROGRAM_ROOT
from engine.planning.schedule.choices import PlanChoices
from tests.support.families import VOCAB, Verdict, table, tiny_family_config, verdict
from tests.support.family_parity import AMPLIFIES, INSTALLED, RATE, STEPS, SUPPORTED, law_one
from tests.support.library_version import (
    AS_RECORDED,
    NOT_AS_RECORDED,
    RECORDED,
    another_version_may_refuse,
)
from tests.support.packed_rows import NOT_PACKED, PACKED, WHY_NOT_PACKED
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import MOST_USED, plain_loss, plain_model, random_batches, streamed

pytestmark = pytest.mark.computing

ENCODER_DECODER = "is an encoder-decoder model"
ENCODER = "sees the tokens after each token"
COMPUTED = "from the results of blocks"
REFUSED = {
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "musicgen",
            "musicgen_melody",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "whisper",
        ),
        ENCODER_DECODER,
    ),
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        ENCODER,
    ),
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text"), COMPUTED),
    "mllama": "did not run its blocks",
    **dict.fromkeys(("cpmant", "xlnet"), "instead of one state a token"),
    **dict.fromkeys(("blt", "hrm_text"), "from being trained"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant", "reformer"),
        "does not run under the capture",
    ),
    "dory": "does not run its blocks once each and in order",
    "recurrent_gemma": "keeps state in its blocks",
    "xlm": "changes the hidden state between block 0 and block 1",
}
"""Every family that is refused, and why."""
ONE_PER_REASON = {why: family for family, why in REFUSED.items()}.values()


FEWER_STEPS = 3
LATER = [family for family in INSTALLED if family not in {*SUPPORTED, *REFUSED}]
"""Families that transformers has added since the tables were recorded."""


def families_and_ties() -> list:
    """Returns every family as its own configuration has it, with a head of its own or with a tied
    one, and those that are used most in both ways. What ties add is one gradient, with which no
    code of a family is concerned.
    """
    found = []
    for family in SUPPORTED:
        if family in MOST_USED:
            found += [pytest.param(family, tied, id=f"{family}-{tied}") for tied in (False, True)]
        else:
            sweep = pytest.mark.slow(FAMILY_SWEEP)
            found.append(pytest.param(family, None, id=family, marks=[sweep]))
    return found


@pytest.mark.parametrize("family, tied", families_and_ties())
def test_streamed_training_equals_plain_training(family, tied):
    steps = STEPS if family in MOST_USED else FEWER_STEPS
    with another_version_may_refuse():
        law_one(tiny_family_config(family, tied=tied), family in AMPLIFIES, steps=steps)


@pytest.mark.parametrize("family", LATER)
@pytest.mark.slow(FAMILY_SWEEP)
def test_a_later_family_is_trained_rightly_or_refused(family):
    """Whatever version of transformers is installed, no family trains to other numbers."""
    try:
        config = tiny_family_config(family)
        build_model(config, ModelConfig(source="tiny", dtype="float32"))
    except ModelError as refusal:
        assert "\n" not in str(refusal) and str(refusal).endswith(".")
    except (TypeError, ValueError, RuntimeError) as error:
        pytest.skip(f"this test knows no small sizes for {family}: {error}")
    else:
        law_one(config, resync=True, steps=FEWER_STEPS)


@pytest.mark.parametrize("family", slow_but(SUPPORTED, MOST_USED, FAMILY_SWEEP))
def test_no_token_is_seen_before_its_turn(family):
    plain = plain_model(tiny_family_config(family)).eval()
    ids = torch.arange(3, 15).unsqueeze(0)
    other = ids.clone()
    other[0, -1] = VOCAB - 1
    with torch.no_grad():
        before, after = (plain(input_ids=i, use_cache=False).logits[0] for i in (ids, other))
    torch.testing.assert_close(before[:-1], after[:-1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[-1], after[-1])


@pytest.mark.skipif(not AS_RECORDED, reason=NOT_AS_RECORDED)
@pytest.mark.parametrize("family", slow_but(sorted(REFUSED), ONE_PER_REASON, FAMILY_SWEEP))
def test_what_cannot_be_right_is_refused_by_name(family):
    with pytest.raises(ModelError, match=re.escape(REFUSED[family])) as refusal:
        build_model(tiny_family_config(family), ModelConfig(source="tiny", dtype="float32"))
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")


@pytest.mark.parametrize(
    "name, value",
    [("output_router_logits", True), ("layerdrop", 0.1), ("z_loss_coefficient", 1e-4)],
)
def test_what_is_not_streamed_is_refused_until_it_is_switched_off(name, value):
    family = {"output_router_logits": "flint", "layerdrop": "opt", "z_loss_coefficient": "bamba"}[
        name
    ]
    with pytest.raises(ModelError, match=name):
        build_model(
            tiny_family_config(family, **{name: value}), ModelConfig(source="tiny", dtype="float32")
        )


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neo", "bloom", "phi", "granite", "qwen3_moe", "opt", "biogpt"]
)
def test_dropout_draws_the_same_numbers_in_the_recompute(family):
    """Each block starts from a seed of its own; plain training given the same seeds has the same
    gradients.
    """
    config = tiny_family_config(family, dropout=0.2)
    plain = plain_model(config)
    run = streamed(plain, PlanChoices().changed(micro_batches=2))
    batches, device_updates = random_batches(2, seed=1), []
    run.engine.train_step(1, batches, RATE, device_updates.append)
    run.engine.drain()
    micro_batch = 0

    def seed(position: int) -> None:
        torch.manual_seed(hash((0, 1, position, micro_batch)) & 0x7FFFFFFF)

    for position, layer in enumerate(find_layers(plain, config), start=1):
        layer.register_forward_pre_hook(lambda *_, position=position: seed(position))
    loss, total = torch.zeros(()), sum(b.loss_tokens for b in batches)
    for micro_batch, batch in enumerate(batches):  # noqa: B007  `seed` reads it
        seed(0)
        logits = plain(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
        labels = torch.from_numpy(batch.labels).reshape(-1)
        loss = loss + F.cross_entropy(logits.reshape(-1, VOCAB), labels, reduction="sum") / total
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert device_updates[0].loss == pytest.approx(loss.item(), rel=2e-5)
    assert abs(device_updates[0].loss - plain_loss(plain.eval(), batches).item()) > 1e-4
    for unit in run.model.units:
        for spec, offset in zip(unit.layout.parameters, unit.layout.offsets):
            mine = run.host_states.tensor(unit.name, "grad")[offset : offset + spec.numel].view(
                spec.shape
            )
            assert (mine - plain.get_parameter(spec.full_name).grad).norm() / norm < 1e-6, (
                spec.full_name
            )
    run.close()


@pytest.mark.parametrize("family, code", [("jamba", 0), ("inkling2_text", 2)])
def test_check_says_whether_a_family_is_supported(family, code, tmp_path, capsys):
    tiny_family_config(family).save_pretrained(tmp_path)
    assert launch.main(["check", "--model", str(tmp_path / "config.json")]) == code
    out, err = capsys.readouterr()
    if code:
        assert REFUSED[family] in err and err.count("\n") == 1
    else:
        assert family in out and not err


@pytest.mark.slow("it sweeps over many cases")
@pytest.mark.skipif(not AS_RECORDED, reason=NOT_AS_RECORDED)
def test_the_page_of_families_has_the_table_of_today():
    """Of the verdicts that are shown here and, for packed rows, in test_packing.py."""
    assert not LATER and not set(PACKED) & set(NOT_PACKED)
    found = {
        family: verdict(family)
        if family in REFUSED
        else Verdict(unpacked="" if family in PACKED else WHY_NOT_PACKED)
        for family in INSTALLED
    }
    page = (PROGRAM_ROOT / "docs/families.md").read_text()
    assert f"transformers {RECORDED}" in page
    inside = page.split("<!-- families -->")[1].split("<!-- /families -->")[0].strip()
    assert inside == table(found), (
        "run python -m tests.support.families and put its output into docs/families.md"
    )
