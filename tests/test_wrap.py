"""Models whose answer is no tensor, or that want other images: Hugging Face's, and small ones of each kind."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import steelman
from steelman.attacks import PGD
from steelman.attacks.parallel import _copies
from steelman.errors import UserError
from steelman.evaluation.checks import check_contract
from steelman.heads import Head, embed
from steelman.models.features import check_readable, features_of
from steelman.models.wrap import Wrapped, detected, wrap
from steelman.threat import ThreatModel

THREAT = ThreatModel(eps=0.03)
KINDS = ("vit", "resnet")
Named = namedtuple("Named", "features logits")  # the kind that torchvision's models give


def huggingface(kind: str, **options: Any) -> nn.Module:
    """A small classifier of Hugging Face's for 1x16x16 and 3 classes, made from its configuration."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"num_channels": 1, "num_labels": 3, **options}
    if kind == "vit":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.ViTConfig(image_size=16, patch_size=4, **sizes, **common)
        model: nn.Module = transformers.ViTForImageClassification(config)
    else:
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **common
        )
        model = transformers.ResNetForImageClassification(config)
    return model.eval()


def pictures(n: int = 40, side: int = 16) -> tuple[Tensor, Tensor]:
    """Images whose class is the third of them that is bright."""
    y = torch.arange(n) % 3
    x = 0.3 * torch.rand(n, 1, side, side)
    third = (torch.arange(side) * 3 // side)[None] == y[:, None]
    return x + 0.6 * third[:, None, :, None], y


class Net(nn.Module):
    """Logits of 16 pixels, put into whatever `form` makes of them; the forward counts how often it ran."""

    def __init__(self, form: Callable[[Tensor], object] = lambda z: z) -> None:
        super().__init__()
        self.norm, self.last, self.form, self.runs = nn.BatchNorm1d(16), nn.Linear(16, 3), form, 0

    def forward(self, x: Tensor) -> object:
        self.runs += 1
        return self.form(self.last(self.norm(x.flatten(1))))


def images(n: int = 4) -> Tensor:
    return torch.rand(n, 1, 4, 4)


def bilinear(old: int, new: int) -> Tensor:
    """The weights of each old pixel in each new one: a triangle, as wide as the coarser of the two grids."""
    ratio = old / new
    centres, pixels = (torch.arange(new).double() + 0.5) * ratio, torch.arange(old).double() + 0.5
    weights = (1 - (pixels - centres[:, None]).abs() / max(ratio, 1)).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hugging_face_model_keeps_its_logits_and_its_gradients(kind: str) -> None:
    model, x = huggingface(kind), images(3).repeat(1, 1, 4, 4)
    expected, got = x.clone().requires_grad_(), x.clone().requires_grad_()
    outside, inside = model(expected).logits, wrap(model)(got)
    assert inside.equal(outside)
    slopes = [torch.autograd.grad(z[:, 0].sum(), at)[0] for z, at in ((outside, expected), (inside, got))]
    assert slopes[1].equal(slopes[0])
    assert (slopes[1].flatten(1).norm(dim=1) > 0).all()


@pytest.mark.parametrize("shape", [(8, 6), (3, 3), (4, 4), (5, 9)])
def test_images_are_resized_and_normalised_as_by_hand(shape: tuple[int, int]) -> None:
    x = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    mean, std = [0.5, 0.25, 0.1], [0.2, 0.4, 0.8]
    net = wrap(nn.Flatten().double(), mean=mean, std=std, size=shape).double()
    resized = bilinear(4, shape[0]) @ x @ bilinear(4, shape[1]).T
    by_hand = torch.stack([(resized[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
    torch.testing.assert_close(net(x), by_hand.flatten(1), rtol=0, atol=1e-6)
    assert torch.autograd.gradcheck(net, x[:1].requires_grad_())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mean": 0.5}, lambda x: x - 0.5),
        ({"std": 0.5}, lambda x: x / 0.5),
        ({"mean": torch.tensor([0.5]), "std": (0.25,)}, lambda x: (x - 0.5) / 0.25),
        ({"size": 8}, lambda x: F.interpolate(x, size=(8, 8), mode="bilinear", antialias=True)),
        ({}, lambda x: x),
    ],
)
def test_what_is_not_given_is_not_done(given: dict[str, Any], expected: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(2, 2, 4, 4)
    torch.testing.assert_close(wrap(nn.Flatten(), **given)(x), expected(x).flatten(1))


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (lambda z: {"logits": z}, None),
        (lambda z: {"scores": z, "logits": -z}, "scores"),
        (lambda z: SimpleNamespace(logits=z), None),
        (lambda z: SimpleNamespace(scores=z, logits=-z), "scores"),
        (lambda z: Named(-z, z), None),  # its name wins over its place
        (lambda z: Named(z, -z), 0),
        (lambda z: (z.sum(), z), None),
        (lambda z: [-z, z], -1),
        (lambda z: {1: z}, 1),
        (lambda z: {"deep": [z]}, lambda answer: answer["deep"][0]),
    ],
)
def test_logits_are_found_in_any_answer(form: Callable[[Tensor], object], place: Any) -> None:
    net, x = Net(form).eval(), images()
    assert wrap(net, logits=place)(x).equal(net.last(net.norm(x.flatten(1))))


def test_weights_keep_their_names_and_a_copy_is_a_copy() -> None:
    plain = Net(lambda z: {"logits": z})
    net, x = wrap(plain, mean=0.5), images()
    assert net.state_dict().keys() == {"mean", "std", *(f"model.{name}" for name in plain.state_dict())}
    twin = copy.deepcopy(net)
    assert twin.eval()(x).equal(net.eval()(x))
    with torch.no_grad():
        twin.model.get_parameter("last.weight").zero_()
    assert not twin(x).equal(net(x))
    assert net.model.training is False
    assert net.train().model.training is True
    assert wrap(plain).state_dict().keys() == {f"model.{name}" for name in plain.state_dict()}


def test_the_wrapper_is_made_where_the_model_is_and_in_its_type() -> None:
    net = wrap(Net().double().eval(), mean=0.1, std=0.3)
    assert net.mean is not None
    assert (net.mean.dtype, float(net.mean)) == (torch.float64, 0.1)  # not the nearest float32
    assert net(images().double()).dtype == torch.float64
    meta = wrap(Net().to("meta"), mean=0.1)
    assert meta.mean is not None
    assert meta.mean.is_meta


@pytest.mark.parametrize("kind", KINDS)
def test_layout_compiler_and_processes_change_nothing(kind: str, tmp_path: Path) -> None:
    x = torch.rand(3, 1, 8, 8)
    net = detected(wrap(huggingface(kind), mean=0.5, std=0.25), x).model if kind == "vit" else wrap(huggingface(kind))
    net = wrap(net, size=16).eval()
    expected = net(x)
    torch.testing.assert_close(net.to(memory_format=torch.channels_last)(x), expected)  # type: ignore[call-overload]
    compiled: nn.Module = torch.compile(net, backend="eager", fullgraph=True)  # type: ignore[assignment]
    torch.testing.assert_close(compiled(x), expected)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(net.train())
        parallel(x).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        torch.testing.assert_close(parallel.eval()(x), net(x))
    finally:
        dist.destroy_process_group()


def test_a_model_in_eval_mode_stays_in_eval_mode() -> None:
    """Batch norm and dropout: judged in train mode, it would answer otherwise, and be refused."""
    model = nn.Sequential(Net(lambda z: z), nn.Dropout(0.5))
    with torch.no_grad():
        for _ in range(20):
            model.train()(torch.rand(32, 1, 4, 4))
    assert wrap(model.train()).training
    assert not wrap(model.eval()).training
    x = torch.rand(24, 1, 4, 4)
    y = model(x).argmax(dim=1)
    spoken = Net(lambda z: {"logits": z})
    spoken.load_state_dict(model[0].state_dict())
    for judged in (wrap(model), spoken.eval()):
        found = steelman.evaluate(judged, x, y, THREAT, {"pgd": PGD(steps=1)}).verdict
        assert found is not None
        assert found.clean == 24


def test_who_attacks_or_trains_on_an_answer_that_is_no_tensor_is_told_the_way() -> None:
    model, x, y = Net(lambda z: {"logits": z}), images(), torch.zeros(4).long()
    with pytest.raises(UserError, match=r"answers with dict, and logits are expected: steelman\.wrap\(model\)"):
        PGD()(model.eval(), x, y, THREAT)
    with pytest.raises(UserError, match=r"answers with dict, and logits are expected: steelman\.wrap\(model\)"):
        steelman.Criterion(steelman.PGDAT(), model.train(), THREAT)(x, y)
    wrapped = wrap(model)
    assert steelman.Criterion(steelman.PGDAT(), wrapped, THREAT)(x, y).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_may_copy_it_for_its_threads(kind: str) -> None:
    net = detected(huggingface(kind), torch.rand(2, 1, 16, 16)).model
    assert len(_copies(net, 2)) == 2
    assert _copies(wrap(net, logits=lambda z: z), 2) == []  # the function might keep notes


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_put_in_place_of_the_classifier(kind: str) -> None:
    x = torch.rand(2, 1, 16, 16)
    net = wrap(huggingface(kind))
    check_readable(net, x)
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    embed(net, "he", scale=10)
    name, head = next((name, module) for name, module in net.named_modules() if isinstance(module, Head))
    assert name.startswith("model.classifier")
    assert head.weight.equal(last.weight)
    with features_of(net) as seen:
        logits = net(x)
    cosines = F.normalize(seen[0], dim=1) @ F.normalize(last.weight, dim=1).T
    torch.testing.assert_close(logits, 10 * cosines)


def test_a_hugging_face_model_is_trained_and_judged() -> None:
    """A ResNet; a ViT is trained and judged by an example."""
    x, y = pictures()
    net, sentence = detected(huggingface("resnet"), x)
    assert ".logits are used" in sentence
    attack, losses = PGD(steps=3), []
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(40):
        x_adv = attack(net, x, y, THREAT)
        assert THREAT.contains(x_adv, x).all()
        loss = F.cross_entropy(net.train()(x_adv), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    found = steelman.evaluate(net.eval(), x, y, THREAT, "fast")
    assert found.verdict is not None
    assert found.total == len(x)
    assert 0.9 * len(x) <= found.verdict.correct <= found.score("clean").correct


def test_a_robust_accuracy_is_not_the_wrapper_s_doing() -> None:
    """The attack finds what it finds in the model alone: a wrapper that broke the gradient would look robust."""

    class Unwrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.model((x - 0.5) / 0.5).logits
            return logits

    model, (x, _) = huggingface("resnet"), pictures(24)
    y = model((x - 0.5) / 0.5).logits.argmax(dim=1)
    verdicts = [
        steelman.evaluate(net, x, y, ThreatModel(eps=0.3), "fast").verdict
        for net in (Unwrapped(model).eval(), wrap(model, mean=0.5, std=0.5).eval())
    ]
    assert verdicts[0] is not None
    assert verdicts[1] is not None
    assert verdicts[0].correct == verdicts[1].correct < len(x)


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (lambda z: {"logits": z}, "the model answers with dict: its ['logits'] are used"),
        (lambda z: SimpleNamespace(logits=z), "the model answers with SimpleNamespace: its .logits are used"),
        (lambda z: Named(-z, z), "the model answers with Named: its .logits are used"),
        (lambda z: (z.sum(), z), "the model answers with tuple: its [1], of 3 classes, is used"),
        (lambda z: [z], "the model answers with list: its [0], of 3 classes, is used"),
    ],
)
def test_an_answer_that_is_no_tensor_is_found_and_told(form: Callable[[Tensor], object], sentence: str) -> None:
    net, x = Net(form), images()
    model, said = detected(net, x)
    assert said == sentence
    assert isinstance(model, Wrapped)
    assert model.eval()(x).equal(net.last(net.norm(x.flatten(1))))
    assert detected(model, x) == (model, "")  # once is enough


@pytest.mark.parametrize("kind", KINDS)
def test_a_hugging_face_model_is_found_with_the_size_it_needs(kind: str) -> None:
    model, x = huggingface(kind), torch.rand(3, 1, 8, 8)
    net, sentence = detected(model, x)
    name = "ImageClassifierOutput" + ("WithNoAttention" if kind == "resnet" else "")
    resized = "it needs images of 16x16: those of 8x8 are resized; " if kind == "vit" else ""
    assert sentence == (
        f"the model answers with {name}: its .logits are used; {resized}"
        "pixels reach it as they are: steelman.wrap takes mean and std"
    )
    at = F.interpolate(x, size=(16, 16), mode="bilinear", antialias=True) if kind == "vit" else x
    assert net(x).equal(model(at).logits)
    assert "resized" not in detected(model, torch.rand(3, 1, 16, 16)).sentence
    normalised, told = detected(wrap(model, mean=0.5, std=0.5), x)  # the size is found inside a wrapper too
    assert told == ("it needs images of 16x16: those of 8x8 are resized" if kind == "vit" else "")
    assert normalised(x).equal(model((at - 0.5) / 0.5).logits)


def test_a_compiled_model_is_not_compiled_for_detection() -> None:
    net, calls = Net(lambda z: {"logits": z}), list[int]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        calls.append(1)
        return graph.forward

    compiled: nn.Module = torch.compile(net, backend=backend)  # type: ignore[assignment]
    model, sentence = detected(compiled, images())
    assert (calls, sentence) == ([], "the model answers with dict: its ['logits'] are used")
    assert model.eval()(images()).shape == (4, 3)
    assert calls


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Net(), images()),
        (Net(), images(1)),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double(), images()),
        (nn.Flatten(), images()),
        (Net(), torch.rand(2, 1, 5, 5)),  # it takes none of these: the checks say so
        (Net(), torch.rand(0, 1, 4, 4)),
        (Net(), torch.rand(4, 16)),
        (lambda x: x, images()),
        (Net(), None),
    ],
)
def test_a_plain_model_comes_back_as_it_is(model: Any, x: Any) -> None:
    assert detected(model, x) == (model, "")


def test_what_a_model_is_refused_for_is_told_by_the_checks() -> None:
    from steelman.data.source import ArraySource

    model, x = huggingface("vit"), torch.rand(2, 3, 16, 16)
    net, sentence = detected(model, x)
    assert (net is model, sentence) == (True, "")
    with pytest.raises(UserError, match="cannot take images of shape"):
        check_contract(net, ArraySource(x, torch.zeros(2, dtype=torch.int64)), THREAT, torch.device("cpu"))


def test_detection_leaves_no_trace() -> None:
    net = Net(lambda z: (z + torch.rand(()), torch.rand(1))).train()
    net.norm.eval()
    net.last.bias.requires_grad_(False)
    x, before, state = images(), copy.deepcopy(net.state_dict()), torch.get_rng_state()
    detected(net, x)
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    assert torch.get_rng_state().equal(state)
    assert (net.training, net.norm.training, net.last.training) == (True, False, True)
    assert (net.last.bias.requires_grad, net.last.weight.requires_grad) == (False, True)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert net.runs == 2  # in eval mode and in train mode


def test_an_answer_that_differs_in_train_mode_is_found() -> None:
    """Torchvision's GoogLeNet and Inception answer so."""
    net, x = Net(), images()
    net.form = lambda z: Named(-z, z) if net.training else z
    model, sentence = detected(net, x)
    assert sentence == "in train mode the model answers with Named: its .logits are used"
    assert all(model.train(mode)(x).shape == (4, 3) for mode in (True, False))
    net.form = lambda z: {"loss": z.sum()} if net.training else z  # no logits: an evaluation needs none there
    assert detected(net, x) == (net, "")


def turns(*forms: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """The first form twice, for eval and train mode; then the next one."""
    rest: Iterator[Callable[[Tensor], object]] = iter((forms[0], *forms))

    def form(z: Tensor) -> object:
        return next(rest)(z)

    return form


@pytest.mark.parametrize(
    ("later", "error"),
    [
        (lambda z: z, "answered with dict at first and with Tensor now; expected one kind of answer"),
        (lambda z: (z,), "answered with dict at first and with tuple now; expected one kind of answer"),
        (lambda z: {"scores": z}, r"no logits are found in it; .* choices: 'scores'"),
        (lambda z: {"logits": z[0]}, r"expected a tensor of shape \(N, classes\) in \['logits'\], got \(3,\)"),
        (lambda z: None, "answered with dict at first and with NoneType now"),
    ],
)
def test_a_model_that_changes_its_answer_is_refused(later: Callable[[Tensor], object], error: str) -> None:
    model = detected(Net(turns(lambda z: {"logits": z}, later)), images()).model
    with pytest.raises(UserError, match=error):
        model.eval()(images())


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"mean": [0.5, 0.5]}, "mean and std: expected 1 or 3 values, one per channel, got 2"),
        ({"mean": [0.5] * 3, "std": [1.0] * 2}, "mean and std: expected as many of each, got 3 and 2"),
        ({"mean": []}, "mean: expected a number, or one for each channel, got none"),
        ({"mean": "0.5"}, "mean: expected a number, or one for each channel, got '0.5'"),
        ({"mean": [float("nan")]}, r"mean: expected a number, or one for each channel, got \[nan\]"),
        ({"std": True}, "std: expected a number, or one for each channel, got True"),
        ({"std": [0.5, 0.0, 0.5]}, r"std: expected numbers above 0, got \[0.5, 0.0, 0.5\]"),
        ({"size": 0}, "size: expected a whole number of at least 1, or two of them"),
        ({"size": (4, 4, 4)}, r"size: expected .* got \(4, 4, 4\)"),
        ({"size": 4.0}, "size: expected .* got 4.0"),
        ({"size": True}, "size: expected .* got True"),
        ({"logits": 1.5}, "logits: expected a key, an index, an attribute's name or a function, got 1.5"),
        ({"logits": "scores"}, "logits: the model's dict has no 'scores'; choices: 'logits', 'aux'"),
        ({"logits": 0}, "logits: the model's dict has no 0; choices: 'logits', 'aux'"),
        ({"logits": "loss"}, r"expected a tensor of shape \(N, classes\) in \['loss'\], got \(\)"),
        ({"logits": lambda z: 3}, r"expected a tensor .* in what the function logits gives, got int"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(given: dict[str, Any], error: str) -> None:
    net = Net(lambda z: {"logits": z, "aux": z, "loss": z.sum()}).eval()
    with pytest.raises(UserError, match=error):
        wrap(net, **given)(torch.rand(2, 3, 4, 4)[:, : 3 if "mean" in given else 1])


@pytest.mark.parametrize(
    ("form", "place", "error"),
    [
        (lambda z: (z,), 1, "the model's tuple has no 1; choices: 0"),
        (
            lambda z: SimpleNamespace(scores=z),
            "logits",
            "the model's SimpleNamespace has no 'logits'; choices: 'scores'",
        ),
        (lambda z: SimpleNamespace(scores=z), None, "answers with SimpleNamespace, .* choices: 'scores'"),
        (lambda z: (z[0], 3), None, "answers with tuple, .* choices: none, because it holds no tensor of shape"),
        (lambda z: z, 0, "the model's Tensor has no 0"),
        (lambda z: z[0], None, r"expected a tensor of shape \(N, classes\) in the model's answer, got \(3,\)"),
        (lambda z: 3, None, "answers with int, and no logits are found in it"),
    ],
)
def test_an_answer_without_logits_is_answered_with_the_choices(
    form: Callable[[Tensor], object], place: Any, error: str
) -> None:
    with pytest.raises(UserError, match=error):
        wrap(Net(form).eval(), logits=place)(images())


def test_what_is_no_model_and_what_are_no_images_are_refused() -> None:
    with pytest.raises(UserError, match=r"wrap: expected a torch.nn.Module, got function"):
        wrap(images)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"expected images of shape \(N, C, H, W\), got \(4, 16\)"):
        wrap(nn.Flatten(), mean=0.5)(torch.rand(4, 16))
    with pytest.raises(UserError, match="the model answers with dict, and no logits are found in it"):
        detected(Net(lambda z: {"scores": z}), images())
