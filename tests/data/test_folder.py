from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fluvial.data import DataSet, read

RED, GREEN, BLUE, WHITE, BLACK = (
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 255),
    (0, 0, 0),
)


def four(height: int = 40, width: int = 60) -> np.ndarray:
    """Red, green; blue, white: no rotation or reflection leaves it as it is."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = WHITE
    return pixels


def save(path: Path, pixels: np.ndarray | Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    return path


def quiet(folder: Path, **options: Any) -> DataSet:
    return read(folder, progress=False, **options)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes, six images of one size."""
    for name in ("cat/b.png", "cat/a.png", "cat/old/c.png", "ant/a.png", "ant/z/y/x.png"):
        save(tmp_path / "pictures" / name, noise(len(name) + ord(name[-5]), 5, 7, 3))
    save(tmp_path / "pictures/cat/d.PNG", noise(9, 5, 7, 3))
    return tmp_path / "pictures"


def test_folders_are_classes(pictures: Path) -> None:
    for name in ("cat/notes.txt", "readme.md", "cat/.hidden.png", ".DS_Store", "ant/Thumbs.db"):
        (pictures / name).write_text("no image")
    save(pictures / ".git" / "a.png", noise(0, 5, 7, 3))
    data = quiet(pictures)
    assert data.label_names == ("ant", "cat")
    assert data.label.tolist() == [0, 0, 1, 1, 1, 1]
    names = ["ant/a.png", "ant/z/y/x.png", "cat/a.png", "cat/b.png", "cat/d.PNG", "cat/old/c.png"]
    for row, name in zip(data.x, names, strict=True):
        assert np.array_equal(row.permute(1, 2, 0), Image.open(pictures / name))
    assert (data.format.kind, data.format.shape) == ("images", (3, 5, 7))
    assert (data.name, data.licence, data.source) == ("pictures", "unknown", "the user's files")
    assert data.notes == (
        "ignored 2 other files (1 .txt, 1 .md), which Pillow does not open as images",
    )


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for k in range(3):
        save(tmp_path / "flat" / f"{k}.png", noise(k, 4, 4))
    (tmp_path / "flat" / "empty").mkdir()
    data = quiet(tmp_path / "flat")
    assert data.label is None and data.label_names == ()
    assert data.x.shape == (3, 1, 4, 4)  # every image is grey
    assert quiet(tmp_path / "flat", channels=3).x.shape == (3, 3, 4, 4)
    save(tmp_path / "flat" / "colour.png", noise(3, 4, 4, 3))
    assert quiet(tmp_path / "flat").x.shape == (4, 3, 4, 4)


def test_folder_by_a_relative_name(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures)
    assert quiet(Path(".")).name == "pictures"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("a.png", "cat/b.png"), r"itself \(a.png\) and in folders in it \(cat/b.png\)"),
        (("train/cat/a.png", "val/cat/b.png"), r"look like parts .* train, val; read one of them"),
        (("Test/a.png",), r"look like parts"),
        ((), r"holds no image that Pillow opens$"),
    ],
)
def test_folders_that_are_mixed_up(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    (tmp_path / "mixed").mkdir()
    for name in files:
        save(tmp_path / "mixed" / name, noise(0, 4, 4))
    with pytest.raises(ValueError, match=message):
        quiet(tmp_path / "mixed")


def test_folder_without_images_says_what_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.heic", "b.HEIC", "c.txt", "d"):
        (folder / name).write_bytes(b"1")
    with pytest.raises(ValueError, match=r"4 other files \(2 .heic, 1 .txt, 1 without suffix\)"):
        quiet(folder)


TURNED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a picture lies in a file whose EXIF orientation is the key."""


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_exif_orientation(tmp_path: Path, suffix: str) -> None:
    upright = four()
    for orientation, method in TURNED.items():
        image = Image.fromarray(upright)
        exif = Image.Exif()
        exif[0x0112] = orientation
        save(
            tmp_path / "turned" / f"{orientation}.{suffix}",
            image if method is None else image.transpose(method),
            exif=exif,
            **{"webp": {"lossless": True}, "jpg": {"quality": 95}}.get(suffix, {}),
        )
    data = quiet(tmp_path / "turned")  # the sizes agree once all are upright
    assert data.x.shape == (8, 3, 40, 60)
    off = (data.x.permute(0, 2, 3, 1).int() - torch.from_numpy(upright).int()).abs().float()
    assert off.mean() < (5 if suffix == "jpg" else 1e-9)


def palette_with_transparency() -> Image.Image:
    image = Image.fromarray(np.repeat([[0, 1, 2]], 2, 0).astype(np.uint8), "P")
    image.putpalette([*RED, *GREEN, *BLUE])
    image.info["transparency"] = 1
    return image


def frames(*colours: tuple[int, int, int]) -> dict[str, Any]:
    images = [Image.new("RGB", (3, 2), colour) for colour in colours]
    return {"save_all": True, "append_images": images[1:]}


def rgb(*colours: tuple[int, int, int]) -> np.ndarray:
    """Columns of colours, (3, 2, columns)."""
    return np.array(colours, np.uint8).T[:, None].repeat(2, 1)


def grey(*levels: int) -> np.ndarray:
    return np.array(levels, np.uint8)[None, None].repeat(2, 1)


def rows(*values: Any, dtype: type = np.uint8) -> np.ndarray:
    return np.array(values, dtype)[None].repeat(2, 0)


KINDS: dict[str, tuple[str, Callable[[], Any], dict[str, Any], np.ndarray, str]] = {
    "16 bits": (
        "png",
        lambda: Image.fromarray(rows(0, 257, 65535, dtype=np.uint16)),
        {},
        grey(0, 1, 255),
        "more than 8 bits",
    ),
    "16 bits tiff": (
        "tif",
        lambda: Image.fromarray(rows(128, 129, 65535, dtype=np.uint16)),
        {},
        grey(0, 1, 255),  # 128 / 257 is less than a half
        "more than 8 bits",
    ),
    "32 bits": (
        "tif",
        lambda: Image.fromarray(rows(0, 25700, 65535, dtype=np.int32)),
        {},
        grey(0, 100, 255),
        "more than 8 bits",
    ),
    "float": (
        "tif",
        lambda: Image.fromarray(rows(0, 0.4, 1, dtype=np.float32)),
        {},
        grey(0, 102, 255),
        "more than 8 bits",
    ),
    "1 bit": (
        "png",
        lambda: Image.fromarray(rows(0, 255, 0)).convert("1"),
        {},
        grey(0, 255, 0),
        "",
    ),
    "palette": (
        "png",
        palette_with_transparency,
        {"transparency": 1},
        rgb(RED, WHITE, BLUE),
        "alpha",
    ),
    "grey palette": (
        "png",
        lambda: Image.fromarray(rows(3, 9, 200)).quantize(8),
        {},
        grey(3, 9, 200),
        "",
    ),
    "grey and alpha": (
        "png",
        lambda: Image.fromarray(rows((50, 255), (50, 0), (0, 51)), "LA"),
        {},
        grey(50, 255, 204),
        "alpha",
    ),
    "alpha": (
        "png",
        lambda: Image.fromarray(rows((*RED, 255), (*RED, 0), (*BLACK, 51))),
        {},
        rgb(RED, WHITE, (204, 204, 204)),
        "alpha",
    ),
    "transparent colour": (
        "png",
        lambda: Image.fromarray(rows(RED, GREEN, BLUE)),
        {"transparency": GREEN},
        rgb(RED, WHITE, BLUE),
        "alpha",
    ),
    "cmyk": (
        "tif",
        lambda: Image.fromarray(rows((0, 0, 0, 0), (0, 255, 255, 0), (0, 0, 0, 255)), "CMYK"),
        {},
        rgb(WHITE, RED, BLACK),
        "CMYK",
    ),
    "cmyk jpeg": (
        "jpg",
        lambda: Image.new("CMYK", (3, 2), (0, 255, 255, 0)),
        {"quality": 100},
        rgb((254, 0, 0), (254, 0, 0), (254, 0, 0)),
        "CMYK",
    ),
    "animated gif": (
        "gif",
        lambda: Image.new("RGB", (3, 2), RED),
        frames(RED, GREEN),
        rgb(RED, RED, RED),
        "several frames",
    ),
    "animated webp": (
        "webp",
        lambda: Image.new("RGB", (3, 2), RED),
        {**frames(RED, GREEN), "lossless": True},
        rgb(RED, RED, RED),
        "several frames",
    ),
    "pages": (
        "tiff",
        lambda: Image.new("RGB", (3, 2), BLUE),
        frames(BLUE, GREEN),
        rgb(BLUE, BLUE, BLUE),
        "several frames",
    ),
    "bmp": ("bmp", lambda: Image.fromarray(rows(RED, GREEN, BLUE)), {}, rgb(RED, GREEN, BLUE), ""),
    "one pixel": ("png", lambda: Image.new("L", (1, 1), 7), {}, np.array([[[7]]]), ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_images_are_read_as_they_look(tmp_path: Path, kind: str) -> None:
    suffix, make, options, wanted, note = KINDS[kind]
    save(tmp_path / "odd" / f"image.{suffix}", make(), **options)
    data = quiet(tmp_path / "odd")
    assert data.x.shape[1:] == wanted.shape
    # the conversion of JPEG's colours is off by a level or so
    assert np.abs(data.x[0].numpy().astype(int) - wanted).max() <= (2 if suffix == "jpg" else 0)
    assert len(data.notes) == (1 if note else 0)
    assert note in "".join(data.notes)


def test_colour_becomes_grey_by_luma(tmp_path: Path) -> None:
    save(tmp_path / "colour" / "a.png", rows(RED, GREEN, BLUE))
    data = quiet(tmp_path / "colour", channels=1)
    assert data.x[0, 0, 0].tolist() == [76, 150, 29]  # 0.299, 0.587, 0.114
    assert data.notes == ("colour made grey: 1 image",)


def near(pixel: torch.Tensor, colour: tuple[int, int, int]) -> bool:
    return bool((pixel.int() - torch.tensor(colour)).abs().max() <= 3)


def test_resize_keeps_the_geometry(tmp_path: Path) -> None:
    """Four colours, 40 x 60: each method puts the borders where they belong."""
    save(tmp_path / "four" / "a.png", four())
    crop = quiet(tmp_path / "four", size=20, resize="crop").x[0]
    pad = quiet(tmp_path / "four", size=30, resize="pad").x[0]
    stretch = quiet(tmp_path / "four", size=(20, 10), resize="stretch").x[0]
    assert (crop.shape, pad.shape, stretch.shape) == ((3, 20, 20), (3, 30, 30), (3, 20, 10))
    for image in (crop, stretch):
        height, width = image.shape[1:]
        for row, column, colour in (
            (2, 2, RED),
            (2, width - 3, GREEN),
            (height - 3, 2, BLUE),
            (height - 3, width - 3, WHITE),
        ):
            # the filter rings by a level or so near an edge
            assert near(image[:, row, column], colour)
    # 40 x 60 in 30 x 30 is 20 x 30, between two black bars
    assert int(pad[:, :5].max()) == 0 and int(pad[:, 25:].max()) == 0
    assert near(pad[:, 7, 2], RED) and near(pad[:, 22, 27], WHITE)
    # the middle of 60 columns is cut out: as many of the left colour as of the right
    assert torch.equal(crop[0, 0] > 128, crop[1, 0].flip(0) > 128)


def test_crop_of_any_proportions(tmp_path: Path) -> None:
    for height in (1, 3, 50, 101):
        save(tmp_path / "strips" / f"{height}.png", np.full((height, 37, 3), 9, np.uint8))
    for resize in ("crop", "pad", "stretch"):
        for size in ((7, 5), (1, 64), (64, 1)):
            data = quiet(tmp_path / "strips", size=size, resize=resize)
            assert data.x.shape == (4, 3, *size)
            assert set(data.x.unique().tolist()) <= ({0, 9} if resize == "pad" else {9})


def test_reducing_is_antialiased(tmp_path: Path) -> None:
    """Stripes of one pixel become the grey between them, for PNG and for JPEG's own reducing."""
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255
    save(tmp_path / "stripes" / "a.png", stripes)
    save(tmp_path / "stripes" / "b.jpg", stripes, quality=95)
    x = quiet(tmp_path / "stripes", size=32).x
    assert (x.float() - 127.5).abs().max() <= 4  # nearest would give 0 or 255


def test_jpeg_reduced_while_decoding_is_close_to_the_whole(tmp_path: Path) -> None:
    smooth = Image.fromarray(noise(1, 12, 16, 3)).resize((640, 480), Image.Resampling.BICUBIC)
    save(tmp_path / "photo" / "a.jpg", smooth, quality=90)
    x = quiet(tmp_path / "photo", size=(48, 64)).x[0]
    whole = Image.open(tmp_path / "photo" / "a.jpg").resize((64, 48), Image.Resampling.LANCZOS)
    off = np.abs(x.permute(1, 2, 0).numpy().astype(int) - np.asarray(whole))
    assert off.mean() < 0.5 and off.max() <= 6


def test_sizes_that_differ_need_a_size(tmp_path: Path) -> None:
    save(tmp_path / "sizes" / "a.png", noise(0, 10, 20))
    save(tmp_path / "sizes" / "b.png", noise(0, 30, 25))
    with pytest.raises(ValueError, match=r"size: the images are of 10 to 30 x 20 to 25 pixels"):
        quiet(tmp_path / "sizes")
    data = quiet(tmp_path / "sizes", size=16)
    assert data.notes == (
        "brought to 16 x 16 (crop): 2 images; all are of 10 to 30 x 20 to 25 pixels "
        "(height x width)",
        "enlarged to 16 x 16: 1 image",
    )


@pytest.fixture
def damaged(pictures: Path) -> Path:
    """Twelve images, six of them bad in six ways."""
    jpeg = save(pictures / "ant" / "truncated.jpg", noise(1, 64, 64, 3))
    jpeg.write_bytes(jpeg.read_bytes()[:1500])
    (pictures / "ant" / "zero.png").write_bytes(b"")
    (pictures / "cat" / "text.jpg").write_text("no image")
    flipped = bytearray((pictures / "cat" / "a.png").read_bytes())
    flipped[60] ^= 255
    (pictures / "cat" / "flipped.png").write_bytes(flipped)
    (pictures / "cat" / "nowhere.png").symlink_to("there-is-no-such-file.png")
    os.mkfifo(pictures / "cat" / "pipe.png")
    return pictures


def test_all_bad_images_are_found_at_once(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluvial.data.images.NAMED", 5)
    with pytest.raises(ValueError) as caught:
        quiet(damaged, size=(5, 7))
    message = str(caught.value)
    assert message.startswith("6 of 12 images cannot be read: ant/truncated.jpg (")
    assert "ant/zero.png (empty)" in message
    assert "cat/nowhere.png (No such file or directory)" in message
    assert "cat/pipe.png (not a regular file)" in message
    assert "and 1 more" in message and "skip_bad=True" in message and "\n" not in message


def test_skip_bad(damaged: Path) -> None:
    data = quiet(damaged, size=(5, 7), skip_bad=True)
    assert data.label.tolist() == [0, 0, 1, 1, 1, 1]
    assert any(note.startswith("left out: 6 of 12 images cannot be read") for note in data.notes)
    for path in damaged.rglob("*.png"):
        if path.name in ("zero.png", "flipped.png", "nowhere.png", "pipe.png"):
            path.unlink()
    (damaged / "cat" / "text.jpg").unlink()
    (damaged / "ant" / "truncated.jpg").unlink()
    assert torch.equal(quiet(damaged).x, data.x)


def test_a_class_of_bad_images_alone_is_no_class(pictures: Path) -> None:
    (pictures / "bee").mkdir()
    (pictures / "bee" / "a.png").write_bytes(b"")
    assert quiet(pictures, skip_bad=True).label_names == ("ant", "cat")


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n broken"])
@pytest.mark.parametrize("cache", [None, "default"])
def test_nothing_but_bad_images(tmp_path: Path, content: bytes, cache: str | None) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(content)
    with pytest.raises(ValueError, match="1 of 1 images cannot be read: a.png"):
        quiet(tmp_path / "bad", skip_bad=True, cache=cache)


def test_truncated_everywhere(tmp_path: Path) -> None:
    """Any start of a file is read as the whole, or named; nothing else comes out."""
    for suffix in ("png", "jpg", "webp", "gif", "tif", "bmp"):
        path = save(tmp_path / suffix / f"a.{suffix}", noise(2, 16, 16, 3))
        content = path.read_bytes()
        for count in range(1, len(content), max(1, len(content) // 12)):
            path.with_stem(f"{count:06d}").write_bytes(content[:count])
        data = quiet(tmp_path / suffix, skip_bad=True)
        assert 1 <= len(data) <= 3  # what is cut off may be no more than an end mark
        assert all(torch.equal(row, data.x[-1]) for row in data.x)


def test_numbers_whose_white_is_not_known(tmp_path: Path) -> None:
    image = Image.fromarray(np.linspace(-3, 700, 12, dtype=np.float32).reshape(3, 4))
    save(tmp_path / "float" / "a.tif", image)
    with pytest.raises(ValueError, match=r"a.tif \(holds numbers from -3 to 700"):
        quiet(tmp_path / "float")


def test_pillows_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "large" / "a.png", noise(0, 30, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 800)
    assert len(quiet(tmp_path / "large")) == 1  # a warning of Pillow, up to twice its limit
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    save(tmp_path / "large" / "b.png", noise(0, 30, 30))
    with pytest.raises(ValueError, match=r"more than 800 pixels.*PIL.Image.MAX_IMAGE_PIXELS"):
        quiet(tmp_path / "large")


def test_permission(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not path.endswith("b.png"))
    with pytest.raises(ValueError, match=r"1 of 6 .*cat/b.png \(no permission to read it\)"):
        quiet(pictures)
    monkeypatch.undo()
    assert len(quiet(pictures)) == 6  # found readable now, though its time is the same


def test_folder_that_cannot_be_listed(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refused(path: Path) -> Any:
        if str(path).endswith("cat"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ValueError, match="cat cannot be listed: Permission denied"):
        quiet(pictures)


def test_links(pictures: Path) -> None:
    (pictures / "cat" / "loop").symlink_to(pictures)
    (pictures / "ant" / "self.png").symlink_to("self.png")
    (pictures / "bee").symlink_to("ant")
    data = quiet(pictures, skip_bad=True)
    assert data.label_names == ("ant", "bee", "cat")
    assert data.label.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert sum("not followed" in note for note in data.notes) == 1
    assert any("2 of 10 images cannot be read: ant/self.png (Too many" in n for n in data.notes)


def test_odd_names(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "odd names")
    names = [b"caf\xe9", "cafe\u0301".encode(), "猫 'x' \n;*".encode(), b"a b"]
    for k, name in enumerate(names):
        place = Path(os.fsdecode(folder + b"/" + name))
        save(place / f"{k} %d {{}}.png", noise(k, 4, 4))
    data = quiet(tmp_path / "odd names")
    assert data.label_names == ("a b", "caf\\xe9", "café", "猫 'x' \n;*")
    assert [int(data.x[k, 0, 0, 0]) for k in data.label.argsort()] == [
        int(noise(k, 4, 4)[0, 0]) for k in (3, 0, 1, 2)
    ]
    assert all(name.encode() for name in data.label_names)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_second_read_decodes_nothing(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quiet(pictures)
    assert len(entries(cache)) == 1
    monkeypatch.setattr("fluvial.data.images.header", lambda source: 1 / 0)
    second = quiet(pictures)
    assert torch.equal(first.x, second.x) and torch.equal(first.label, second.label)
    assert first.notes == second.notes
    monkeypatch.undo()
    monkeypatch.setenv("FLUVIAL_CACHE", str(cache))
    # what matters makes a new entry
    for options in ({"size": 8}, {"channels": 1}, {"size": 8, "resize": "pad"}):
        count = len(entries(cache))
        quiet(pictures, **options)
        assert len(entries(cache)) == count + 1
    save(pictures / "cat" / "b.png", noise(77, 5, 7, 3))
    assert not torch.equal(quiet(pictures).x, first.x)


def test_copies_of_the_same_names_sizes_and_times_are_told_apart(tmp_path: Path) -> None:
    for k in range(2):
        path = save(tmp_path / str(k) / "a.bmp", noise(k, 4, 4))
        os.utime(path, (1e9, 1e9))
    assert not torch.equal(quiet(tmp_path / "0").x, quiet(tmp_path / "1").x)


def test_the_images_are_a_mapped_file(pictures: Path, cache: Path) -> None:
    data = quiet(pictures)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no list of mappings on this system")
    address = data.x.data_ptr()
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in maps.read_text().splitlines()
        if str(cache) in line
    ]
    assert any(low <= address < high for low, high in ranges)
    # writing to it is allowed, and does not reach the file
    before = data.x.clone()
    data.x.zero_()
    assert torch.equal(quiet(pictures).x, before)
    assert entries(cache) and quiet(pictures, cache=None).x.equal(before)


def test_interrupted_read_leaves_nothing(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluvial.data import images

    decode, calls = images.decode, []

    def interrupted(*arguments: Any) -> np.ndarray:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(images, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quiet(pictures)
    assert entries(cache) == []
    monkeypatch.setattr(images, "decode", decode)
    assert len(quiet(pictures)) == 6


def test_what_a_killed_process_left_is_replaced(pictures: Path, cache: Path) -> None:
    x = quiet(pictures).x.clone()
    (entry,) = entries(cache)
    (cache / entry / "x.npy").write_bytes(b"half")  # damaged
    (cache / f".{entry}.part").mkdir()  # and another one begun
    (cache / f".{entry}.part" / "x.npy").write_bytes(b"half")
    assert torch.equal(quiet(pictures).x, x)
    assert entries(cache) == [entry]


def read_slowly(folder: Path, results: Any) -> None:
    from fluvial.data import images

    decode, decoded = images.decode, []

    def slow(*arguments: Any) -> np.ndarray:
        time.sleep(0.05)
        decoded.append(1)
        return decode(*arguments)

    images.decode = slow
    x = quiet(folder).x
    results.put((len(decoded), int(x.sum())))


def test_two_processes_at_once(pictures: Path, cache: Path) -> None:
    context = multiprocessing.get_context("fork")  # without importing all again
    results = context.Queue()
    both = [context.Process(target=read_slowly, args=(pictures, results)) for _ in range(2)]
    for process in both:
        process.start()
    counts, sums = zip(*(results.get(timeout=60) for _ in both), strict=True)
    for process in both:
        process.join()
    assert sorted(counts) == [0, 6]  # one decodes, the other waits for it
    assert sums == (int(quiet(pictures).x.sum()),) * 2
    assert len(entries(cache)) == 1


def test_cache_that_cannot_be_written(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match=r"cache: the folder .*file cannot be written to.*FLUVIAL_CA"):
        quiet(pictures, cache=tmp_path / "file")


def test_full_disk(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 99))
    with pytest.raises(OSError, match=r"cache: 0.0 GB are needed .* free; name another folder"):
        quiet(pictures)
    assert entries(cache) == []


def test_progress_goes_to_stderr(pictures: Path, capsys: pytest.CaptureFixture) -> None:
    read(pictures)
    shown = capsys.readouterr()
    assert shown.out == "" and "decoding" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be"),
        ({"size": (3,)}, "size must be"),
        ({"size": 2.5}, "size must be"),
        ({"channels": 2}, "channels must be 1"),
        ({"resize": "fit"}, "resize must be crop, pad or stretch"),
        ({"label": "cat"}, "label: the classes of images are their folders"),
    ],
)
def test_bad_arguments(pictures: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet(pictures, **options)
