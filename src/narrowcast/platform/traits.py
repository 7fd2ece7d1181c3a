"""Traits: properties that algorithms and trainings state of themselves, for checks and for the code around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from narrowcast.platform.errors import UserError


@dataclass(frozen=True)
class TrainingTraits:
    """Properties of a training, with its fields as they are set, that algorithms may ask for.

    - `learning_rate`: the step size; None if the steps do not have one.
    - `learning_rate_schedule`: the `LearningRateSchedule` of its factors; None: it is constant.
    - `momentum`: the coefficient of the running sum of gradients.
    - `clip_norm`: the largest L2 norm of a step's gradient; None: gradients are not clipped.
    - `shared_negatives`: negatives are drawn from the public stream.
    - `descends_gradients`: a client moves against its gradients, or their running sum, times the learning rate.
    - `computes_start_loss`, `computes_start_gradient`: it returns what `LocalTerms` names so.
    - `trains_factors`: it has `train_factors`, for algorithms whose clients train factors.
    """

    learning_rate: float | None = None
    learning_rate_schedule: Any = None
    momentum: float = 0.0
    clip_norm: float | None = None
    shared_negatives: bool = False
    descends_gradients: bool = True
    computes_start_loss: bool = False
    computes_start_gradient: bool = False
    trains_factors: bool = False

    @property
    def rate_text(self) -> str:
        """The learning rate in a message."""
        return "unknown" if self.learning_rate is None else f"{self.learning_rate}"


Downloads = Literal["alike", "slices", "by_client"]


@dataclass(frozen=True)
class Traits:
    """Properties of an algorithm, with its fields as they are set, besides what its methods return.

    - `global_model`: `final` is a model that can be evaluated; False: what the server knows, and clients alone are.
    - `downloads`: `alike`, of a cohort's messages the longest contains the others; `slices`, each client is sent a part
      of its own of the model; `by_client`, each is sent a message that follows from what it has.
    - `grows`: the global model may take shapes other than those that the model draws.
    - `counts_draws`: a client that is drawn k times with replacement has k times its weight.
    - `mean_unless`: the global model is a weighted mean of its clients' models, trained by plain steps, unless one of
      these settings is made; each is named with whether it is. None: it never is.
    - `trains_factors`: clients train by `train_factors` of their training.
    - `codec`: the stages of uploads.
    - `codes_row_lists`: uploads have lists of rows that negatives known to the receiver would shorten.
    - `needs_each`: the setting, with its value, by which the server needs the change of each client; empty without one.
    - `asks_rows`: clients ask the server for the rows that they touch.
    - `sends`: clients and server exchange messages; False: no bits in either direction, and no client is ever lost.
    - `peers`: clients send to one another, without a server: who hears nobody downloads nothing.
    - `stays_silent`: a client may send one bit in place of its message, and keep its model; it is sent nothing then.
    - `needs_no_labels`: clients may train on samples of which none has a label.
    """

    global_model: bool = True
    downloads: Downloads = "alike"
    grows: bool = False
    counts_draws: bool = False
    mean_unless: Mapping[str, bool] | None = None
    trains_factors: bool = False
    codec: tuple[Any, ...] = ()
    codes_row_lists: bool = False
    needs_each: str = ""
    asks_rows: bool = False
    sends: bool = True
    peers: bool = False
    stays_silent: bool = False
    needs_no_labels: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            wanted, noun = _TYPES.get(name, (bool, "True or False"))
            if not isinstance(value, wanted):
                raise UserError(f"Traits.{name} = {value!r}; give {noun}")
        if self.downloads not in get_args(Downloads):
            raise UserError(f"Traits.downloads = {self.downloads!r}; give one of {', '.join(get_args(Downloads))}")


_TYPES: Mapping[str, tuple[Any, str]] = {
    "downloads": (str, "text"),
    "mean_unless": (Mapping | None, "a mapping of settings, or None"),
    "codec": (tuple, "the stages of uploads as a tuple"),
    "needs_each": (str, "text"),
}
