from pathlib import Path

import pytest
from PIL import Image

from labelled_sets import check_dealt
from narrowcast.platform.data.image_sets import ImageFolder
from narrowcast.platform.errors import UserError


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Red cats and green dogs of 6x4 pixels, PNG and JPEG, some of them with other modes."""
    folder = tmp_path / "pictures"
    for part, n in (("train", 3), ("test", 1)):
        for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 255, 0))):
            (folder / part / name).mkdir(parents=True)
            for index in range(n):
                Image.new("RGB", (6, 4), colour).save(folder / part / name / f"{index}.png")
    Image.new("RGBA", (6, 4), (255, 0, 0, 255)).save(folder / "train" / "cat" / "3.PNG")
    Image.new("L", (6, 4), 128).save(folder / "train" / "dog" / "4.jpg")
    (folder / "train" / "dog" / "notes.txt").write_text("not an image")
    return folder


def test_image_folders(pictures: Path) -> None:
    data = ImageFolder(path=pictures, clients=2, validation_share=0).load()
    check_dealt(data)
    assert (data.name, data.source, data.n_classes) == ("pictures", str(pictures), 2)
    assert data.train.features.shape == (8, 3, 4, 6)
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert data.train.features[3, :, 0, 0].tolist() == [255, 0, 0]
    assert data.train.features[7, :, 0, 0].tolist() == [128, 128, 128]
    assert data.test.features[1, :, 0, 0].tolist() == [0, 255, 0]
    grey = ImageFolder(path=pictures, clients=2, channels=1).load()
    assert grey.train.features.shape[1:] == (1, 4, 6)


def test_an_image_folder_may_lack_a_test_set(pictures: Path) -> None:
    (pictures / "test").rename(pictures / "elsewhere")
    data = ImageFolder(path=pictures, clients=2).load()
    assert data.test.features.shape == (0, 3, 4, 6)


def test_images_that_do_not_fit_are_user_errors(pictures: Path) -> None:
    path = pictures / "train" / "dog" / "9.png"
    good = (pictures / "train" / "dog" / "0.png").read_bytes()
    Image.new("RGB", (5, 4)).save(path)
    odd = path.read_bytes()
    Image.new("I;16", (6, 4)).save(path)
    deep = path.read_bytes()
    for content, message in (
        (odd, "is 5x4, the first image is 6x4; resize all images to one size"),
        (deep, "has more than 8 bits a channel; convert it to 8 bits"),
        (b"GIF89a", "replace the file"),
        (b"", "is not a readable image"),
        (good[:50], "replace the file"),
        (good[:45] + b"#" * 20, "replace the file"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path}: .*{message}") as caught:
            ImageFolder(path=pictures).load()
        assert "\n" not in str(caught.value)
    path.unlink()
    (pictures / "test" / "cow").mkdir()
    with pytest.raises(UserError, match="cow: train has no class of this name; rename or remove the folder"):
        ImageFolder(path=pictures).load()
    with pytest.raises(UserError, match=r"has neither train/CLASS/\*.png .* nor CLASS/\*.png; it has 4 images"):
        ImageFolder(path=pictures / "train" / "dog").load()
    with pytest.raises(UserError, match=r"data.path = no/where does not exist"):
        ImageFolder(path=Path("no/where")).load()


def test_folders_of_classes_alone_are_split(pictures: Path) -> None:
    (pictures / "train" / ".thumbnails").mkdir()
    fields = {"path": pictures / "train", "clients": 2, "validation_share": 0, "test_share": 0.25}
    data = ImageFolder(**fields).load()
    check_dealt(data)
    assert (data.n_classes, len(data.train), len(data.test)) == (2, 6, 2)
    assert ImageFolder(seed=5, **fields).load().test.features.tolist() == data.test.features.tolist()


def test_images_are_scaled_to_one_size_on_request(pictures: Path) -> None:
    Image.new("RGB", (50, 30), (0, 255, 0)).save(pictures / "train" / "dog" / "9.png")
    data = ImageFolder(path=pictures, clients=2, validation_share=0, size=8).load()
    check_dealt(data)
    assert data.train.features.shape == (9, 3, 8, 8)
    assert data.train.features[8, 1].min() == 255
    with pytest.raises(UserError, match=r"resize all images to one size, such as 4x4 with data.size=4"):
        ImageFolder(path=pictures).load()
