"""One cluster for all tests that only talk to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from openai import OpenAI

from tests.support.cluster_process import ClusterProcess, running_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterProcess]:
    """A real one-prefill, one-decode cluster with the real model."""
    with running_cluster() as started:
        yield started


@pytest.fixture
def client(cluster: ClusterProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as made:
        yield made
