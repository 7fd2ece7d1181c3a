"""Data sets of Hugging Face that point outside themselves: nothing is fetched, and no other file is read."""

from __future__ import annotations

import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from narrowcast.platform.data.formats import HuggingFace
from narrowcast.platform.errors import UserError

FIELDS: dict[str, Any] = {"features": "x", "clients": 1, "validation_share": 0, "test_share": 0}
GREY = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))


class _Counting(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(png(GREY))

    do_HEAD = do_GET  # noqa: N815 - the name that the library wants

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (_Counting,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def saved(folder: Path, stored: Sequence[Any], feature: Any, label: Any = None) -> Path:
    """Write a set whose column x is stored as given, as a program that is not `datasets` could."""
    datasets.disable_progress_bars()
    path, labels = folder / "made", stored if label else [row % 2 for row in range(len(stored))]
    datasets.Dataset.from_dict({"x": [0], "label": [0]}).save_to_disk(path)
    features = datasets.Features({"x": feature, "label": label or datasets.Value("int64")})
    info = json.loads((path / "dataset_info.json").read_text())
    (path / "dataset_info.json").write_text(json.dumps({**info, "features": features.to_dict()}))
    table = pa.table({"x": pa.array(stored), "label": pa.array(labels)}).cast(features.arrow_schema)
    (file,) = path.glob("*.arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def load(path: Path, **fields: Any) -> Any:
    return HuggingFace(path=path, **FIELDS | fields).load()


def refusal(path: Path, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(path, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_addresses_and_paths_in_place_of_images_are_not_followed(
    tmp_path: Path, listener: tuple[str, list[str]]
) -> None:
    address, asked = listener
    outside = tmp_path / "outside.png"
    outside.write_bytes(png(GREY))
    for place in (f"{address}/x.png", str(outside), f"hf://datasets/a/b::{address}/x.png", f"zip://x::{address}/a.zip"):
        path = saved(tmp_path, [{"bytes": None, "path": place}] * 4, datasets.Image())
        assert "image x of sample 0 is a path or an address without the image, and neither is followed" in refusal(path)
        assert "no numbers or images" in refusal(path, features="label", labels="x")
        kept, _ = datasets.load_from_disk(str(path)), asked.clear()
        if place.startswith("http"):
            assert kept[0]["x"].size == GREY.size
            assert asked, "an ordinary reader would have fetched it"
            asked.clear()
    assert asked == []


@pytest.mark.parametrize("kind", ["Audio", "Video", "Pdf", "Nifti"])
def test_other_features_that_name_files_are_refused(kind: str, tmp_path: Path, listener: tuple[str, list[str]]) -> None:
    address, asked = listener
    stored = [{"bytes": None, "path": f"{address}/x"}] * 4
    path = saved(tmp_path, stored, getattr(datasets, kind)(), getattr(datasets, kind)())
    assert f"column x holds {kind}, no numbers or images; convert it" in refusal(path)
    path = saved(tmp_path, [[each] for each in stored], datasets.List(getattr(datasets, kind)()))
    assert f"column x holds {kind}, no numbers or images; convert it" in refusal(path)
    assert asked == []


def test_images_are_decoded_as_the_library_decodes_them(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.fromarray(np.arange(36, dtype=np.uint8).reshape(3, 4, 3)).save(stream, "PNG", exif=exif)
    stored = [{"bytes": content, "path": None} for content in (png(GREY), stream.getvalue())]
    for mode in (None, "L", "RGB"):
        for one in stored:
            path = saved(tmp_path, [one] * 4, datasets.Image(mode=mode))
            expected = np.asarray(datasets.load_from_disk(str(path))[0]["x"])
            expected = expected[np.newaxis] if expected.ndim == 2 else np.moveaxis(expected, -1, 0)
            features = load(path).train.features
            assert np.array_equal(features, np.stack([expected] * len(features)))


@pytest.mark.slow
@pytest.mark.parametrize("side", [10_000, 20_000, 60_000])
def test_an_image_of_too_many_pixels_is_one_line(side: int, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    row = zlib.compressobj(9)
    content = b"".join(row.compress(bytes(1 + side)) for _ in range(min(side, 10_000))) + row.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", content) + chunk(b"IEND", b"")
    path = saved(tmp_path, [{"bytes": bomb, "path": None}] * 2, datasets.Image())
    assert refusal(path).endswith("image x of sample 0: has more pixels than 89,478,485; replace it")
    assert len(recwarn) == 0


def test_records_that_name_files_outside_the_folder_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, [1.0, 2.0, 3.0, 4.0], datasets.Value("float64"))
    (file,) = path.glob("*.arrow")
    file.rename(tmp_path / file.name)
    state = json.loads((path / "state.json").read_text())
    for name in (f"../{file.name}", str(tmp_path / file.name)):
        (path / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": name}]}))
        assert len(datasets.load_from_disk(str(path))) == 4
        assert "which is not in its folder" in refusal(path)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "dataset_dict.json").write_text(json.dumps({"splits": ["../made"]}))
    assert "names '../made', which is not in its folder" in refusal(whole)
