"""Sensor localisation problems: networks that are drawn here, and files of measured distances."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from narrowcast.algorithms.sdp.certificate import Proof
from narrowcast.algorithms.sdp.localisation_problem import LOWER_IS_BETTER, Localisation
from narrowcast.algorithms.sdp.sensor_network import draw_network, read_network
from narrowcast.platform.data.own_files import located
from narrowcast.platform.section import Section


class SensorLocalisation(Section):
    """Sensors and anchors uniform in the unit square or cube; pairs within the radio range measure their distance.

    A measured distance has a relative error of standard deviation `noise`. Lengths are in sides of the square. Raises
    `UserError` if a sensor has no path of measured distances to an anchor.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER
    drawn: ClassVar[bool] = True

    kind: Literal["sensor_localisation"] = "sensor_localisation"
    sensors: int = Field(50, ge=1, le=10**4, description="number of sensors")
    anchors: int = Field(8, ge=1, le=10**4, description="number of anchors, whose positions are known")
    dimension: Literal[2, 3] = Field(2, description="2: a square, 3: a cube")
    radio_range: float = Field(0.35, gt=0, le=2, description="largest distance that is measured")
    noise: float = Field(0.05, ge=0, le=1, description="standard deviation of a distance's relative error")
    proof: Proof = Field("lanczos", description="proof of the bound, as of max_cut")
    seed: int | None = Field(None, ge=0, description="seed of places and noise; null: that of the run")

    def load(self) -> Localisation:
        """Draw the network."""
        network = draw_network(self.sensors, self.anchors, self.dimension, self.radio_range, self.noise, self.seed or 0)
        network.check()
        return Localisation(self.kind, "drawn", network, self.proof)


class SensorDistances(Section):
    """Sensors whose measured distances are in a text file: lines `anchor NAME x y` and `distance NAME NAME length`.

    Lines `sensor NAME x y` give true positions, which errors are measured with; positions may have a third coordinate.
    Sensors are numbered by their sorted names.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["sensor_distances"] = "sensor_distances"
    path: Path = Field(description="file of anchors and measured distances")
    proof: Proof = Field("lanczos", description="proof of the bound, as of max_cut")

    def load(self) -> Localisation:
        """Return the problem; raise `UserError` if the file is none."""
        path = located(self.path, "path", "problem")
        return Localisation(path.name, str(path), read_network(path), self.proof)
