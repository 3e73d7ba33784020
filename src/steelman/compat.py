"""A replacement for the AutoAttack package in existing scripts: ``from steelman.compat import AutoAttack``.

The class has the interface of Croce and Hein's package, and runs steelman's attacks. Every adversarial image is
checked, and ``evaluation`` holds a verdict.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS, Search
from steelman.attacks.eot import EOT
from steelman.data.source import ArraySource
from steelman.errors import UserError, unknown
from steelman.evaluation.checks import ContractError, as_model, predictions
from steelman.evaluation.evaluate import evaluate
from steelman.evaluation.result import Evaluation, seconds_of
from steelman.evaluation.stages import Stage, Suite, describe, protocol
from steelman.evidence.bundle import Bundle, data_digest, device_of, finished, read_bundle, weights_digest
from steelman.evidence.ledger import digests
from steelman.evidence.verify import verify
from steelman.settings import make
from steelman.threat import ORDER, Norm, ThreatModel, norms

NORMS: dict[str, Norm] = {"Linf": "linf", "L2": "l2", "L1": "l1"}
VERSIONS = ("standard", "plus", "rand", "custom")
# The attribute that holds each attack's settings, and steelman's name for each setting.
KNOBS = {"apgd-ce": "apgd", "apgd-dlr": "apgd", "apgd-t": "apgd_targeted", "fab": "fab", "fab-t": "fab"}
KNOBS |= {"square": "square"}
OPTIONS = {"n_iter": "steps", "n_restarts": "restarts", "n_target_classes": "targets"}
OPTIONS |= {"n_queries": "queries", "p_init": "p", "resc_schedule": "rescale"}
# The stages' names are those of the suite "full": noise depends on the name, so the same seed gives the same noise.
LABELS = {name: "Square" if name == "square" else name.upper() for name in KNOBS}


class Knobs(types.SimpleNamespace):
    """Settings of an attack, which a script may change. An unknown name is refused."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self):
            raise unknown("setting", name, vars(self))
        super().__setattr__(name, value)


class AutoAttack:
    """AutoAttack with the interface of its own package, for two classes or more.

    Differences from the package:
    - The default `seed` is 0, not the clock, so a run can be repeated.
    - `state_path` is a folder. It keeps the evidence of a finished run.
    - The model is attacked on its own device. `device` is for a function, which has no device.
    - Some models are refused, where the package only warns. These are random models (without version 'rand'), models
      in train mode, and models whose answers depend on the batch.
    - L1 has no Square, and Auto-PGD does not begin with larger radii.
    - ``set_version`` resets the settings of all attacks.
    - A script can set the budgets of an attack, and the settings that differ between versions. It cannot set others.

    The verdict also needs diagnostic attacks. They do not change the images that a method returns.

    `evaluation` is the full result of the last run: the verdict, its trust, and the passes of every attack.

    Croce and Hein (2020), "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
    attacks". The interface is from github.com/fra31/auto-attack.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    >>> x = torch.rand(8, 1, 4, 4)
    >>> adversary = AutoAttack(net, eps=0.1, version="custom", attacks_to_run=["apgd-ce"], verbose=False)
    >>> adversary.run_standard_evaluation(x, net(x).argmax(dim=1), bs=4).shape
    torch.Size([8, 1, 4, 4])
    """

    def __init__(
        self,
        model: nn.Module | Callable[[Tensor], Tensor],
        norm: str = "Linf",
        eps: float = 0.3,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: Sequence[str] = (),
        version: str = "standard",
        is_tf_model: bool = False,
        device: str | torch.device = "cuda",
        log_path: str | Path | None = None,
    ) -> None:
        if is_tf_model:
            raise UserError("is_tf_model: expected False, got True; this attacks PyTorch models only")
        if norm not in NORMS:
            raise unknown("norm", norm, NORMS)
        if version != "custom" and len(attacks_to_run):
            raise UserError(f"attacks_to_run is for version 'custom'; version {version!r} has its own attacks")
        self.model, self.norm, self.epsilon, self.seed, self.verbose = model, norm, eps, seed, verbose
        self.attacks_to_run, self.version, self.is_tf_model = list(attacks_to_run), version, is_tf_model
        self.device, self.log_path, self.evaluation = device, log_path, cast(Evaluation | None, None)
        self._defaults()
        self.set_version(version)

    def set_version(self, version: str = "standard") -> None:
        """Set the attacks and budgets of a version; 'custom' does not change them."""
        if version not in VERSIONS:
            raise unknown("version", version, VERSIONS)
        self.version = version
        if version == "custom":
            return
        self._defaults()
        if version == "rand":
            self.attacks_to_run = ["apgd-ce", "apgd-dlr"]
            self.apgd.n_restarts, self.apgd.eot_iter = 1, 20
        elif version == "plus":
            self.attacks_to_run = ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"]
        else:
            self.attacks_to_run = ["apgd-ce", "apgd-t", "fab-t", "square"]
            self.apgd.n_restarts, self.fab.n_restarts = (5 if self.norm == "L1" else 1), 1
            self.apgd_targeted.n_target_classes = 5 if self.norm == "L1" else 9
        if self.norm == "L1" and "square" in self.attacks_to_run:
            self.attacks_to_run.remove("square")
            warnings.warn(
                "steelman has no Square in L1, so it is left out: robust accuracy may be higher", stacklevel=2
            )

    def _defaults(self) -> None:
        self.apgd = Knobs(n_restarts=5, n_iter=100, eot_iter=1, rho=0.75)
        self.apgd_targeted = Knobs(n_restarts=1, n_iter=100, eot_iter=1, rho=0.75, n_target_classes=9)
        self.fab = Knobs(n_restarts=5, n_iter=100, n_target_classes=9, alpha_max=0.1, eta=1.05, beta=0.9)
        self.square = Knobs(n_queries=5000, n_restarts=1, p_init=0.8, resc_schedule=False)

    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int = 250,
        return_labels: bool = False,
        state_path: str | Path | None = None,
    ) -> Any:
        """Run each attack on the samples that the earlier attacks did not break, and return the images.

        A broken sample's image is its adversarial image. The others are unchanged. `return_labels` adds the model's
        predictions. The same call with the same `state_path` continues an interrupted run, or reads a finished one.
        """
        stages = tuple(Stage(name=LABELS[name], attack=attack) for name, attack in self._attacks().items())
        self._say(f"AutoAttack {self.version} on steelman: {', '.join(self.attacks_to_run)}")
        whole = self.version in ("standard", "plus")
        suite = Suite(name=f"AutoAttack {self.version}", stages=stages, curve=whole)
        x_adv, y_adv, found = self._run(x_orig, y_orig, bs, suite, state_path)
        self._tell(found, x_adv, x_orig)
        return (x_adv, y_adv) if return_labels else x_adv

    def run_standard_evaluation_individual(
        self, x_orig: Tensor, y_orig: Tensor, bs: int = 250, return_labels: bool = False
    ) -> dict[str, Any]:
        """Run each attack on all samples that the model gets right, and return its images by the attack's name."""
        attacks = self._attacks()
        self._say(f"AutoAttack {self.version} on steelman, each by itself: {', '.join(attacks)}")
        answers: dict[str, Any] = {}
        for name, attack in attacks.items():
            started, suite = time.perf_counter(), protocol({LABELS[name]: attack}, f"AutoAttack {name}", curve=False)
            x_adv, y_adv, found = self._run(x_orig, y_orig, bs, suite, None)
            answers[name] = (x_adv, y_adv) if return_labels else x_adv
            robust, seconds = found.score("worst case").accuracy, time.perf_counter() - started
            self._say(f"robust accuracy by {name.upper()}: {robust:.2%} ({seconds:.1f} s)")
        return answers

    def clean_accuracy(self, x_orig: Tensor, y_orig: Tensor, bs: int = 250) -> float:
        """The share of the images that the model gets right."""
        if bs < 1:
            raise UserError(f"expected bs of at least 1, got {bs}")
        source, (model, device), right = _Images(x_orig, y_orig), self._model(x_orig), 0
        for rows in torch.split(torch.arange(len(source)), bs):
            x = as_model(model, source.images(rows), device)
            right += int((predictions(model, x, "given").cpu() == source.labels[rows]).sum())
        self._say(f"clean accuracy: {right / len(source):.2%}")
        return right / len(source)

    def _attacks(self) -> dict[str, Search]:
        """The attacks to run, by the package's names, with the current settings."""
        if not self.attacks_to_run:
            raise UserError(f"attacks_to_run: expected at least one attack, got none; choices: {', '.join(LABELS)}")
        found: dict[str, Search] = {}
        for name in dict.fromkeys(self.attacks_to_run):
            if name not in LABELS:
                raise unknown("attack", name, LABELS)
            # The package ignores these settings. FAB-T, for example, always has one restart.
            unused = {"fab": "n_target_classes", "fab-t": "n_restarts"}.get(name)
            knobs = {key: value for key, value in vars(getattr(self, KNOBS[name])).items() if key != unused}
            draws = knobs.pop("eot_iter", 1)
            given = {OPTIONS.get(key, key): value for key, value in knobs.items()}
            attack = make("attack", ATTACKS, "apgd" if name == "apgd-ce" else name, given)
            if NORMS[self.norm] not in attack.norms:
                raise UserError(f"{name} does not know the norm {self.norm}; leave it out of attacks_to_run")
            found[name] = attack if draws == 1 else make("attack", ATTACKS, "eot", {"attack": attack, "draws": draws})
        return found

    def _run(
        self, x: Tensor, y: Tensor, bs: int, suite: Suite, state_path: str | Path | None
    ) -> tuple[Tensor, Tensor, Evaluation]:
        """Run a suite. Returns the images after it, the model's predictions for them, and the evaluation."""
        source, (model, device) = _Images(x, y), self._model(x)
        if bs < 1 or not self.epsilon > 0:
            raise UserError(f"expected bs of at least 1 and eps above 0, got {bs} and {self.epsilon}")
        threat, seed = ThreatModel(norm=NORMS[self.norm], eps=self.epsilon), self.get_seed()
        with tempfile.TemporaryDirectory(prefix="steelman-") as scratch:
            out = Path(scratch if state_path is None else state_path)
            if out.is_file():
                raise UserError(f"state_path: expected a folder, new or of an earlier run, got the file {out}")
            done = finished(out)
            try:
                if not done:
                    evaluate(model, source, None, threat, suite, out=out, batch_size=bs, seed=seed)
            except ContractError as error:
                if error.reason == "random":
                    error.args = (f"{error}; here, that is version='rand'",)
                raise
            bundle = read_bundle(out)
            if done:
                _check_same(bundle, suite, threat, seed, model, source)
                if not any(
                    isinstance(stage.attack, EOT) for stage in suite.stages
                ):  # `verify` refuses a random model, because its answers change
                    verify(out, model=model, source=source, device=device)
            self.evaluation = found = Evaluation.load(out)
            x_adv = x.detach().to(as_model(model, torch.zeros(1), torch.device("cpu")).dtype).clone()
            for rows, images in bundle.images():
                x_adv[rows.to(x.device)] = images.to(x_adv)
        broken = bundle.samples["broken_by"] >= 0
        said = torch.where(broken, bundle.samples["guess"], bundle.samples["clean"])
        return x_adv, said.to(y), found

    def _model(self, x: Tensor) -> tuple[nn.Module, torch.device]:
        """The model and its device. A function without tensors gets `device`, or the device of the images."""
        model = self.model if isinstance(self.model, nn.Module) else _Function(self.model)
        if any(True for _ in (*model.parameters(), *model.buffers())):
            return model, device_of(model)
        try:
            asked = torch.device(self.device)
        except RuntimeError:
            raise UserError(f"device: expected one such as 'cpu' or 'cuda:0', got {self.device!r}") from None
        place = x.device if asked.type == "cuda" and not torch.cuda.is_available() else asked
        return _Function(self.model, place), place

    def _tell(self, found: Evaluation, x_adv: Tensor, x: Tensor) -> None:
        """Print a run in a few lines."""
        verdict = found.verdict
        assert verdict is not None
        self._say(f"initial accuracy: {found.score('clean').accuracy:.2%}")
        for number, stage in enumerate(found.stages, 1):
            left, how = stage.left / found.total, f"{stage.broken} of {stage.attacked} broken"
            if (seconds := seconds_of(found.stages[:number])) is not None:
                how += f", {seconds:.1f} s in all"
            self._say(f"robust accuracy after {stage.name.upper()}: {left:.2%} ({how})")
        size = float(norms(x_adv.double() - x.double(), ORDER[NORMS[self.norm]]).max())
        low, high = (float(value) for value in x_adv.aminmax())
        self._say(f"largest {self.norm} perturbation: {size:.5f}, values {low:.5f} to {high:.5f}")
        low, high = verdict.interval
        self._say(f"robust accuracy: {verdict.robust_accuracy:.2%} (95% interval {low:.2%} to {high:.2%})")
        self._say(f"trust: {verdict.trust}" + "".join(f"\n- {reason}" for reason in verdict.reasons))

    def get_seed(self) -> int:
        """The seed in use."""
        return int(self.seed or 0)

    def get_logits(self, x: Tensor) -> Tensor:
        """The model's logits for images."""
        return self.model(x)

    @property
    def logger(self) -> types.SimpleNamespace:
        """An object with a method ``log(line)``, which scripts call."""
        return types.SimpleNamespace(log=self._say)

    def _say(self, line: str) -> None:
        """Print a line if `verbose`, and append it to the file `log_path` if there is one."""
        if self.verbose:
            print(line, flush=True)
        if self.log_path is not None:
            with Path(self.log_path).open("a") as log:
                log.write(f"{line}\n")


class _Function(nn.Module):
    """A function as a model. If the function is a method of a model, that model is its submodule."""

    def __init__(self, function: Callable[[Tensor], Tensor], place: torch.device | None = None) -> None:
        super().__init__()
        if not callable(function):
            raise UserError(f"model: expected a module or a function from images to logits, got {function!r}")
        self.function, self.owner = function, getattr(function, "__self__", None)
        inner = function if isinstance(function, nn.Module) else self.owner
        self.training = isinstance(inner, nn.Module) and inner.training
        if place is not None:  # `device_of` reads the device of a tensor: here, of this empty one
            self.register_buffer("place", torch.empty(0, device=place), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Images(ArraySource):
    """Images that keep their precision: ``images`` of the base class would give float32."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() != 4 or x.dtype not in (torch.float32, torch.float64):
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"x_orig: expected float images of shape (N, C, H, W) in [0, 1], got {got}")
        super().__init__(x, y)

    def images(self, index: Tensor, key: object = None) -> Tensor:  # noqa: ARG002
        return self._images[index.to(self._images.device)]


def _check_same(
    bundle: Bundle, suite: Suite, threat: ThreatModel, seed: int, model: nn.Module, source: _Images
) -> None:
    """Refuse evidence of a run with other attacks, threat model, seed, weights or data."""
    record, every = bundle.record, torch.arange(len(source))
    stages = [(stage.name, describe(stage.attack)) for stage in suite.stages]
    wanted = {
        "attacks": (stages, [(stage["name"], stage["attack"]) for stage in record["suite"]["stages"]]),
        "threat model": (dataclasses.asdict(threat), record["threat"]),
        "seed": (seed, record["seed"]),
        "weights": (weights_digest(model), record["weights"]),
        "data": (data_digest(digests(source.images(every), source.labels)), record["data_digest"]),
    }
    other = [what for what, (here, there) in wanted.items() if here != there]
    if other:
        raise UserError(f"state_path: {bundle.folder} holds a run with other {', '.join(other)}; choose another folder")
