"""The packages of the extras: each is imported when it is needed, never before, and a missing one is an error.

Most of them are slow to import, and pretraining needs none.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from agora_protocol.errors import LocalError
from packaging.version import Version


class PackageMissing(LocalError):
    """Raised when a package of an extra is not installed, broken, or too old."""

    code: ClassVar[str] = "package-missing"


@dataclass(frozen=True, slots=True)
class TuningPackage:
    """A package of the extra `tuning`. oldest: the first version that works. purpose: what a run that needs it does."""

    oldest: str
    purpose: str


PACKAGES: Final = {
    "transformers": TuningPackage("5", "trains a Hugging Face model"),
    "peft": TuningPackage("0.18", "trains LoRA"),
    "bitsandbytes": TuningPackage("0.49", "keeps frozen weights as NF4, or moments in 8 bits"),
}


def import_tuning(module: str) -> Any:
    """Imports and returns `module`, which is one of PACKAGES or a submodule, after checking the package's version.

    Raises PackageMissing if the package is missing, broken or too old, KeyError if it is none of PACKAGES. Sets the log
    level of bitsandbytes to ERROR: at its import, also by peft, it warns of a missing kernel for inference that is not
    used here.
    """
    name = module.split(".")[0]
    package = PACKAGES[name]
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        version = importlib.import_module(name).__version__
        if _numbers(version) < _numbers(package.oldest):
            raise ImportError(f"version {version} is installed")
        return importlib.import_module(module)
    except ImportError as error:
        reason = (str(error).splitlines() or [""])[0][:160]
        raise PackageMissing(
            f"This run {package.purpose}, which needs the package {name}, {package.oldest} or newer ({reason}); "
            f"install it with: {_installation('tuning')}"
        ) from error


def import_optional(module: str, purpose: str, extra: str) -> Any:
    """Imports and returns `module` of a package of `extra`. Raises PackageMissing.

    purpose: what needs the package, such as "Publishing", for the error.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        text = f"{purpose} needs the package {name}; install it with: {_installation(extra)}"
        raise PackageMissing(text) from error


def _installation(extra: str) -> str:
    return f"pip install 'agora-swarm[{extra}]'"


def _numbers(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]
