"""Lifetime: the end of a pipeline, and the refusal of copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hetpipe.errors import HetpipeError

if TYPE_CHECKING:
    from typing_extensions import Self

    from hetpipe.crew.crew import Crew
    from hetpipe.pipeline.guard import Guard
    from hetpipe.pipeline.training import Training


class Lifetime:
    """The methods that close a pipeline. A context manager."""

    _training: Training
    _crew: Crew
    _borrowed: bool
    """Whether the caller lent the crew."""
    _guard: Guard
    _last_save = "no checkpoint of it was saved"

    def close(self) -> None:
        """Stop the workers, unless they were lent. Does nothing in a fork of the process."""
        if not self._borrowed and self._guard.owns:
            self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise HetpipeError(
            "a pipeline cannot be pickled or copied, since its workers are processes: write it "
            "with save(folder) and open that with Pipeline.load, or take its weights with "
            "state_dict()"
        )

    def _saved(self, directory: str | Path) -> None:
        """Remember the folder of the last checkpoint."""
        step = self._training.steps
        self._last_save = f"its last checkpoint is that of step {step} in {directory}"

    def _break_off(self, call: str) -> str:
        """Close after a second interrupt. Returns the error message for later calls."""
        self.close()
        return (
            f"a second interrupt in {call}() closed this pipeline at step {self._training.steps}; "
            f"{self._last_save}"
        )
