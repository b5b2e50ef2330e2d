"""The garbage collector's part in a start: none.

Importing torch and transformers makes hundreds of thousands of objects that live as long as the
process. Collecting between them finds nothing and costs a third of the import's time; scanning
them ever after costs pauses.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing inside; what is alive at the end is never scanned again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
