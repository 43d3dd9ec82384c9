from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from fluvial.metrics import ConvFeatures, frechet_distance, train_classifier

SIZE = 12


def shapes(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bars across, bars upright, squares and rings, of random place and size, in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4  # balanced: the distance sees how many there are of each
    middle = torch.rand(2, count, 1, 1, generator=generator) * 4 + SIZE / 2 - 2.5
    radius = torch.rand(count, 1, 1, generator=generator) * 2 + 2.5
    grid = torch.arange(float(SIZE))
    y, x = (grid[:, None] - middle[0]).abs(), (grid[None, :] - middle[1]).abs()
    square = torch.maximum(y, x)
    inside = torch.stack(
        [
            (y < 1.2) & (x < radius),
            (x < 1.2) & (y < radius),
            square < radius,
            (square < radius) & (square > radius - 1.3),
        ]
    )
    images = inside[labels, torch.arange(count)][:, None].float() * 2 - 1
    return images, labels


@pytest.fixture(scope="module", autouse=True)
def global_generator_is_left_alone() -> Iterator[None]:
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.fixture(scope="module")
def trained() -> ConvFeatures:
    images, labels = shapes(1000, 0)
    return train_classifier(images, labels, num_classes=4, epochs=5, progress=False)


def test_learns_the_classes(trained: ConvFeatures) -> None:
    assert not trained.training
    # without regard to the seed it reaches 0.98 or more; chance is 0.25
    assert trained.accuracy(*shapes(500, 1)) > 0.9
    images, labels = shapes(500, 1)
    assert trained.accuracy(images, labels) == pytest.approx(
        float((trained(images).argmax(1) == labels).double().mean()), abs=0.003
    )


def test_distance_grows_with_corruption(trained: ConvFeatures) -> None:
    images, labels = shapes(1200, 2)
    real = trained.features(images[:600])
    other = images[600:]
    floor = frechet_distance(real, trained.features(other))
    noise = torch.randn(other.shape, generator=torch.Generator().manual_seed(3))
    noisy = [frechet_distance(real, trained.features(other + s * noise)) for s in (0.1, 0.2, 0.4)]
    blurred = [
        frechet_distance(
            real,
            trained.features(
                (1 - share) * other + share * F.avg_pool2d(other, 3, 1, 1, count_include_pad=False)
            ),
        )
        for share in (0.25, 0.5, 1.0)
    ]
    for values in (noisy, blurred):
        assert 2 * floor < values[0] < values[1] < values[2], (floor, values)
    missing = frechet_distance(real, trained.features(other[labels[600:] != 3]))
    assert missing > 5 * floor


def test_training_depends_on_the_seed_alone() -> None:
    images, labels = shapes(300, 4)
    one, same, other = (
        train_classifier(images, labels, num_classes=4, steps=3, seed=seed, progress=False)
        for seed in (1, 1, 2)
    )
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
    assert not torch.equal(one.head.weight, other.head.weight)


def test_validation_and_the_bar_have_no_influence(capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = shapes(200, 5)
    plain = train_classifier(images, labels, num_classes=4, epochs=2, progress=False)
    assert capsys.readouterr().err == ""
    watched = train_classifier(
        images, labels, num_classes=4, epochs=2, validation=shapes(50, 6), progress=True
    )
    assert "accuracy" in capsys.readouterr().err
    assert torch.equal(plain.head.weight, watched.head.weight)


def test_steps_in_place_of_epochs() -> None:
    images, labels = shapes(100, 7)
    for steps in (1, 4):  # 3 batches an epoch
        model = train_classifier(
            images, labels, num_classes=4, steps=steps, batch_size=32, progress=False
        )
        assert int(model.trunk[1].num_batches_tracked) == steps


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 28, 28), (4, 9, 33), (2, 64, 8)])
def test_any_channels_and_sizes(shape: tuple[int, int, int]) -> None:
    model = ConvFeatures(channels=shape[0], num_classes=3, feature_dim=5)
    images = torch.zeros(4, *shape)
    assert model(images).shape == (4, 3)
    assert model.features(images).shape == (4, 5)
    labels = torch.tensor([0, 1, 2, 0])
    train_classifier(images, labels, num_classes=3, steps=1, progress=False)


def test_features_of_an_image_depend_on_it_alone(trained: ConvFeatures) -> None:
    images, _ = shapes(50, 8)
    whole = trained.features(images)
    assert whole.shape == (50, 64) and whole.dtype == torch.float32 and not whole.requires_grad
    # sums of about 600 float32 terms, in an order that depends on the batch
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(trained.features(images, batch_size=7), whole, **tolerance)
    torch.testing.assert_close(trained.features(images[13:14]), whole[13:14], **tolerance)
    torch.testing.assert_close(trained.features(images.double()), whole, **tolerance)


def test_features_keep_the_mode() -> None:
    model = ConvFeatures(num_classes=4).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images, labels = shapes(20, 9)
    model.features(images)
    model.accuracy(images, labels)
    assert model.training and model.trunk[1].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not ConvFeatures().eval().training


def test_state_can_be_saved(trained: ConvFeatures) -> None:
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    again = ConvFeatures(num_classes=4, seed=9)
    again.load_state_dict(torch.load(file, weights_only=True))
    images, _ = shapes(10, 10)
    assert torch.equal(again.features(images), trained.features(images))


def test_initial_weights_are_those_of_the_seed() -> None:
    one, same, other = (ConvFeatures(seed=seed) for seed in (1, 1, 2))
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
        assert value.isfinite().all()
    assert not torch.equal(one.trunk[0].weight, other.trunk[0].weight)
    weight = one.trunk[4].weight  # He: variance 2 / (16 * 9), over 4608 draws
    assert float(weight.detach().var() * 72) == pytest.approx(
        1, abs=4 * (2 / weight.numel()) ** 0.5
    )


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(2, 1, 12, 12, dtype=torch.uint8), TypeError, "floating-point"),
        (torch.zeros(2, 1, 12, 12, dtype=torch.int64), TypeError, "floating-point"),
        (torch.zeros(2, 3, 12, 12), ValueError, "images must have shape"),
        (torch.zeros(2, 12, 12), ValueError, "images must have shape"),
        (torch.zeros(0, 1, 12, 12), ValueError, "images must have shape"),
        (torch.zeros(2, 1, 7, 12), ValueError, "at least 8"),
        (torch.full((2, 1, 12, 12), torch.nan), ValueError, "finite"),
    ],
)
def test_features_refuse(images: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ConvFeatures(num_classes=4).features(images)


@pytest.mark.parametrize(
    "arguments",
    [{"channels": 0}, {"num_classes": 1}, {"feature_dim": 0}, {"width": 0}],
)
def test_network_refuses(arguments: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ConvFeatures(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": torch.zeros(8, 1, 12, 12, dtype=torch.uint8)}, TypeError, "floating-point"),
        ({"images": torch.zeros(8, 12, 12)}, ValueError, "images must have shape"),
        ({"images": torch.full((8, 1, 12, 12), 255.0)}, ValueError, r"lie in \[-1, 1\]"),
        ({"images": torch.full((8, 1, 12, 12), torch.nan)}, ValueError, r"lie in \[-1, 1\]"),
        ({"labels": torch.zeros(8)}, TypeError, "labels must be int64"),
        ({"labels": torch.zeros(7, dtype=torch.int64)}, ValueError, "labels must have shape"),
        ({"labels": torch.full((8,), 4)}, ValueError, "labels must lie in"),
        ({"labels": torch.full((8,), -1)}, ValueError, "labels must lie in"),
        ({"epochs": 0}, ValueError, "epochs"),
        ({"steps": 0}, ValueError, "steps"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"shift": -1}, ValueError, "shift"),
        ({"lr": 0.0}, ValueError, "lr"),
        (
            {"validation": (torch.zeros(2, 3, 12, 12), torch.zeros(2, dtype=torch.int64))},
            ValueError,
            r"validation\[0\]",
        ),
        (
            {"validation": (torch.zeros(2, 1, 12, 12), torch.zeros(3, dtype=torch.int64))},
            ValueError,
            r"validation\[1\]",
        ),
    ],
)
def test_training_refuses(change: dict, error: type[Exception], message: str) -> None:
    images, labels = shapes(8, 11)
    arguments = {"images": images, "labels": labels, "num_classes": 4, "progress": False, **change}
    with pytest.raises(error, match=message):
        train_classifier(**arguments)
