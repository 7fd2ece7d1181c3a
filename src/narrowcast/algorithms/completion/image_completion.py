"""Pictures of which some pixels are observed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import LOWER_IS_BETTER, Completion
from narrowcast.algorithms.completion.observed import observed_at
from narrowcast.platform.data.images import eight_bit_image, opened
from narrowcast.platform.data.own_files import located
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator

_WHITE = 255.0


class ImageCompletion(Section):
    """A greyscale picture, values 0 to 1, of which a random share of the pixels is observed.

    Pictures are scikit-learn's `china` and `flower`, 427 x 640, or a file of one's own, of 8 bits or the upper 8 of 16.
    They have no exact low rank: `test.psnr` is over all pixels.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["image_completion"] = "image_completion"
    picture: Literal["china", "flower"] = Field("china", description="picture that comes with scikit-learn")
    path: Path | None = Field(None, description="image file of one's own; null: `picture`")
    fraction: float = Field(0.3, gt=0, le=1, description="share of the pixels that is observed")
    seed: int | None = Field(None, ge=0, description="seed of the observed pixels; null: that of the run")

    def load(self) -> Completion:
        """Return the picture's problem; raise `UserError` if the file is no image or no pixel would be observed."""
        path = located(self.path, "path", "problem") if self.path is not None else _bundled(self.picture)
        with opened(path) as image:
            whole = np.asarray(eight_bit_image(image, 1, "high_byte"), dtype=np.float64) / _WHITE
        count = round(self.fraction * whole.size)
        if not count:
            raise UserError(f"fraction is {self.fraction}, which leaves no pixel of {path}; raise it")
        random = generator(self.seed or 0, "completion pixels")
        keys = np.sort(random.choice(whole.size, count, replace=False, shuffle=False))
        observed = observed_at(whole.shape[0], whole.shape[1], keys, whole.ravel()[keys])
        return Completion(path.stem, str(path), observed, truth=whole, peak=1.0)


def _bundled(name: str) -> Path:
    found = find_spec("sklearn")  # importing it takes a second
    if found is None or found.origin is None:
        raise UserError(f"{name} comes with scikit-learn, which is not installed; pip install scikit-learn")
    return Path(found.origin).parent / "datasets" / "images" / f"{name}.jpg"
