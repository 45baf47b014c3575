"""engine quantize, engine build: artifacts for TensorRT-LLM, made in its own environment and kept in a store."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.api.errors import invalid

if TYPE_CHECKING:
    from gateway.api.trtllm.features import Features
    from gateway.artifacts.making import Progress
    from gateway.artifacts.store import ArtifactStore

PythonOption = Annotated[
    str,
    typer.Option(
        "--python", envvar="MODELYARD_TRTLLM_PYTHON", help="Interpreter that has TensorRT-LLM, as in engines.trtllm.python."
    ),
]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Where artifacts are kept; a mount that all nodes see. Default: the site's cache.")
]
PROBE = Path(__file__).parents[2] / "workers" / "engines" / "trtllm" / "boot.py"


def quantize(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="file:DIRECTORY of the original checkpoint.")],
    calibration: Annotated[Path, typer.Option("--calibration", help="Prompts: at least 1,000, .jsonl or a line each.")],
    python: PythonOption,
    precision: Annotated[str, typer.Option("--format", help="FP8, W4A16_AWQ, W4A8_AWQ or NVFP4.")] = "FP8",
    kv: Annotated[str, typer.Option("--kv", help="FP8: calibrate keys and values too. Empty: leave them.")] = "",
    store: StoreOption = None,
) -> None:
    """Quantize a checkpoint with ModelOpt; prints the source to give a model. Check it with `yard engine check` then."""
    from gateway.artifacts.calibration import read_calibration
    from gateway.artifacts.making import quantize as make
    from gateway.site.home import Home

    chosen = read_calibration(calibration)
    cache = Home.from_environment().cache_dir
    typer.echo(
        f"Calibrating on {len(chosen.prompts)} prompts, {chosen.duplicates} duplicates, "
        f"lengths spread over {chosen.spread:.1f} ×",
        err=True,
    )
    with _shown() as progress:
        progress(0.0, "asking TensorRT-LLM what it can do")
        path, made = make(_store(store), python, _features(python), source, cache, chosen, precision, kv, progress)
    _print(path, made)


def build(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Directory that convert_checkpoint.py wrote.")],
    python: PythonOption,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1)] = 1,
    pipeline_parallel: Annotated[int, typer.Option("--pipeline-parallel", min=1)] = 1,
    max_batch_size: Annotated[int, typer.Option("--max-batch-size", min=1)] = 64,
    max_num_tokens: Annotated[int, typer.Option("--max-num-tokens", min=1)] = 8192,
    max_seq_len: Annotated[int, typer.Option("--max-seq-len", min=1)] = 8192,
    precision: Annotated[str, typer.Option("--precision", help="What the checkpoint is in, for the manifest.")] = "auto",
    store: StoreOption = None,
) -> None:
    """Build engines of TensorRT-LLM 1.2, one a rank, side by side. Later versions serve checkpoints as they are."""
    from gateway.api.checkpoint.digest import content_digest
    from gateway.artifacts.making import build as make
    from gateway.site.home import Home

    files = tuple(sorted(file for file in checkpoint.glob("*") if file.suffix in (".json", ".safetensors")))
    if not (checkpoint / "config.json").is_file():
        raise invalid(f"{checkpoint}: it has no config.json; give the directory that convert_checkpoint.py wrote")
    digest = content_digest(files, Home.from_environment().cache_dir)
    limits = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
    degrees = (tensor_parallel, pipeline_parallel)
    with _shown() as progress:
        progress(0.0, "asking TensorRT-LLM what it can do")
        path, made = make(
            _store(store), python, _features(python), str(checkpoint), digest, checkpoint, precision, degrees, limits, progress
        )
    _print(path, made)


def _features(python: str) -> Features:
    """YardError when its interpreter cannot import it."""
    import msgspec

    from gateway.api.trtllm.features import Features

    done = subprocess.run([python, str(PROBE), "probe"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise invalid(f"{python} cannot import tensorrt_llm: {last}; see ops/trtllm.md")
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Features)


def _store(directory: Path | None) -> ArtifactStore:
    from gateway.artifacts.store import ArtifactStore
    from gateway.site.home import Home

    return ArtifactStore(directory or Home.from_environment().cache_dir / "artifacts")


def _print(path: Path, made: bool) -> None:
    typer.echo("Made now:" if made else "Made before, of the same inputs:", err=True)
    typer.echo(f"file:{path}")


@contextmanager
def _shown() -> Iterator[Progress]:
    """A bar on standard error; standard output stays for the result."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda fraction, what: bar.update(task, completed=fraction, description=what)
