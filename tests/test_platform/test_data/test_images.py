"""Images as cameras, archives and libraries leave them, with the pixels that they have by hand."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import datasets
import numpy as np
import pytest
from PIL import Image

from narrowcast.platform.data.formats import HuggingFace, TorchDataset
from narrowcast.platform.data.image_sets import ImageFolder
from narrowcast.platform.data.own import alike, pixels
from narrowcast.platform.errors import UserError

RED, BLUE = (200, 30, 30), (30, 30, 200)
GREY = 90


def picture(left: Any = RED, right: Any = BLUE, mode: str = "RGB") -> Image.Image:
    """An image of 6x4 pixels with two halves."""
    image = Image.new(mode, (6, 4), left)
    image.paste(right, (3, 0, 6, 4))
    return image


def loaded(folder: Path, **fields: Any) -> Any:
    fields = {"clients": 1, "validation_share": 0, "test_share": 0} | fields
    return ImageFolder(path=folder, **fields).load()


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Three cats and three dogs."""
    folder = tmp_path / "zoo"
    for name, colour in (("cat", RED), ("dog", BLUE)):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            picture(colour, colour).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    "name",
    ["a.png", "a.PNG", "a.jpg", "a.JPEG", "a.jpe", "a.jfif", "a.webp", "a.bmp", "a.gif", "a.tif", "a.TIFF", "a.ppm"],
)
def test_formats_are_read(zoo: Path, name: str) -> None:
    options: dict[str, Any] = {"a.webp": {"lossless": True}, "a.jpe": {"format": "JPEG"}, "a.jfif": {"format": "JPEG"}}
    picture().save(zoo / "cat" / name, **{"quality": 100, "subsampling": 0} | options.get(name, {}))
    data = loaded(zoo)
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    got = data.train.features[3].astype(int)  # "a" comes after the digits
    expected = np.array([RED] * 3 + [BLUE] * 3).T[:, np.newaxis]
    assert np.abs(got - expected).max() <= (4 if "j" in name.lower() else 0)


def test_a_suffix_does_not_decide_the_format(zoo: Path) -> None:
    picture().save(zoo / "cat" / "a.jpg", format="PNG")
    assert loaded(zoo).train.features[3, :, 0, 0].tolist() == list(RED)


TURNED: dict[int, Callable[[Any], Any]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: np.rot90,
}
"""The image as it is to be seen, from that stored, by the orientation in its EXIF data."""


@pytest.mark.parametrize("orientation", TURNED)
def test_photographs_are_upright(tmp_path: Path, orientation: int) -> None:
    stored = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    assert (pixels(Image.open(tmp_path / "a.png"))[0] == TURNED[orientation](stored)).all()


MODES: dict[str, tuple[Image.Image, list[list[int]]]] = {
    "L": (picture(10, 250, "L"), [[10], [250]]),
    "1": (picture(0, 1, "1"), [[0], [255]]),
    "RGB": (picture(), [list(RED), list(BLUE)]),
    "RGBA": (picture((*RED, 255), (*BLUE, 0), "RGBA"), [list(RED), list(BLUE)]),
    "LA": (picture((10, 255), (250, 0), "LA"), [[10] * 3, [250] * 3]),
    "P": (picture().convert("P", palette=Image.Palette.ADAPTIVE), [list(RED), list(BLUE)]),
    "CMYK": (picture((0, 255, 255, 0), (255, 255, 0, 0), "CMYK"), [[255, 0, 0], [0, 0, 255]]),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_resolved(mode: str) -> None:
    image, expected = MODES[mode]
    got = pixels(image)
    assert got.dtype == np.uint8
    assert [got[:, 0, 0].tolist(), got[:, 0, 5].tolist()] == expected


def test_a_transparent_palette_keeps_its_colours_without_a_warning(tmp_path: Path) -> None:
    image = picture().convert("P", palette=Image.Palette.ADAPTIVE)
    image.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    assert pixels(Image.open(tmp_path / "a.png"))[:, 0, 0].tolist() == list(RED)


RAMP = np.linspace(0, 65535, 24).astype(np.uint16).reshape(4, 6)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bits_are_refused_or_shifted_but_never_clipped(zoo: Path, name: str) -> None:
    shutil.rmtree(zoo / "dog")
    (zoo / "dog").mkdir()
    Image.fromarray(RAMP).save(zoo / "dog" / name, **({"format": "PPM"} if name == "a.pgm" else {}))
    with pytest.raises(UserError, match=rf"dog/{name}: has more than 8 bits a channel; .*data.sixteen_bits=high_byte"):
        loaded(zoo, channels=1)
    got = loaded(zoo, channels=1, sixteen_bits="high_byte").train.features[-1, 0]
    assert (got == RAMP >> 8).all() and got.max() == 255 and (got == 255).mean() < 0.05


@pytest.mark.parametrize("values", [np.zeros((4, 6), np.float32), np.full((4, 6), 2**20, np.int32)])
def test_other_depths_are_refused(zoo: Path, values: Any) -> None:
    Image.fromarray(values).save(zoo / "cat" / "deep.tif")
    with pytest.raises(UserError, match=r"cat/deep.tif: has more than 8 bits a channel .mode [IF]"):
        loaded(zoo, sixteen_bits="high_byte")


LEFT_BY_SYSTEMS = (
    *("__MACOSX/cat/._0.png", ".DS_Store", "cat/._0.png", "cat/.DS_Store", "cat/Thumbs.db", "cat/desktop.ini"),
    *("@eaDir/x.png", "cat/@eaDir/0.png", ".ipynb_checkpoints/a.png", "cat/.ipynb_checkpoints/0.png", ".git/config"),
    *("$RECYCLE.BIN/a.png", "System Volume Information/a.png", "lost+found/a.png", "#recycle/a.png", ".Trash-0/a.png"),
)


@pytest.mark.parametrize("name", LEFT_BY_SYSTEMS)
def test_what_systems_leave_is_not_read(zoo: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = loaded(zoo).digest
    path = zoo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((zoo / "cat" / "0.png").read_bytes() if name.endswith("x.png") else b"\x00\x05\x16\x07junk")
    with caplog.at_level(logging.WARNING):
        assert loaded(zoo).digest == expected
    assert "left out: 1 files and folders of operating systems" in caplog.text


def test_what_is_left_out_is_counted(zoo: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = loaded(zoo).digest
    (zoo / "cat" / "photo.heic").write_bytes(b"heic")
    (zoo / "dog" / "photo.HEIC").write_bytes(b"heic")
    (zoo / "dog" / "notes.xml").write_text("<a/>")
    picture().save(zoo / "cover.png")
    assert loaded(zoo).digest == expected
    assert "left out: 2 .heic, 1 .xml, 1 images in no folder of a class" in caplog.text


def test_several_frames_are_said(zoo: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture().save(zoo / "cat" / "a.gif", save_all=True, append_images=[picture(BLUE, RED)])
    assert loaded(zoo).train.features[3, :, 0, 0].tolist() == list(RED)
    assert "1 images, such as a.gif, have several frames; the first is read" in caplog.text


def test_images_below_the_folder_of_a_class_are_of_the_class(zoo: Path) -> None:
    (zoo / "cat" / "2024" / "may").mkdir(parents=True)
    (zoo / "cat" / "0.png").rename(zoo / "cat" / "2024" / "may" / "0.png")
    (zoo / "dog" / "loop").symlink_to(zoo / "dog", target_is_directory=True)
    (zoo / "dog" / "3.png").symlink_to(zoo / "dog" / "0.png")
    assert loaded(zoo).train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (["train", "test"], [6, 0, 6]),
        (["train", "val"], [6, 6, 0]),
        (["train", "valid", "test"], [6, 6, 6]),
        (["Train", "Validation", "Test"], [6, 6, 6]),
        (["training", "dev", "testing"], [6, 6, 6]),
    ],
)
def test_parts_go_by_usual_names(zoo: Path, tmp_path: Path, names: list[str], sizes: list[int]) -> None:
    for name in names:
        shutil.copytree(zoo, tmp_path / "whole" / name)
    data = loaded(tmp_path / "whole")
    assert [len(data.train), len(data.validation), len(data.test)] == sizes


def test_classes_may_have_the_names_of_parts(zoo: Path) -> None:
    (zoo / "cat").rename(zoo / "valid")
    (zoo / "dog").rename(zoo / "invalid")
    data = loaded(zoo)
    assert data.n_classes == 2
    assert data.train.features[0, :, 0, 0].tolist() == list(BLUE)  # "invalid" comes first


def _two_validations(zoo: Path) -> None:
    for name in ("train", "val", "valid"):
        (zoo / name / "cat").mkdir(parents=True)


def _parts_of_kaggle(zoo: Path) -> None:
    for name in ("seg_train", "seg_test"):
        shutil.copytree(zoo, zoo.parent / "new" / name)
    shutil.rmtree(zoo)
    (zoo.parent / "new").rename(zoo)


def _parts_without_train(zoo: Path) -> None:
    (zoo / "cat").rename(zoo / "val")
    (zoo / "dog").rename(zoo / "test")


def _loose_tests(zoo: Path) -> None:
    for name in ("train/cat", "train/dog", "test"):
        (zoo / name).mkdir(parents=True)
        picture().save(zoo / name / "0.png")


def _two_forms(zoo: Path) -> None:
    for form in ("NFC", "NFD"):
        (zoo / normalize(form, "bär")).mkdir()
        picture().save(zoo / normalize(form, "bär") / "0.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda zoo: shutil.rmtree(zoo / "dog"),
            "all samples are of one class, cat; .*if cat holds them, give .*zoo/cat",
        ),
        (lambda zoo: (zoo / "fox").mkdir(), "zoo/fox: has no images; fill the folder or remove it"),
        (lambda zoo: [each.rename(each.with_suffix(".heic")) for each in zoo.glob("*/*")], "it has only 6 .heic"),
        (_two_validations, "val and valid are both validation samples; rename or remove one"),
        (_parts_of_kaggle, "seg_test and seg_train hold 2 folders of the same names"),
        (_parts_without_train, "has val and test, but no train/CLASS"),
        (_loose_tests, "zoo/test: its 1 images are in no folder of a class"),
        (_two_forms, "has two folders bär, which differ in their Unicode form"),
        (lambda zoo: (zoo / "cat" / "a.png").symlink_to("nowhere.png"), "cat/a.png: No such file or directory"),
        (lambda zoo: (zoo / "cat" / "a.webp").write_bytes(b"<html>"), "cat/a.webp: is not a readable image"),
        (lambda zoo: os.truncate(zoo / "cat" / "1.png", 50), "cat/1.png: .*replace the file"),
    ],
)
def test_other_folders_are_one_line(zoo: Path, change: Callable[[Path], Any], message: str) -> None:
    change(zoo)
    with pytest.raises(UserError, match=message) as caught:
        loaded(zoo)
    assert "\n" not in str(caught.value)


def test_an_archive_and_too_many_pixels_are_one_line(zoo: Path) -> None:
    archive = shutil.make_archive(str(zoo), "zip", zoo)
    with pytest.raises(UserError, match=r"zoo.zip is a file; unpack an archive"):
        loaded(Path(archive))
    Image.new("1", (8000, 8000)).save(zoo / "cat" / "0.png")
    for number in range(2000):
        (zoo / "cat" / f"link{number}.png").symlink_to(zoo / "cat" / "0.png")
    with pytest.raises(UserError, match=r"2006 images of 64000000 pixels need 385 GB, .* data.size=64"):
        loaded(zoo)


def test_every_way_reads_the_same_pixels(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grey, palette, transparent and turned images beside coloured ones: folder, Hugging Face, torch."""
    exif = Image.Exif()
    exif[0x0112] = 3
    picture(GREY, GREY, "L").save(zoo / "cat" / "0.png")
    picture().convert("P", palette=Image.Palette.ADAPTIVE).save(zoo / "cat" / "1.png")
    picture((*RED, 9), (*BLUE, 9), "RGBA").save(zoo / "dog" / "0.png", exif=exif)
    files = sorted(zoo.glob("*/*.png"))
    expected = loaded(zoo).train.features
    assert expected[0, :, 0, 0].tolist() == [GREY] * 3
    assert expected[3, :, 0, 0].tolist() == list(BLUE)  # turned by half

    datasets.disable_progress_bars()
    table = {"img": list(map(str, files)), "label": [0, 0, 0, 1, 1, 1]}
    datasets.Dataset.from_dict(table).cast_column("img", datasets.Image()).save_to_disk(tmp_path / "hub")
    shares = {"validation_share": 0, "test_share": 0, "clients": 1}
    hub = HuggingFace(path=tmp_path / "hub", features="img", **shares).load()
    assert (hub.train.features == expected).all()

    (tmp_path / "my_pictures.py").write_text(
        "from pathlib import Path\nfrom PIL import Image\n"
        "def make(folder):\n"
        "    return [(Image.open(f), f.parent.name) for f in sorted(Path(folder).glob('*/*.png'))]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = TorchDataset(factory="my_pictures:make", arguments={"folder": str(zoo)}, **shares).load()
    assert (own.train.features == expected).all()


def test_grey_and_coloured_parts_become_alike() -> None:
    grey, coloured = np.full((2, 1, 4, 6), GREY, np.uint8), np.zeros((5, 3, 4, 6), np.uint8)
    first, second = alike([grey, coloured])
    assert first.shape == (2, 3, 4, 6) and (first == GREY).all() and second is coloured
