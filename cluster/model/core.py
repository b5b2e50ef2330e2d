"""What the engine cores of both roles share: loading in the engine thread, and the meter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.model.meter import EngineMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.model.runner import LoadedEngine


class LoadingCore:
    """Base of an `EngineCore`; lives in the engine thread once that is started."""

    def __init__(self, load: Callable[[], LoadedEngine]) -> None:
        """`load` is called in the engine thread, where all torch work belongs."""
        self._load = load
        self._loaded: LoadedEngine | None = None
        self.meter = EngineMeter()

    @property
    def loaded(self) -> LoadedEngine:
        """The engine; there is none before `open`."""
        assert self._loaded is not None
        return self._loaded

    def open(self) -> None:
        """Load the model and warm it up.

        Raises:
            ModelError: the model cannot be served.
        """
        self._loaded = self._load()

    def cut_short(self) -> None:
        """Let a step that only waits end now; callable from any thread."""
        if self._loaded is not None:
            self._loaded.runner.stop()
