"""The disconnect scenario with the real model, in fp32: minutes of compute on two cores."""

from __future__ import annotations

import pytest

from cluster.config import read_environment
from cluster.model.resolve import resolve_model
from cluster.tokenizer import Tokenizer
from tests.scenarios.test_disconnects import storm_of
from tests.support.exactness import PROSE, SMOLLM2


@pytest.mark.timeout(1800)
async def test_clients_leaving_at_every_stage_disturb_nobody():
    folder = resolve_model(SMOLLM2, None, read_environment().cache_dir).path
    token_ids = Tokenizer.load(folder).encode(PROSE, add_special_tokens=False)
    await storm_of(SMOLLM2, token_ids)
