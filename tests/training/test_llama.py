"""The language model during training: the terms of its loss, and dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.llama import LanguageModel, ModelConfig, checkpoint, quantise, restore
from training.vocabulary import (
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    FIRST_SOUND,
    FIRST_VOICE,
    PAD,
    PHONEMES,
    START_OF_SPEECH,
)

LEVELS = (4, 4)
SPEECH = [FIRST_VOICE, 72, 105, START_OF_SPEECH, FIRST_CODE + 3, FIRST_CODE + 9, END_OF_SPEECH]
SOUNDS = [PHONEMES, 72, 105, END_OF_TEXT, FIRST_SOUND + 5, FIRST_SOUND, END_OF_TEXT]
IDS = torch.tensor([[*SPEECH, PAD], [*SOUNDS, PAD]])
CHOSEN = torch.tensor([3, 4, 5, 8 + 3, 8 + 4, 8 + 5])
TARGETS = IDS.reshape(-1)[CHOSEN + 1]


def model(dropout: float = 0.0) -> LanguageModel:
    torch.manual_seed(2)
    return LanguageModel(
        ModelConfig(16, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1,
                    intermediate_size=96, dropout=dropout), LEVELS,
    )  # fmt: skip


@torch.no_grad()
def loss(model: LanguageModel, rows: slice, weight: float = 1.0) -> Tensor:
    """Return the loss of some rows' targets."""
    mine = (rows.start * 8 <= CHOSEN) & (rows.stop * 8 > CHOSEN)
    return model.loss(IDS[rows], CHOSEN[mine] - rows.start * 8, TARGETS[mine], weight)


@pytest.mark.parametrize("weight", [1.0, 20.0])
def test_a_sound_counts_as_often_as_its_weight_says(weight: float) -> None:
    whole = loss(model(), slice(0, 2), weight)
    speech, sounds = loss(model(), slice(0, 1)), loss(model(), slice(1, 2))
    assert float(whole) == pytest.approx(float((speech + weight * sounds) / (1 + weight)), rel=1e-5)


def test_a_target_counts_as_often_as_its_own_weight_says() -> None:
    weights = torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0, 1.0])
    network, again = model(), torch.tensor([0, 1, 1, 1, 1, 1, 2, 3, 4, 5])
    with torch.no_grad():
        once = network.loss(IDS, CHOSEN, TARGETS, 2.0, weights)
        often = network.loss(IDS, CHOSEN[again], TARGETS[again], 2.0)
    assert float(once) == pytest.approx(float(often), rel=1e-5)


def test_nothing_is_dropped_where_phones_are_asked_for() -> None:
    dropping = model(0.3)
    found = [[float(loss(dropping, slice(row, row + 1))) for _ in range(4)] for row in (0, 1)]
    assert len(set(found[0])) > 1
    assert len(set(found[1])) == 1
    assert found[1][0] == float(loss(dropping.eval(), slice(1, 2)))
    assert float(loss(model(0.3).eval(), slice(0, 1))) == float(loss(model(), slice(0, 1)))


def test_what_is_dropped_is_made_up_for() -> None:
    (layer,) = model(0.25).layers[:1]
    x = torch.ones(2, 400, 64)
    kept = layer._drop(x, torch.tensor([0.25, 0.0])[:, None, None])
    assert kept.mean((1, 2)).tolist() == pytest.approx([1.0, 1.0], abs=0.02)
    assert sorted(kept[0].unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(kept[1], x[1])


def test_a_checkpoint_gives_the_model_back() -> None:
    before, after = model().eval(), model().eval()
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.zero_()
    restore(after, checkpoint(before))
    expected = loss(before, slice(0, 2))
    assert torch.equal(loss(after, slice(0, 2)), expected)
    restore(after, quantise(checkpoint(before)))
    assert float(F.l1_loss(loss(after, slice(0, 2)), expected)) < 0.01
