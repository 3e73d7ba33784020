"""A small dataset in every published form, and a web server that can misbehave."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

from steelman.data.formats import PARTS, Arrays, digest
from steelman.data.published import IDX, Fetchable, Web


def tiny_arrays(channels: int = 1, side: int = 40, train: int = 40, test: int = 6, classes: int = 10) -> Arrays:
    rng = np.random.default_rng(0)

    def part(n: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, 256, (n, channels, side, side), np.uint8), rng.integers(0, classes, n, np.uint8)

    return dict(zip(PARTS, (*part(train), *part(test))))


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def idx_files(arrays: Arrays) -> dict[str, bytes]:
    """The four files of `IDX`, compressed, by their names on the server."""
    parts = (arrays[name][:, 0] if "images" in name else arrays[name] for name in PARTS)
    return {f"{name}.gz": gzip.compress(idx_bytes(part), mtime=0) for name, part in zip(IDX.files, parts)}


def cifar_bytes(images: np.ndarray, *labels: np.ndarray) -> bytes:
    columns = [*(values[:, None] for values in labels), images.reshape(len(images), -1)]
    return np.concatenate(columns, axis=1).astype(np.uint8).tobytes()


def cifar10_files(arrays: Arrays) -> dict[str, bytes]:
    images, labels = np.split(arrays["train_images"], 5), np.split(arrays["train_labels"], 5)
    files = {f"data_batch_{i + 1}.bin": cifar_bytes(images[i], labels[i]) for i in range(5)}
    return files | {"test_batch.bin": cifar_bytes(arrays["test_images"], arrays["test_labels"])}


def sprite_files(arrays: Arrays) -> dict[str, bytes]:
    def png(images: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(images.transpose(0, 2, 3, 1).reshape(len(images), 1024, 3)).save(buffer, "PNG")
        return buffer.getvalue()

    parts = np.split(arrays["train_images"], 5)
    files = {f"data_batch_{i + 1}.png": png(parts[i]) for i in range(5)}
    files["test_batch.png"] = png(arrays["test_images"])
    return files | {
        f"{part}_lables.json": json.dumps(arrays[f"{part}_labels"].tolist()).encode() for part in ("train", "test")
    }


def tar_bytes(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def record(arrays: Arrays, **ways: object) -> Fetchable:
    """A dataset to fetch that is these arrays."""
    return Fetchable(
        name="tiny",
        what="noise images",
        classes=tuple("0123456789"),
        shapes=(arrays["train_images"].shape, arrays["test_images"].shape),
        ways=ways,  # type: ignore[arg-type]
        digests={name: digest(arrays[name]) for name in PARTS},
    )


def web(base: str, files: dict[str, bytes]) -> Web:
    return Web(tuple((f"{base}/{name}", md5(content)) for name, content in files.items()), IDX, timeout=(2.0, 5.0))


@dataclass
class Server:
    """What the server holds, how it misbehaves, and the requests it has seen: (path, Range header)."""

    base: str
    files: dict[str, bytes]
    ranges: bool = True
    cut: dict[str, list[int]] = field(default_factory=dict)  # by path: bytes to send before breaking off, per request
    seen: list[tuple[str, str | None]] = field(default_factory=list)


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path[1:], self.headers.get("Range")
            server.seen.append((name, wanted))
            content = server.files.get(name)
            if content is None:
                return self.send_error(404)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_response(206 if wanted and server.ranges else 200)
            if wanted and server.ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            cuts = server.cut.get(name)
            end = start + cuts.pop(0) if cuts else len(content)
            self.wfile.write(content[start:end])
            return None

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_port}", dict(files))
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
