"""Classes from outside the package, each from one file: named in YAML, shipped, kept with the run, and refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import assert_refused, narrowcast
from narrowcast.experiment import load_experiment
from narrowcast.platform.config import plugins
from narrowcast.runs.submission import prepare

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
OWN = EXAMPLES / "own_everything.yaml"
QUIET = ("tracking.system_metrics=false", "rounds=4", "checkpoint_every=1", "evaluate_every=2")
MODULES = ["city_fleet.py", "fedavgm.py", "focal_loss.py", "residual_mlp.py", "sign_codec.py", "two_moons.py"]


def sha256(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["model_sha256"])


@pytest.mark.slow
def test_everything_of_ones_own_runs_is_kept_and_resumes(tmp_path: Path) -> None:
    straight = narrowcast("run", OWN, *QUIET, "backend=local", "--output", tmp_path / "straight")
    assert straight.status == 0, straight.err
    folder = tmp_path / "straight" / "own_everything"
    assert sorted(path.name for path in (folder / "plugins").iterdir()) == sorted([*MODULES, "origins.json"])
    half = narrowcast("run", OWN, *QUIET, "rounds=2", "backend=local", "--output", tmp_path / "halves")
    assert half.status == 0, half.err
    resumed = narrowcast("run", "--resume", "own_everything", "rounds=4", "--output", tmp_path / "halves")
    assert resumed.status == 0, resumed.err
    assert sha256(tmp_path / "halves" / "own_everything") == sha256(folder)


def test_the_kinds_read_back_from_yaml() -> None:
    experiment = load_experiment(str(OWN))
    plain = experiment.plain()
    assert plain["algorithm"]["kind"] == "fedavgm:FedAvgM"
    assert [stage["kind"] for stage in plain["algorithm"]["codec"]] == ["error_feedback", "sign_codec:Sign"]
    assert load_experiment(str(OWN), ["algorithm.momentum=0.5"]).digest() != experiment.digest()


def test_a_job_ships_the_modules_and_is_known_by_them(tmp_path: Path) -> None:
    for name in (*MODULES, OWN.name):
        shutil.copy(EXAMPLES / name, tmp_path)
    sent = [prepare(str(tmp_path / OWN.name), (), name=None, output="/runs") for _ in range(2)]
    assert set(MODULES) <= set(sent[0].files)
    assert sent[0].sha256 == sent[1].sha256
    (tmp_path / "packed").mkdir()
    sent[0].pack(tmp_path / "packed")
    assert set(MODULES) <= {path.name for path in (tmp_path / "packed").iterdir()}


@pytest.mark.slow
def test_a_changed_module_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "noticed_fleet.py"
    module.write_text((EXAMPLES / "city_fleet.py").read_text())
    config = tmp_path / "own.yaml"
    config.write_text("data: digits\nmodel: mlp\nalgorithm: fedavg\nbackend: local\nfleet: noticed_fleet:CityFleet\n")
    words = (*QUIET, "--output", tmp_path / "runs")
    assert narrowcast("run", config, *words).status == 0
    kept = tmp_path / "runs" / "own" / "plugins"
    assert plugins.changed(kept) == []
    module.write_text(module.read_text() + "\n# changed\n")
    assert plugins.changed(kept) == [module]
    assert_refused(narrowcast("run", config, *words, "--resume", "own"), "is not what the run began with")
    resumed = narrowcast("run", "--resume", "own", "rounds=6", "--output", tmp_path / "runs")
    assert "has changed since the run began" in resumed.err or "imported in its place" in resumed.err, resumed.err


BARE = """
from pydantic import BaseModel
class X(BaseModel):
    kind: str = 'x'
    check = init = init_clients = broadcast = train = fold = step = final = lambda *_: None
"""
BAD = {
    "raises": ("raise RuntimeError('no licence')", "raises:X", "RuntimeError: no licence (raises.py, line 1)"),
    "needs": ("import no_such_library", "needs:X", "No module named 'no_such_library'"),
    "exits": ("import sys\nsys.exit(3)", "exits:X", "SystemExit: 3"),
    "typo": ("def f(:\n", "typo:X", "SyntaxError"),
    "empty": ("class Y: pass", "empty:X", "has no X; its classes: Y"),
    "plain": ("class X: pass", "plain:X", "is not a pydantic model, as an algorithm has to be"),
    "thawed": (
        "from narrowcast.algorithms.federated.fedavg import FedAvg\n"
        "class X(FedAvg):\n    model_config = {'frozen': False}\n",
        "thawed:X",
        "needs model_config = ConfigDict(frozen=True",
    ),
    "borrowed": (
        "from narrowcast.algorithms.federated.fedavg import FedAvg\nclass X(FedAvg): pass",
        "borrowed:X",
        "has the kind 'fedavg' of FedAvg; give it its own",
    ),
    "half": (
        "from pydantic import BaseModel\nclass X(BaseModel):\n    kind: str = 'x'\n    def check(self, task): ...\n",
        "half:X",
        "is not an algorithm: it has to extend Algorithm",
    ),
    "bare": (BARE, "bare:X", "is not an algorithm: it has to extend Algorithm"),
    "lacking": (
        "from pydantic import BaseModel\nfrom narrowcast.extend import Algorithm\nclass X(Algorithm, BaseModel): pass",
        "lacking:X",
        "is not an algorithm: it lacks broadcast, final, fold, init, init_clients, step",
    ),
    "former": (
        "from narrowcast.extend import Averaging\nclass X(Averaging):\n    has_global_model: bool = False\n",
        "former:X",
        "X.has_global_model is now Traits.global_model; return it from traits (former.py, line 2)",
    ),
    "formerly": (
        "from narrowcast.extend import Averaging\nclass X(Averaging):\n    @property\n"
        "    def widens_model(self): return True\n",
        "formerly:X",
        "X.widens_model is now Traits.grows; return it from traits (formerly.py, line 2)",
    ),
    "unknown": (
        "from narrowcast.extend import Averaging, Traits\nclass X(Averaging):\n"
        "    traits = Traits(global_modle=False)\n",
        "unknown:X",
        "unexpected keyword argument 'global_modle' (unknown.py, line 3)",
    ),
    "untrue": (
        "from narrowcast.extend import Averaging, Traits\nclass X(Averaging):\n    traits = Traits(grows='yes')\n",
        "untrue:X",
        "Traits.grows = 'yes'; give True or False (untrue.py, line 3)",
    ),
    "elsewhere": (
        "from narrowcast.extend import Traits\nTraits(downloads='somewhere')\n",
        "elsewhere:X",
        "Traits.downloads = 'somewhere'; give one of alike, slices, by_client (elsewhere.py, line 2)",
    ),
    "mapped": (
        "from typing import ClassVar\nfrom narrowcast.extend import Averaging\nclass X(Averaging):\n"
        "    traits: ClassVar = {'grows': True}\n",
        "mapped:X",
        "X.traits is dict; give Traits of narrowcast.extend (mapped.py, line 3)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_is_one_clear_line(name: str, tmp_path: Path) -> None:
    source, spec, message = BAD[name]
    (tmp_path / f"{name}.py").write_text(source)
    config = tmp_path / "own.yaml"
    config.write_text(f"data: digits\nmodel: mlp\nalgorithm: {spec}\nbackend: local\n")
    said = narrowcast("run", config, "--output", tmp_path / "runs")
    assert_refused(said, f"algorithm.kind = {spec}", message)


BASE = "from pydantic import BaseModel\nfrom narrowcast.extend import {base}\nclass X({base}, BaseModel):\n    {body}\n"
UNFIT = {
    "Backend": "is not a backend: it lacks check, run",
    "DataSource": "is not a data: it lacks load",
    "Model": "is not a model: it lacks check, evaluate, init_clients, init_server",
    "Training": "is not a training: it lacks check, device, epochs, mode, samples, train",
}


@pytest.mark.parametrize("base", UNFIT)
def test_a_class_is_told_its_base_and_what_it_lacks(base: str, tmp_path: Path) -> None:
    section = UNFIT[base].split()[3].rstrip(":")
    plain, bare = f"plain_{section}", f"bare_{section}"
    (tmp_path / f"{plain}.py").write_text("from pydantic import BaseModel\nclass X(BaseModel):\n    kind: str = 'x'\n")
    (tmp_path / f"{bare}.py").write_text(BASE.format(base=base, body="kind: str = 'x'"))
    config = tmp_path / "own.yaml"
    for module, message in ((plain, f"it has to extend {base}"), (bare, UNFIT[base])):
        sections = {"data": "digits", "model": "mlp", "algorithm": "fedavg", "backend": "local", section: f"{module}:X"}
        config.write_text("".join(f"{name}: {kind}\n" for name, kind in sections.items()))
        assert_refused(
            narrowcast("run", config, "--output", tmp_path / "runs"), f"{section}.kind = {module}:X", message
        )


def test_a_training_says_by_its_traits_what_it_computes(tmp_path: Path) -> None:
    (tmp_path / "former_training.py").write_text(
        BASE.format(base="Training", body="@property\n    def descends_gradients(self): return False")
    )
    config = tmp_path / "own.yaml"
    config.write_text("data: digits\nmodel: mlp\nalgorithm: fedavg\nbackend: local\ntraining: former_training:X\n")
    said = narrowcast("run", config, "--output", tmp_path / "runs")
    assert_refused(said, "X.descends_gradients is now TrainingTraits.descends_gradients; return it from traits")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:X", "no module nowhere: neither installed nor in"),
        ("'a b:c'", "is not a class; write package.module:Class"),
        ("fedavgg", 'kind = "fedavgg" is unknown; known: fedavg'),
        ("json:JSONDecoder", "is not a pydantic model"),
    ],
)
def test_what_cannot_be_found_is_one_clear_line(spec: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(f"data: digits\nmodel: mlp\nalgorithm: {spec}\nbackend: local\n")
    assert_refused(narrowcast("run", config, "--output", tmp_path / "runs"), message)


def test_an_unknown_field_of_a_plugin_is_named_with_those_it_has() -> None:
    said = narrowcast("run", OWN, "algorithm.momentun=0.5")
    assert_refused(said, "algorithm.momentun is unknown", "momentum", 'Did you mean "momentum"')


@pytest.mark.slow
def test_comparing_runs_imports_no_plugin(tmp_path: Path) -> None:
    said = narrowcast("run", OWN, *QUIET, "backend=local", "--output", tmp_path)
    assert said.status == 0, said.err
    folder = tmp_path / "own_everything"
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("fedavgm:FedAvgM", "gone_for_good:FedAvgM"))
    compared = narrowcast("compare", folder)
    assert compared.status == 0, compared.err


@pytest.mark.slow
def test_a_scheme_of_ones_own_reaches_the_process_that_holds_the_keys(tmp_path: Path) -> None:
    (tmp_path / "own_scheme.py").write_text(
        "from typing import Literal\n"
        "from narrowcast.extend import Masked\n\n"
        "class Narrow(Masked):\n"
        '    kind: Literal["narrow"] = "narrow"\n'
        "    bits: int = 12\n"
    )
    (tmp_path / "own.yaml").write_text(
        "{data: {kind: digits, clients: 20}, model: softmax, algorithm: fedavg, backend: local,"
        " secure: own_scheme:Narrow, clients_per_round: 10, rounds: 2, tracking: {system_metrics: false}}"
    )
    said = narrowcast("run", tmp_path / "own.yaml", "--output", tmp_path / "runs")
    assert said.status == 0, said.err
    words = ("secure={kind: masked, bits: 12}", "name=masked", "--output", tmp_path / "runs")
    known = narrowcast("run", tmp_path / "own.yaml", *words)
    assert known.status == 0, known.err
    assert sha256(tmp_path / "runs" / "own") == sha256(tmp_path / "runs" / "masked")


@pytest.mark.slow
def test_an_entry_point_of_an_installed_package_is_a_kind(tmp_path: Path) -> None:
    package = tmp_path / "site"
    about = package / "own_fleets-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-fleets\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[narrowcast]\nfleet.city = own_fleets:CityFleet\n")
    shutil.copy(EXAMPLES / "city_fleet.py", package / "own_fleets.py")
    script = (
        "from narrowcast.experiment import load_experiment\n"
        "fleet = load_experiment('fedavg-digits', ['fleet=city']).plain()['fleet']\n"
        "assert fleet['kind'] == 'city', fleet\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
