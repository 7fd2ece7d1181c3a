"""`narrowcast check`: laws that hold, and each kind of law broken by a class made to break it."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broken_plugins import BROKEN
from command import Command
from command_line import assert_refused, narrowcast, run_folders
from sampling import sampled

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.mark.parametrize(
    ("spec", "registry", "words"),
    [
        ("sign_codec:Sign", "codec", ()),
        ("two_moons:TwoMoons", "data", ("--kind", "data")),
        ("residual_mlp:ResidualMLP", "model", ()),
        ("focal_loss:FocalLoss", "loss", ()),
        ("focal_loss:Brier", "metric", ()),
        ("city_fleet:CityFleet", "fleet", ("--kind", "fleet")),
        ("hypercube:Hypercube", "topology", ()),
        *(
            pytest.param(spec, "algorithm", (), marks=[pytest.mark.slow, pytest.mark.thorough])
            for spec in (
                *("fedavgm:FedAvgM", "dp_fedavg:DPFedAvg", "sign_flip:SignFlip"),
                *("ditto:Ditto", "fedrep:FedRep"),
            )
        ),
    ],
)
def test_the_examples_keep_their_laws(
    spec: str, registry: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    said = narrowcast("check", spec, *words)
    assert said.status == 0, said.err
    assert f"{spec}: {registry}" in said.out
    assert "failed" not in said.out


FLEET = """
from typing import Literal
import numpy as np
from pydantic import BaseModel, ConfigDict
from narrowcast.platform.types import Profiles

class {name}(BaseModel):
    \"\"\"Breaks a law.\"\"\"
    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["{name}"] = "{name}"

    def profiles(self, examples, seed):
        n = len(examples)
        return Profiles(np.arange(n), examples, {uplink}, np.ones(n), np.ones(n))
"""


@pytest.mark.slow
def test_a_fleet_that_breaks_a_law_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = "np.random.default_rng().random(n) + 1"
    (tmp_path / "forgetful_fleet.py").write_text(FLEET.format(name="Forgetful", uplink=drawn))
    said = narrowcast("check", "forgetful_fleet:Forgetful", "--kind", "fleet")
    assert_refused(said, "laws do not hold", status=1)
    assert any("the same seed gives other profiles" in line for line in said.out.splitlines() if ": failed: " in line)


@pytest.mark.parametrize(("kind", "registry"), [("random", "sampler"), ("none", "pruner"), ("iid", "partition")])
def test_a_kind_of_the_catalog_is_tried_in_silence(kind: str, registry: str) -> None:
    said = narrowcast("check", kind, "--kind", registry)
    assert said.status == 0
    assert said.err == ""
    assert f"{kind}: {registry}" in said.out
    assert "failed" not in said.out


def test_what_cannot_be_checked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(narrowcast("check", "nowhere:X"), "no module nowhere")
    assert_refused(narrowcast("check", "fedavg"), "say of what kind it is with --kind")
    assert_refused(narrowcast("check", "fedavg", "--kind", "algoritm"), 'Did you mean "algorithm"')
    methods = "check = init = init_clients = broadcast = train = fold = step = final = lambda *_: None"
    (tmp_path / "bare_algorithm.py").write_text(f"from pydantic import BaseModel\nclass X(BaseModel):\n    {methods}\n")
    assert_refused(
        narrowcast("check", "bare_algorithm:X", "--kind", "algorithm"),
        "is not an algorithm: it has to extend Algorithm",
    )
    assert_refused(
        narrowcast("check", "bare_algorithm:X"),
        "bare_algorithm:X extends no class that has a kind; say its own with --kind: algorithm, codec, ",
    )
    shutil.copy(EXAMPLES / "city_fleet.py", tmp_path / "elsewhere_fleet.py")
    assert_refused(
        narrowcast("check", "elsewhere_fleet:CityFleet", "underground=2", "--kind", "fleet"), "underground = 2"
    )
    said = narrowcast("check", "elsewhere_fleet:CityFleet", "--kind", "data")
    assert_refused(said, "is not a data", "extend DataSource")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_one_line_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = BROKEN[name]
    spec = plugin.write(tmp_path)
    said = narrowcast("run", "fedavg-digits", f"{plugin.registry}={spec}", "rounds=2", "--backend", "local")
    assert_refused(said, *plugin.says, status=1 if name == "a field that leaves" else 2)
    assert run_folders(tmp_path / "runs") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["a step that returns float64", "too few classes", "a fleet that lacks a client"],
)
def test_check_says_why_a_plugin_is_broken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = BROKEN[name]
    said = narrowcast("check", plugin.write(tmp_path), "--kind", plugin.registry)
    assert_refused(said, "laws do not hold", status=1)
    assert any(plugin.reason in line for line in said.out.splitlines() if ": failed: " in line), said.out


ABORTED = ("os.abort()", "signal 6")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "how"), sampled([("os._exit(0)", "exit status 0"), ABORTED], [ABORTED]))
def test_a_class_that_ends_its_process_is_one_line(
    call: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ending_fleet.py").write_text("import os\n" + FLEET.format(name="Ending", uplink=call))
    command = Command("check", "ending_fleet:Ending", "--kind", "fleet", log=tmp_path / "log")
    try:
        assert command.wait() == 1
        assert command.err.startswith("narrowcast: ending_fleet:Ending: it ended the process that tests it")
        assert how in command.err
        assert len(command.err.splitlines()) == 1
        assert "ending_fleet:Ending: fleet\n" in command.out
        assert command.survivors(30) == []
    finally:
        command.clean_up()


SLOW_END = """
import time
from multiprocessing import util

util.Finalize(None, time.sleep, (1,), exitpriority=1)
"""
STUBBORN = """
import time
from pathlib import Path

def sleepless():
    Path("drawing").touch()
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


@pytest.mark.slow
def test_a_command_without_a_reader_ends_without_a_traceback_of_its_fork(tmp_path: Path) -> None:
    """The fork is told to end as soon as it has sent its last verdict, and is still shutting down then."""
    (tmp_path / "slow_fleet.py").write_text(SLOW_END + FLEET.format(name="Slow", uplink="np.ones(n)"))
    words = [sys.executable, "-m", "narrowcast", "check", "slow_fleet:Slow", "--kind", "fleet"]
    piped = f"{shlex.join(words)} | head -1"
    ended = subprocess.run(["sh", "-c", piped], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("slow_fleet:Slow: fleet\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("number", sampled([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_a_check_that_is_interrupted_ends_with_all_that_it_started(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stubborn_fleet.py").write_text(STUBBORN + FLEET.format(name="Stubborn", uplink="sleepless()"))
    command = Command("check", "stubborn_fleet:Stubborn", "--kind", "fleet", log=tmp_path / "log")
    try:
        command.wait_until((tmp_path / "drawing").exists)
        command.send(number)
        assert command.wait() == 1
        assert command.err == "narrowcast: interrupted\n"
        assert command.survivors(30) == []
    finally:
        command.clean_up()


@pytest.mark.slow
def test_a_command_that_is_interrupted_within_an_exec_ends_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupted exec of a text, as in a dataclass, Python ends by SIGINT unless another follows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "endless.py").write_text(
        "exec('import pathlib, time; pathlib.Path(\\'began\\').touch(); time.sleep(60)')"
    )
    command = Command("show", "fedavg-digits", "algorithm=endless:Endless", "--trust", log=tmp_path / "log")
    try:
        command.wait_until((tmp_path / "began").exists)
        command.send(signal.SIGTERM)
        assert (command.wait(), command.err) == (1, "narrowcast: interrupted\n")
    finally:
        command.clean_up()


SEEDED = """
from typing import Literal

import torch
from torch import nn

from narrowcast.platform.models.neural_network import NeuralNetwork

class {name}(NeuralNetwork):
    \"\"\"Has the same parameters under every seed.\"\"\"

    kind: Literal["{name}"] = "{name}"

    def module(self, data):
        {before}
        module = nn.Sequential(nn.Flatten(), nn.Linear(data.train.features[0].size, self.n_outputs(data)))
        {after}
        return module
"""


@pytest.mark.slow
def test_fixed_weights_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    after = "module.load_state_dict({name: torch.full_like(each, 0.01) for name, each in module.state_dict().items()})"
    (tmp_path / "trained_before.py").write_text(SEEDED.format(name="Fixed", before="", after=after))
    said = narrowcast("check", "trained_before:Fixed", "--data", "digits")
    assert said.status == 0, said.out
    assert "on the seed alone: ok: every seed gives the same parameters, and none is drawn" in said.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    sampled(
        [
            GLOBAL := ("torch.manual_seed(0)", ""),
            ("", "nn.init.normal_(module[1].weight, generator=torch.Generator().manual_seed(0))"),
        ],
        [GLOBAL],
    ),
)
def test_weights_of_a_seed_of_its_own_are_no_start_of_a_run(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    after += "; nn.init.zeros_(module[1].bias)" if after else ""
    name = f"Seeded{len(before)}"
    (tmp_path / f"{name.lower()}.py").write_text(SEEDED.format(name=name, before=before, after=after))
    said = narrowcast("check", f"{name.lower()}:{name}", "--data", "digits")
    assert_refused(said, "1 of ", "laws do not hold", status=1)
    assert "seeds 0 and 1 give the same parameters, drawn from a generator that it seeds by itself" in said.out


WIDE = """
from typing import Literal

from torch import nn

from narrowcast.platform.models.neural_network import NeuralNetwork

class {name}(NeuralNetwork):
    \"\"\"Takes the 64 pixels of digits alone.\"\"\"

    kind: Literal["{name}"] = "{name}"

    def module(self, data):
        return nn.Sequential(nn.Linear(64, 10))
"""


@pytest.mark.slow
def test_a_model_of_one_input_size_is_tested_on_the_data_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sixty_four.py").write_text(WIDE.format(name="SixtyFour"))
    refused = narrowcast("check", "sixty_four:SixtyFour")
    assert_refused(refused, "1 of 6 laws do not hold", status=1)
    assert "refuses every small data set; test it on yours with --data" in refused.out
    assert "labelled images: model.kind = SixtyFour does not take the features of tiny" in refused.out
    assert narrowcast("check", "sixty_four:SixtyFour", "--data", "digits").status == 0
    assert_refused(narrowcast("check", "random", "--kind", "sampler", "--data", "digits"), "model, loss, metric")
    assert_refused(narrowcast("check", "sixty_four:SixtyFour", "--data", "nowhere"), '"nowhere" is no')
