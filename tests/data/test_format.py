from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from fluvial.data import Format, scaled, to_uint8

IMAGES = Format("images", (3, 2, 2), label_names=("cat", "dog", "horse"), resize="pad")
ARRAYS = Format("arrays", (2, 3), shift=(1.0, -2.0), scale=(4.0, 0.5))
TABLE = Format(
    "table",
    (3,),
    (10.0, 0.5, 2.0**25),
    (2.0, 1.0, 1000.0),
    columns=("age", "share", "id"),
    integers=("age", "id"),
)


def test_images_are_scaled_and_come_back() -> None:
    x = torch.arange(252, dtype=torch.uint8).reshape(21, 3, 2, 2)
    assert torch.equal(IMAGES.encode(x), scaled(x))
    assert torch.equal(IMAGES.decode(IMAGES.encode(x)), x)
    z = torch.full((1, 3, 2, 2), 7.0)
    assert torch.equal(IMAGES.decode(z), to_uint8(z))
    assert (IMAGES.shift, IMAGES.scale) == ((127.5,), (127.5,))


def test_arrays_by_channel() -> None:
    x = torch.tensor([[[1.0, 5, 9], [-2, -1.5, 0]]])
    z = ARRAYS.encode(x)
    assert z.tolist() == [[[0, 1, 2], [0, 1, 4]]]
    assert torch.equal(ARRAYS.decode(z), x)
    assert ARRAYS.decode(z.double()).dtype == torch.float64
    assert ARRAYS.decode(z.half()).dtype == torch.float32
    assert Format("arrays", (2, 3)).encode(x).equal(x)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int64, torch.uint16, torch.bool, torch.float64]
)
def test_every_type_becomes_float32(dtype: torch.dtype) -> None:
    x = torch.tensor([[[0, 1, 1], [1, 0, 1]]]).to(dtype)
    assert ARRAYS.encode(x).dtype == torch.float32
    assert torch.equal(ARRAYS.encode(x), ARRAYS.encode(x.float()))


def test_table_columns_and_whole_numbers() -> None:
    x = torch.tensor([[12.0, 0.25, 2.0**25 + 1]], dtype=torch.float64)
    z = TABLE.encode(x)
    # in float64 before it is rounded: float32 has no 2**25 + 1
    assert z.tolist() == [[1.0, -0.25, pytest.approx(1e-3)]]
    assert torch.equal(TABLE.decode(z), x)
    back = TABLE.decode(torch.tensor([[0.2, 0.2, 0.0003]]))
    assert back.dtype == torch.float64
    assert back.tolist() == [[10, pytest.approx(0.7), 2**25]]


def test_no_rows_and_gradients() -> None:
    assert TABLE.encode(torch.empty(0, 3)).shape == (0, 3)
    z = torch.zeros(1, 2, 3, requires_grad=True)
    ARRAYS.decode(z).sum().backward()
    assert z.grad.tolist() == [[[4, 4, 4], [0.5, 0.5, 0.5]]]


def test_json_and_back() -> None:
    for form in (IMAGES, ARRAYS, TABLE):
        assert Format.from_json(json.loads(json.dumps(form.as_json()))) == form
    assert IMAGES.as_json() == {
        "kind": "images",
        "shape": [3, 2, 2],
        "shift": [127.5],
        "scale": [127.5],
        "label_names": ["cat", "dog", "horse"],
        "columns": [],
        "integers": [],
        "resize": "pad",
    }


def test_label_by_name() -> None:
    assert [IMAGES.label(name) for name in ("cat", "horse")] == [0, 2]
    with pytest.raises(ValueError, match=r"no class 'hose'; did you mean horse\? .*cat, dog, hors"):
        IMAGES.label("hose")
    with pytest.raises(ValueError, match="no labels"):
        ARRAYS.label("cat")
    many = replace(IMAGES, label_names=tuple(f"class {k}" for k in range(1000)))
    with pytest.raises(ValueError, match="and 988 more") as caught:
        many.label("class x")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "texts"}, "kind must be"),
        ({"resize": "fit"}, "resize must be"),
        ({"shape": ()}, "shape needs"),
        ({"shape": (0,)}, "shape needs"),
        ({"shape": (3, 1)}, r"shape of table must be \(columns,\)"),
        ({"shift": (1.0, 2.0)}, "shift needs one finite number, or one for each of 3"),
        ({"shift": (float("nan"),)}, "shift needs one finite"),
        ({"scale": (1.0, 0.0, 1.0)}, "scale must be positive"),
        ({"columns": ("a", "b")}, "columns must name the 3"),
        ({"columns": ("a", "b", "a")}, "columns must differ, a occurs twice"),
        ({"label_names": ("u", "u")}, "label_names must differ"),
        ({"integers": ("x",)}, "integers must be among"),
    ],
)
def test_format_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TABLE, **change)


def test_images_have_their_own_scale() -> None:
    with pytest.raises(ValueError, match=r"scale of images is 127.5, got 1.0"):
        replace(IMAGES, scale=(1.0,))
    with pytest.raises(ValueError, match=r"shape of images must be \(channels"):
        replace(IMAGES, shape=(2, 2))


def test_other_shapes_and_types_are_refused() -> None:
    for method in (IMAGES.encode, IMAGES.decode):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, 3, 2, 2\), got \(3, 2"):
            method(torch.zeros(3, 2, 2))
    with pytest.raises(TypeError, match="uint8"):
        IMAGES.encode(torch.zeros(1, 3, 2, 2))
    with pytest.raises(TypeError, match="floating-point"):
        TABLE.decode(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="NaN"):
        IMAGES.decode(torch.full((1, 3, 2, 2), torch.nan))


def test_json_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown fields: \['colour'\]"):
        Format.from_json({**IMAGES.as_json(), "colour": 1})
    with pytest.raises(ValueError, match="damaged.*shape"):
        Format.from_json({"kind": "images"})
    with pytest.raises(ValueError, match="unknown fields: 3"):
        Format.from_json(3)  # type: ignore[arg-type]
