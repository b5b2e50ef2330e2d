"""A worker in a plain process: prints its address as one JSON line, runs until stdin closes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from cluster.config import load_config
from cluster.model.resolve import resolve_model
from cluster.types import WorkerId


async def _main(config_path: str, model: str, worker: str, secret: str) -> None:
    config = load_config(Path(config_path))
    folder = resolve_model(model, None, Path(os.environ["DIPTYCH_CACHE"]))
    if worker.startswith("prefill"):
        from prefill.service import build
    else:
        from decode.service import build
    service = build(config, folder, WorkerId(worker), secret.encode())
    address = await service.start()
    sys.stdout.write(json.dumps(asdict(address)) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await service.stop()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:5]))
