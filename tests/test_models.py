"""Backbones: sizes against published counts, wiring against naive recomputation, and one contract for all."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from scipy import ndimage
from torch import Tensor, nn

from steelman import recipe as recipes
from steelman.errors import UserError
from steelman.heads import build_head
from steelman.models import ACTIVATIONS, MODELS, PUBLISHED_LAYOUTS, Backbone, check_images
from steelman.models import activations as activations_module
from steelman.models.classifier import Classifier
from steelman.models.denoise import FILTERS, Denoise
from steelman.models.mobilenet import InvertedResidual
from steelman.models.preact_resnet import PreActBlock
from steelman.models.resnet import BasicBlock, Bottleneck
from steelman.models.small import SmallCNN
from steelman.models.wide_resnet import WideResNet
from steelman.settings import make, options_of
from steelman.training import run
from steelman.training.folder import load_model

SHAPE = (3, 32, 32)
NONLINEAR = sorted(MODELS.keys() - {"linear"})
RESIDUAL = sorted(name for name in MODELS if "resnet" in name or name.startswith("wrn"))
FAMILIES = ["resnet18", "resnet50", "preact-resnet18", "wrn-28-8"]  # of the residual ones, one of each
# The same code with another depth or width; their sizes are checked, and one of each family is run.
DEEPER = {"resnet152", "wrn-28-10", "wrn-34-10", "wrn-34-20", "wrn-40-8", "wrn-101-2"}
RUN = sorted(MODELS.keys() - DEEPER)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def tiny(name: str, **options: str) -> Backbone:
    width = 16 if name == "mlp" else 1  # a single ReLU unit is often dead
    return MODELS[name](input_shape=SHAPE, width=width, **options)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def scramble(module: nn.Module) -> nn.Module:
    """Give every parameter and running statistic a random value, in float64."""
    module.double().eval()
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if name.endswith("running_var") else torch.randn_like(value) / 2)
    return module


# Sizes


@pytest.mark.parametrize(
    ("name", "shape", "classes", "published"),
    [
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("resnet152", (3, 224, 224), 1000, 60_192_808),
        ("wrn-50-2", (3, 224, 224), 1000, 68_883_240),
        ("wrn-101-2", (3, 224, 224), 1000, 126_886_696),
        ("wrn-34-10", SHAPE, 10, 46_160_474),
        ("wrn-28-10", SHAPE, 10, 36_479_194),
        ("resnet18", SHAPE, 10, 11_173_962),
        # The commonly quoted 11,171,146 is without the last BN, which has 2 * 512 parameters.
        ("preact-resnet18", SHAPE, 10, 11_171_146 + 1024),
        ("preact-resnet18-fastat", SHAPE, 10, 11_171_146 + 1024),
        ("vgg16", SHAPE, 10, 14_728_266),
        ("mobilenet-v2", SHAPE, 10, 2_296_922),
        ("lenet", (1, 28, 28), 10, 3_274_634),
        ("smallcnn", (1, 28, 28), 10, 312_202),
        ("fastat-mnist", (1, 28, 28), 10, 166_406),
    ],
)
def test_parameters_with_a_linear_head_are_as_many_as_published(
    name: str, shape: tuple[int, int, int], classes: int, published: int
) -> None:
    with torch.device("meta"):
        backbone = MODELS[name](input_shape=shape)
    assert count(backbone) + (backbone.features + 1) * classes == published


@pytest.mark.parametrize(("depth", "width"), [(28, 8), (28, 10), (34, 10), (34, 20), (40, 8)])
def test_wide_resnet_parameters_follow_the_formula(depth: int, width: int) -> None:
    def block(a: int, b: int) -> int:
        return 2 * a + 9 * a * b + 2 * b + 9 * b * b + (a * b if a != b else 0)

    stages = [16 * width, 32 * width, 64 * width]
    more = (depth - 4) // 6 - 1
    expected = 3 * 16 * 9 + 2 * stages[-1]
    expected += sum(block(a, b) + more * block(b, b) for a, b in zip([16, *stages], stages))
    with torch.device("meta"):
        assert count(MODELS[f"wrn-{depth}-{width}"](input_shape=SHAPE)) == expected


def test_default_features_are_those_of_the_papers() -> None:
    expected = {
        "digits-cnn": 128, "fastat-mnist": 100, "lenet": 1024, "linear": 3072, "mlp": 128, "mobilenet-v2": 1280,
        "pas-resnet18": 256, "pas-vgg16": 256, "preact-resnet18": 512, "preact-resnet18-fastat": 512,
        "resnet18": 512, "resnet50": 2048, "resnet152": 2048, "smallcnn": 200, "vgg16": 512, "wrn-28-8": 512,
        "wrn-28-10": 640, "wrn-34-10": 640, "wrn-34-20": 1280, "wrn-40-8": 512, "wrn-50-2": 2048, "wrn-101-2": 2048,
    }  # fmt: skip
    with torch.device("meta"):
        assert {name: model(input_shape=SHAPE).features for name, model in MODELS.items()} == expected


@pytest.mark.parametrize(
    ("name", "size", "last"),
    [
        ("wrn-34-10", 32, 8),
        ("preact-resnet18", 32, 4),
        ("preact-resnet18", 28, 4),
        ("resnet18", 32, 4),
        ("mobilenet-v2", 32, 4),
        ("vgg16", 32, 1),
        ("resnet50", 224, 7),
    ],
)
def test_maps_shrink_as_published(name: str, size: int, last: int) -> None:
    sizes: list[torch.Size] = []
    with torch.device("meta"):
        backbone = MODELS[name](input_shape=(3, size, size), width=1)
        for module in backbone.modules():
            module.register_forward_hook(lambda _module, _inputs, out: sizes.append(out.shape[2:]))
        backbone(torch.empty(2, 3, size, size))
    assert [shape for shape in sizes if shape][-1] == (last, last)


# The contract of every entry


@pytest.mark.parametrize("name", MODELS)
def test_options_are_the_shape_the_width_the_activation_and_of_residual_ones_the_denoising(name: str) -> None:
    expected = {"input_shape", "width", "activation"} | ({"denoise"} if name in RESIDUAL else set())
    assert options_of(MODELS[name]).keys() == expected
    with pytest.raises(UserError, match="depth"):
        make("model", MODELS, name, {"input_shape": SHAPE, "depth": 10})


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize(("dtype", "activation"), [(torch.float32, "relu"), (torch.float64, "softplus")])
def test_forward_and_backward_are_finite_and_reach_the_input(name: str, dtype: torch.dtype, activation: str) -> None:
    backbone = tiny(name, **({"activation": activation} if name in NONLINEAR else {})).to(dtype)
    x = torch.rand(4, *SHAPE, dtype=dtype, requires_grad=True)
    out = backbone(x)
    assert out.shape == (4, backbone.features)
    assert out.dtype == dtype
    assert out.isfinite().all()
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), [x, *backbone.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    if activation == "softplus":  # so narrow a network of ReLUs may be dead
        assert all(image.any() for image in gradients[0])


@pytest.mark.parametrize("name", RUN)
def test_eval_output_of_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    backbone = tiny(name).double()
    backbone(torch.rand(4, *SHAPE, dtype=torch.float64))  # moves the running statistics
    backbone.eval()
    x = torch.rand(3, *SHAPE, dtype=torch.float64)
    out = backbone(x)
    torch.testing.assert_close(backbone(x[1:2]), out[1:2])
    torch.testing.assert_close(backbone(torch.cat([x[2:], x[:1] * 0, x[1:2]]))[2], out[1])
    assert backbone(x[:0]).shape == (0, backbone.features)


@pytest.mark.parametrize("name", ["digits-cnn", "fastat-mnist", "lenet", "mlp", "smallcnn", "preact-resnet18"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (2, 16, 19), (1, 17, 16)])
def test_other_image_sizes_work(name: str, shape: tuple[int, int, int]) -> None:
    backbone = MODELS[name](input_shape=shape, width=2)
    assert backbone(torch.rand(2, *shape)).shape == (2, backbone.features)


@pytest.mark.parametrize(("name", "least"), [("lenet", 4), ("smallcnn", 16), ("fastat-mnist", 4), ("vgg16", 32)])
def test_the_least_image_works_and_a_smaller_one_is_refused(name: str, least: int) -> None:
    assert MODELS[name](input_shape=(1, least, least), width=1)(torch.rand(2, 1, least, least)).isfinite().all()
    with pytest.raises(UserError, match=f"at least {least}x{least}, got {least}x{least - 1}"):
        MODELS[name](input_shape=(1, least, least - 1), width=1)


# Activations


def second_derivative(backbone: Backbone) -> float:
    """max |d/dx (|df/dx|^2)| for a random projection f of the features, in eval mode."""
    backbone.double().eval()
    x = torch.rand(1, *SHAPE, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(backbone.features, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((backbone(x) @ weights).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((gradient**2).sum(), x, materialize_grads=True)
    return float(second.abs().max() / (gradient.detach() ** 2).sum())


@pytest.mark.parametrize("name", sorted(set(NONLINEAR) - DEEPER))
def test_a_smooth_activation_gives_a_second_derivative_and_relu_none(name: str) -> None:
    assert second_derivative(tiny(name)) == 0
    assert second_derivative(tiny(name, activation="softplus")) > 1e-6


@pytest.mark.parametrize("name", sorted(set(NONLINEAR) - DEEPER))
def test_every_nonlinearity_is_the_chosen_activation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the identity as activation and means for max-pools, a network is affine."""
    monkeypatch.setitem(activations_module.ACTIVATIONS, "relu", nn.Identity)
    monkeypatch.setattr(nn, "MaxPool2d", nn.AvgPool2d)
    backbone = tiny(name).double().eval()
    a, b = torch.rand(2, 1, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(backbone(a) + backbone(b) - backbone(0 * a), backbone(a + b))


def test_activations_are_what_they_are_called() -> None:
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    expected = {"relu": x.clamp(min=0), "softplus": (1 + x.exp()).log(), "silu": x / (1 + (-x).exp())}
    assert expected.keys() == ACTIVATIONS.keys()
    for name, value in expected.items():
        torch.testing.assert_close(activations_module.make_activation(name)(x), value)


# Wiring, against naive recomputation


def bn(x: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    weight, bias, mean, var = (
        state[f"{name}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias", "running_mean", "running_var")
    )
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def naive_preact_block(x: Tensor, state: dict[str, Tensor], at: str, stride: int, raw: bool = False) -> Tensor:
    a = F.relu(bn(x, state, f"{at}bn1"))
    out = F.conv2d(a, state[f"{at}conv1.weight"], stride=stride, padding=1)
    out = F.conv2d(F.relu(bn(out, state, f"{at}bn2")), state[f"{at}conv2.weight"], padding=1)
    if f"{at}shortcut.weight" in state:
        return out + F.conv2d(x if raw else a, state[f"{at}shortcut.weight"], stride=stride)
    return out + x


def test_wide_resnet_is_wired_as_in_trades() -> None:
    net = scramble(WideResNet(16, input_shape=(3, 12, 12), width=2))
    state = net.state_dict()
    x = torch.rand(3, 3, 12, 12, dtype=torch.float64)
    out = F.conv2d(x, state["stem.weight"], padding=1)
    for index, stride in enumerate([1, 1, 2, 1, 2, 1]):
        assert (f"blocks.{index}.shortcut.weight" in state) == (index % 2 == 0)
        out = naive_preact_block(out, state, f"blocks.{index}.", stride)
    out = F.relu(bn(out, state, "bn"))
    torch.testing.assert_close(net(x), F.avg_pool2d(out, 3).flatten(1))


@pytest.mark.parametrize(("name", "raw"), [("preact-resnet18", False), ("preact-resnet18-fastat", True)])
def test_preact_resnet_is_wired_as_published(name: str, raw: bool) -> None:
    net = scramble(MODELS[name](input_shape=(3, 16, 16), width=2))
    state = net.state_dict()
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    out = F.conv2d(x, state["stem.weight"], padding=1)
    for index, stride in enumerate([1, 1, 2, 1, 2, 1, 2, 1]):
        assert (f"blocks.{index}.shortcut.weight" in state) == (stride == 2)
        out = naive_preact_block(out, state, f"blocks.{index}.", stride, raw)
    out = F.relu(bn(out, state, "bn"))
    torch.testing.assert_close(net(x), F.avg_pool2d(out, 2).flatten(1))


def test_preact_block_projects_when_only_the_stride_changes() -> None:
    block = scramble(PreActBlock(4, 4, stride=2, activation="relu"))
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(block(x), naive_preact_block(x, block.state_dict(), "", 2))


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(4, 4, 1), (4, 6, 1), (4, 4, 2), (4, 6, 2)])
def test_post_activation_blocks_are_wired_as_published(inputs: int, outputs: int, stride: int) -> None:
    x = torch.randn(2, inputs, 7, 7, dtype=torch.float64)

    def skip(state: dict[str, Tensor]) -> Tensor:
        if (inputs, stride) == (outputs, 1):
            return x
        return bn(F.conv2d(x, state["shortcut.0.weight"], stride=stride), state, "shortcut.1")

    basic = scramble(BasicBlock(inputs, outputs, stride=stride, activation="relu"))
    state = basic.state_dict()
    out = bn(F.conv2d(x, state["residual.0.weight"], stride=stride, padding=1), state, "residual.1")
    out = bn(F.conv2d(F.relu(out), state["residual.3.weight"], padding=1), state, "residual.4")
    torch.testing.assert_close(basic(x), F.relu(out + skip(state)))

    bottleneck = scramble(Bottleneck(inputs, 3, outputs, stride=stride, activation="relu"))
    state = bottleneck.state_dict()
    out = bn(F.conv2d(x, state["residual.0.weight"]), state, "residual.1")
    out = bn(F.conv2d(F.relu(out), state["residual.3.weight"], stride=stride, padding=1), state, "residual.4")
    out = bn(F.conv2d(F.relu(out), state["residual.6.weight"]), state, "residual.7")
    torch.testing.assert_close(bottleneck(x), F.relu(out + skip(state)))


@pytest.mark.parametrize(("outputs", "stride"), [(4, 1), (6, 1), (4, 2), (6, 2)])
def test_inverted_residual_is_linear_at_its_end_and_adds_nothing_when_it_strides(outputs: int, stride: int) -> None:
    block = scramble(InvertedResidual(4, outputs, expansion=2, stride=stride, activation="relu"))
    state = block.state_dict()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    out = F.relu(bn(F.conv2d(x, state["residual.0.weight"]), state, "residual.1"))
    out = F.conv2d(out, state["residual.3.weight"], stride=stride, padding=1, groups=8)
    out = bn(F.conv2d(F.relu(bn(out, state, "residual.4")), state["residual.6.weight"]), state, "residual.7")
    if stride == 1:
        out = out + (x if outputs == 4 else bn(F.conv2d(x, state["shortcut.0.weight"]), state, "shortcut.1"))
    torch.testing.assert_close(block(x), out)


def test_linear_gives_the_pixels() -> None:
    x = torch.rand(2, 3, 4, 5)
    assert MODELS["linear"](input_shape=(3, 4, 5))(x).equal(x.reshape(2, 60))


def test_smallcnn_drops_half_of_its_hidden_units_in_training_only() -> None:
    small = SmallCNN(input_shape=SHAPE)
    nn.init.constant_(small.fc1.bias, 100.0)  # so that no unit is zero by itself
    nn.init.eye_(small.fc2.weight)
    nn.init.zeros_(small.fc2.bias)
    x = torch.rand(50, *SHAPE)
    assert float((small(x) == 0).float().mean()) == pytest.approx(0.5, abs=0.03)
    assert (small.eval()(x) > 0).all()


# Initialisation


def test_wide_and_bottleneck_resnets_start_from_fan_out_and_smallcnn_from_fan_in() -> None:
    wide = WideResNet(10, input_shape=SHAPE, width=4)
    bottleneck = MODELS["resnet50"](input_shape=SHAPE, width=16)
    small = MODELS["smallcnn"](input_shape=SHAPE)
    for net, fan_axis, least in [(wide, 0, 16), (bottleneck, 0, 16), (small, 1, 3)]:
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                kernel = layer.kernel_size[0] * layer.kernel_size[1]
                spread = (2 / (kernel * layer.weight.shape[fan_axis])) ** 0.5
                noise = 5 / (2 * layer.weight.numel()) ** 0.5
                assert layer.weight.shape[fan_axis] >= least
                assert float(layer.weight.detach().std()) == pytest.approx(spread, rel=noise)
                assert layer.bias is None or not layer.bias.any()


# Denoising


def naive_filter(kind: str, x: Tensor, theta: Tensor | None = None, phi: Tensor | None = None) -> Tensor:
    """f(x), position by position; the 3x3 filters by SciPy's."""
    images, _, height, width = x.shape
    if kind in ("mean", "median"):
        of = ndimage.uniform_filter if kind == "mean" else ndimage.median_filter
        maps = [of(one.numpy(), size=3, mode="nearest") for one in x.flatten(0, 1)]
        return torch.tensor(np.stack(maps)).view_as(x)
    out = torch.zeros_like(x).flatten(2)
    for n in range(images):
        points = [x[n, :, i, j] for i in range(height) for j in range(width)]
        for i, here in enumerate(points):
            if theta is not None and phi is not None:
                a, d = theta.flatten(1) @ here, len(theta)
                similar = [torch.exp((a * (phi.flatten(1) @ there)).sum() / math.sqrt(d)) for there in points]
                weights = [one / sum(similar) for one in similar]
            else:
                weights = [(here * there).sum() / len(points) for there in points]
            for weight, there in zip(weights, points):
                out[n, :, i] += weight * there
    return out.view_as(x)


def test_non_local_filters_by_hand() -> None:
    """Two positions, (1, 0) and (0, 2)."""
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64).view(1, 2, 1, 2)
    expected = torch.tensor([[0.5, 0.0], [0.0, 4.0]], dtype=torch.float64).view(1, 2, 1, 2)
    torch.testing.assert_close(Denoise(2, "dot").double().filtered(x), expected)
    block = Denoise(2, "softmax").double()
    with torch.no_grad():
        block.theta.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))  # of the positions: 1 and 0
        block.phi.copy_(torch.tensor([0.0, 1.0]).view(1, 2, 1, 1))  # of the positions: 0 and 2
    a = 1 / (1 + math.exp(2))  # what the first position keeps of itself; the second weighs both alike
    expected = torch.tensor([[a, 0.5], [2 * (1 - a), 1.0]], dtype=torch.float64).view(1, 2, 1, 2)
    torch.testing.assert_close(block.filtered(x), expected)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 1), (3, 4)])
@pytest.mark.parametrize("channels", [1, 6, 16])  # 16 are more than there are positions
@pytest.mark.parametrize("kind", FILTERS)
def test_a_block_is_its_formula(kind: str, channels: int, size: tuple[int, int]) -> None:
    block = Denoise(channels, kind)
    scramble(block)
    x = torch.randn(2, channels, *size, dtype=torch.float64)
    state = block.state_dict()
    assert ({"theta", "phi"} <= state.keys()) == (kind == "softmax")
    filtered = naive_filter(kind, x, state.get("theta"), state.get("phi"))
    torch.testing.assert_close(block.filtered(x), filtered)
    torch.testing.assert_close(block(x), x + bn(F.conv2d(filtered, state["conv.weight"]), state, "bn"))
    torch.testing.assert_close(block(x.contiguous(memory_format=torch.channels_last)), block(x))
    assert block(x[:0]).shape == (0, channels, *size)


@pytest.mark.parametrize("kind", FILTERS)
def test_a_block_has_gradients_of_first_and_second_order(kind: str) -> None:
    block = Denoise(4, kind)
    scramble(block)
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))
    if kind == "median":
        return
    assert torch.autograd.gradgradcheck(block, (x,))
    (gradient,) = torch.autograd.grad(block.train()(x).square().sum(), x, create_graph=True)
    torch.autograd.backward(gradient.square().sum())
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in block.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", FILTERS)
def test_a_block_starts_as_the_identity_and_learns_its_scale_first(kind: str, training: bool) -> None:
    block = Denoise(6, kind).train(training)
    x = torch.randn(3, 6, 4, 4)
    out = block(x)
    assert out.equal(x)
    torch.autograd.backward((out * torch.randn_like(out)).sum())
    assert {name for name, p in block.named_parameters() if p.grad is not None and p.grad.any()} == {
        "bn.weight",
        "bn.bias",
    }
    with torch.no_grad():
        block.bn.weight.fill_(0.1)
    out = block(x)
    torch.autograd.backward((out * torch.randn_like(out)).sum())
    assert all(p.grad is not None and p.grad.any() for p in block.parameters()), "the embeddings learn next"


@pytest.mark.parametrize("kind", FILTERS)
def test_a_block_runs_in_half_precision(kind: str) -> None:
    block, x = Denoise(6, kind).eval(), torch.randn(2, 6, 4, 4)
    nn.init.ones_(block.bn.weight)
    whole = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(block(x).float(), whole, rtol=0, atol=0.1)


@pytest.mark.parametrize("name", sorted(set(RESIDUAL) - DEEPER))
def test_one_block_ends_each_stage(name: str) -> None:
    with torch.device("meta"):
        plain = MODELS[name](input_shape=SHAPE)
        nets = {kind: MODELS[name](input_shape=SHAPE, denoise=kind) for kind in FILTERS}
    for kind, net in nets.items():
        layers = [
            layer for layer in net.modules() if isinstance(layer, BasicBlock | Bottleneck | PreActBlock | Denoise)
        ]
        strides = [max(conv.stride[0] for conv in layer.modules() if isinstance(conv, nn.Conv2d)) for layer in layers]
        # A stage begins with a block that strides, but for the first one, and ends with its denoising.
        at = [i for i, layer in enumerate(layers) if isinstance(layer, Denoise)]
        assert at == [*(i - 1 for i, stride in enumerate(strides) if stride == 2), len(layers) - 1]
        channels = [layer.conv.out_channels for layer in layers if isinstance(layer, Denoise)]
        assert channels == [net.features >> i for i in reversed(range(3 if isinstance(net, WideResNet) else 4))]
        more = sum(size * size + 2 * size + (size * size if kind == "softmax" else 0) for size in channels)
        assert count(net) - count(plain) == more


@pytest.mark.parametrize(("name", "kind"), [(FAMILIES[i % len(FAMILIES)], kind) for i, kind in enumerate(FILTERS)])
def test_denoised_backbones_keep_the_contract(name: str, kind: str) -> None:
    net = tiny(name, denoise=kind).double()
    x = torch.rand(3, *SHAPE, dtype=torch.float64)
    bare = copy.deepcopy(net)
    for parent in list(bare.modules()):
        for child, layer in list(parent.named_children()):
            if isinstance(layer, Denoise):
                setattr(parent, child, nn.Identity())
    assert net(x).equal(bare(x)), "every block starts as the identity"
    for layer in net.modules():
        if isinstance(layer, Denoise):
            nn.init.constant_(layer.bn.weight, 0.5)
    x.requires_grad_()
    out = net(x)
    assert not out.equal(bare(x))
    torch.autograd.backward((out * torch.randn_like(out)).sum())
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    net.eval()
    torch.testing.assert_close(net(x[1:2]), net(x)[1:2])
    assert net(x[:0]).shape == (0, net.features)
    one_pixel = MODELS[name](input_shape=(3, 1, 1), width=1, denoise=kind)
    assert one_pixel(torch.rand(2, 3, 1, 1)).isfinite().all()


@pytest.mark.parametrize("name", ["resnet50", "wrn-28-8"])
def test_embeddings_start_small_where_convolutions_are_drawn_anew(name: str) -> None:
    for block in MODELS[name](input_shape=SHAPE, width=4, denoise="softmax").modules():
        if isinstance(block, Denoise):
            for embedding in (block.theta, block.phi):
                assert embedding.shape == (block.conv.in_channels // 2, block.conv.in_channels, 1, 1)
                assert float(embedding.detach().std()) == pytest.approx(0.01, rel=5 / (2 * embedding.numel()) ** 0.5)


@pytest.mark.parametrize(
    ("name", "keys", "total", "next_number"),
    [
        ("pas-resnet18", "9b9e521c0fc5851d", 601.456755, 0.61986977),
        ("preact-resnet18", "5d96761abb1f772f", 125.830733, 0.86801833),
        ("preact-resnet18-fastat", "5d96761abb1f772f", 125.830733, 0.86801833),
        ("resnet18", "9b9e521c0fc5851d", 601.456755, 0.61986977),
        ("resnet50", "9f65a62479641d4d", 836.467339, 0.62110215),
        ("wrn-28-8", "695442992c840e77", 1831.522345, 0.64910251),
        ("wrn-34-10", "ecd2ce6de72f3dc2", 2308.344547, 0.29277915),
        ("wrn-50-2", "61a32a949b4eaabe", 1035.020416, 0.91752422),
    ],
)
def test_without_denoising_names_and_first_weights_are_those_of_earlier_versions(
    name: str, keys: str, total: float, next_number: float
) -> None:
    """So that checkpoints load and seeds give the same runs. The numbers are from before there was denoising."""
    for options in ({}, {"denoise": "none"}):
        torch.manual_seed(7)
        state = tiny(name, **options).state_dict()
        named = "\n".join(f"{key} {tuple(value.shape)}" for key, value in state.items())
        assert hashlib.sha256(named.encode()).hexdigest()[:16] == keys
        assert sum(float(value.double().sum()) for value in state.values()) == pytest.approx(total, abs=1e-4)
        assert float(torch.rand(())) == pytest.approx(next_number, abs=1e-7)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - set(RESIDUAL)))
def test_other_backbones_are_not_denoised(name: str) -> None:
    with pytest.raises(
        UserError, match=r"unknown option of model .* 'denoise'; choices: activation, input_shape, width"
    ):
        make("model", MODELS, name, {"input_shape": SHAPE, "denoise": "mean"})
    source, _ = recipes.read("digits-pgd-at", [f"model={{name: {name}, denoise: mean}}"])
    with pytest.raises(UserError, match=r"model\.denoise: unknown option of model .*choices: activation, width"):
        recipes.parse(source)


@pytest.mark.parametrize("kind", ["sotfmax", "", None, 3, ["mean"]])
def test_an_unknown_filter_is_answered_with_the_choices(kind: object) -> None:
    with pytest.raises(UserError, match=r"unknown denoise .*; choices: dot, mean, median, none, softmax"):
        make("model", MODELS, "resnet18", {"input_shape": SHAPE, "width": 1, "denoise": kind})
    with pytest.raises(UserError, match=r"unknown denoise .*; choices: dot, mean, median, softmax"):
        Denoise(4, kind)  # type: ignore[arg-type]


def test_a_recipe_may_ask_for_denoising(tmp_path: Path) -> None:
    overrides = ["model={name: preact-resnet18, width: 2, denoise: softmax}", "training.epochs=1"]
    overrides += ["objective.attack.steps=1", "validation={size: 20, samples: 20, attack: fgsm}"]
    overrides += ["training.batch_size=128", "evaluation={samples: 20, suite: null, attacks: {FGSM: fgsm}}"]
    source, _ = recipes.read("digits-pgd-at", overrides)
    assert run.train(source, tmp_path / "run", console=Console(quiet=True)) is not None
    model, _ = load_model(tmp_path / "run")
    scales = [layer.bn.weight for layer in model.modules() if isinstance(layer, Denoise)]
    assert len(scales) == 4
    assert all(scale.any() for scale in scales), "the blocks have learned"


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "rleu"}, "unknown activation 'rleu' .did you mean 'relu'.*choices: relu, silu, softplus"),
        ({"activation": ["relu"]}, "unknown activation"),
        ({"width": 0}, "width that is a positive integer of at most 65,536, got 0"),
        ({"width": 1.5}, "width that is a positive integer of at most 65,536, got 1.5"),
        ({"width": True}, "width that is a positive integer of at most 65,536, got True"),
        ({"width": None}, "width that is a positive integer of at most 65,536, got None"),
        ({"input_shape": (32, 32)}, r"\(C, H, W\), got \(32, 32\)"),
        ({"input_shape": (3, 0, 32)}, r"\(C, H, W\), got \(3, 0, 32\)"),
        ({"input_shape": 32}, r"\(C, H, W\), got 32"),
    ],
)
@pytest.mark.parametrize("name", NONLINEAR)
def test_bad_options_are_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MODELS[name](**{"input_shape": SHAPE, "width": 1, **options})


@pytest.mark.parametrize("options", [{"width": 2}, {"activation": "softplus"}])
def test_linear_refuses_what_it_would_ignore(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="takes no width and no activation"):
        MODELS["linear"](input_shape=SHAPE, **options)


@pytest.mark.parametrize("depth", [4, 35])
def test_wide_resnet_refuses_a_depth_without_whole_blocks(depth: int) -> None:
    with pytest.raises(UserError, match=f"6n \\+ 4.*got {depth}"):
        WideResNet(depth, input_shape=SHAPE)


def test_images_of_another_shape_or_type_are_refused() -> None:
    check_images(torch.rand(0, *SHAPE), SHAPE)
    check_images(torch.rand(2, *SHAPE).double(), SHAPE)
    for wrong in (torch.rand(2, 1, 32, 32), torch.rand(2, 3, 28, 28), torch.rand(*SHAPE)):
        with pytest.raises(UserError) as error:
            check_images(wrong, SHAPE)
        assert str(error.value) == f"expected images of shape (N, 3, 32, 32), got {tuple(wrong.shape)}"
    with pytest.raises(UserError, match=r"floating-point images, got torch\.uint8"):
        check_images(torch.zeros(2, *SHAPE, dtype=torch.uint8), SHAPE)


def test_the_check_of_images_compiles_without_a_graph_break() -> None:
    def forward(x: Tensor) -> Tensor:
        check_images(x, SHAPE)
        return x + 1

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    x = torch.rand(2, *SHAPE)
    assert compiled(x).equal(x + 1)


# Published weights


def test_published_trades_smallcnn_computes_the_same_logits() -> None:
    features = nn.Sequential()
    for index, (inputs, outputs) in enumerate([(1, 32), (32, 32), (32, 64), (64, 64)], start=1):
        features.add_module(f"conv{index}", nn.Conv2d(inputs, outputs, 3))
        features.add_module(f"relu{index}", nn.ReLU())
        if index % 2 == 0:
            features.add_module(f"maxpool{index}", nn.MaxPool2d(2))
    layers = nn.Sequential()
    for index, (inputs, outputs) in enumerate([(1024, 200), (200, 200), (200, 10)], start=1):
        layers.add_module(f"fc{index}", nn.Linear(inputs, outputs))
        if index < 3:
            layers.add_module(f"relu{index}", nn.ReLU())
    published = nn.Sequential()
    published.add_module("feature_extractor", features)
    published.add_module("flatten", nn.Flatten())
    published.add_module("classifier", layers)

    shape = (1, 28, 28)
    ours = Classifier(
        MODELS["smallcnn"](input_shape=shape), build_head("linear", 200, 10), shape, (0.5,), (0.5,)
    ).eval()
    ours.load_state_dict(PUBLISHED_LAYOUTS["trades-smallcnn"](published.state_dict()))
    x = torch.rand(3, *shape)
    torch.testing.assert_close(ours(x), published(x))


def test_another_state_dict_is_refused() -> None:
    state = {"classifier.fc1.weight": torch.zeros(1), "stray": torch.zeros(1)}
    with pytest.raises(UserError, match=r"missing or unexpected: classifier.fc1.bias.*stray"):
        PUBLISHED_LAYOUTS["trades-smallcnn"](state)
