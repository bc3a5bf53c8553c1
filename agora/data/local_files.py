"""Where this machine keeps the files that a manifest names: the manifest's author keeps them elsewhere."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from agora_protocol.errors import LocalError
from agora_protocol.manifest_sections import DataSection

from agora.core.hub_files import TOKENIZER_FILE
from agora.core.user_paths import expand_home
from agora.data.text_sources import STDLIB
from agora.data.tokenizer import BYTES


class DataMissing(LocalError):
    """Raised for a file that the manifest names and that this machine does not have."""

    code: ClassVar[str] = "data-missing"


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Finds files by the names that a manifest has for them.

    In this order: what the owner says (`--data`), the manifest's own path, and beside the base model: in its folder, in
    `data` in it, and in the folder around it.

    chosen: files, and folders of files, that the owner says.
    base: where the manifest's relative paths start.
    base_model: its folder on this machine, if there is one.
    """

    chosen: tuple[Path, ...]
    base: Path
    base_model: Path | None

    def localise(self, data: DataSection) -> DataSection:
        """Returns the section with a path of this machine for each file that it names.

        Globs, and names with a meaning of their own, stay. Raises LocalError for a file that is nowhere, and for a
        chosen place that does not exist: a file of the same name elsewhere would be read instead.
        """
        for place in self.chosen:
            if not place.exists():
                raise LocalError(f"There is no {place}, which --data names; correct the path, or leave it out.")
        samples = data.sample_paths
        changes: dict[str, object] = {"tokenizer": self.find_tokenizer(data.tokenizer)}
        if samples:
            changes["samples"] = tuple(self._find_all(samples))
        else:
            changes["corpus"] = tuple(self._find_all(data.corpus))
        return data.model_copy(update=changes)

    def unused_places(self, data: DataSection) -> list[Path]:
        """Returns the chosen places from which nothing of the section is read; [] where one of its files is nowhere."""
        try:
            found = self.localise(data)
        except LocalError:
            return []
        read = [Path(source) for source in (found.tokenizer, *(found.sample_paths or found.corpus))]
        return [place for place in self.chosen if not any(path == place or place in path.parents for path in read)]

    def needs_base_model(self, data: DataSection) -> bool:
        """Returns whether a file that the section names lies in the folder of the base model, or around it."""
        try:
            return replace(self, base_model=None).localise(data) != self.localise(data)
        except LocalError:
            return True

    def find_tokenizer(self, source: str) -> str:
        """Returns a path of this machine for [data] tokenizer. Raises LocalError if it is nowhere."""
        if source == BYTES:
            return source
        folder = self.base_model
        if "/" not in source and folder is not None and (folder / source).exists():
            own = [place for place in self.chosen if _within(place, source) is not None]
            return self._find(source) if own else str(folder / source)
        return self._find(source)

    def _find_all(self, sources: Sequence[str]) -> Iterator[str]:
        files = [place for place in self.chosen if place.is_file() and place.name != TOKENIZER_FILE]
        if len(sources) == len(files) == 1 and sources[0] != STDLIB:
            yield str(files[0])  # it may have another name here: its hash says whether it is the one
            return
        for source in sources:
            yield source if source == STDLIB else self._find(source)

    def _find(self, source: str) -> str:
        name = Path(source).name
        written = self.base / expand_home(source)
        places = [*(_within(place, name) for place in self.chosen), written]
        if self.base_model is not None:
            around = (self.base_model, self.base_model / "data", self.base_model.absolute().parent)
            places += [folder / name for folder in around]
        found = next((place for place in places if place is not None and place.exists()), None)
        if found is None and glob.has_magic(source):
            return source
        if found is None:
            raise DataMissing(
                f"This machine has no {name}, which the run's manifest names, at {written} or beside a base model; say "
                "where it is: --data FILE or FOLDER."
            )
        return str(found)


def _within(place: Path, name: str) -> Path | None:
    if place.name == name:
        return place
    return place / name if (place / name).exists() else None
