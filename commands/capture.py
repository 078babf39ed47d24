"""``kvtune capture``: run a model on a workload and keep its queries, keys, values and answers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune.commands.errors import kept
from kvtune.commands.options import (
    Context,
    Device,
    Dtype,
    JsonFlag,
    Layers,
    OutPath,
    Overwrite,
    Prompts,
    QuietFlag,
    Requests,
    Resume,
    RopeOption,
    Samples,
    Seed,
    Task,
    Turns,
    parse_indices,
    parse_layers,
)
from kvtune.commands.output import Output, bytes_text, cell, seconds_text
from kvtune.errors import InputError

if TYPE_CHECKING:
    from kvtune.capturing import CapturePlan


def capture(
    model: Annotated[str, typer.Argument(help="Packaged model, folder, hub id or .gguf file.")],
    task: Task = None,
    prompts: Prompts = None,
    context: Context = None,
    samples: Samples = None,
    requests: Requests = 1,
    turns: Turns = None,
    decode: Annotated[int, typer.Option("--decode", help="Answer tokens of each turn, at most.")] = 64,
    force: Annotated[bool, typer.Option("--force", help="Feed the reference answers as answers.")] = False,
    keep_answers: Annotated[
        bool,
        typer.Option("--keep-answers", help="Later turns follow the model's own answers."),
    ] = False,
    rope: RopeOption = None,
    layers: Layers = None,
    kv_heads: Annotated[
        str | None, typer.Option("--kv-heads", help="KV heads to keep, like 0,2 (default: all).")
    ] = None,
    no_values: Annotated[bool, typer.Option("--no-values", help="Keep no values (recall only).")] = False,
    o_proj: Annotated[bool, typer.Option("--o-proj", help="Keep the output projections.")] = False,
    prompt_queries: Annotated[
        str, typer.Option("--prompt-queries", help="Last prompt positions whose queries are kept, or 'all'.")
    ] = "1024",
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    out: OutPath = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Run a model on a workload and write what its attention saw: queries, keys, values, answers."""
    if task is not None and prompts is not None:
        raise InputError("--task and --prompts exclude each other")
    wanted = _prompt_queries(prompt_queries)
    folder = out or Path(f"{prompts.stem if prompts else task or 'niah_single'}.trace")
    output = Output(json=json, quiet=quiet)

    import kvtune
    from kvtune.models import open_model
    from kvtune.workloads import PromptFile, get_workload

    workload = PromptFile(prompts) if prompts else get_workload(task or "niah_single")
    opened = open_model(model, output.progress)
    geometry = opened.geometry("float32")
    with kept(lambda: _what_stays(folder)):
        document = kvtune.capture(
            opened,
            workload,
            folder,
            context=context,
            samples=samples,
            requests=requests,
            turns=turns,
            decode=decode,
            force=force,
            keep_answers=keep_answers,
            rope=rope,
            layers=parse_layers(layers, geometry.n_layers),
            kv_heads=parse_indices(kv_heads, geometry.n_kv_heads, "--kv-heads", "kv head"),
            values=not no_values,
            o_proj=o_proj,
            prompt_queries=wanted,
            device=device,
            dtype=dtype,
            seed=seed,
            resume=resume,
            overwrite=overwrite,
            progress=output.progress,
            announce=lambda plan: output.note(_plan(plan)),
        )
    output.result(document, lambda shown: _human(shown, document))
    output.closing(folder, f"kvtune analyze {shlex.quote(str(folder))}")


def _what_stays(folder: Path) -> str:
    if not folder.exists():
        return "nothing was written"
    return f"complete samples are kept in '{folder}': continue with --resume"


def _prompt_queries(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"--prompt-queries must be a whole number or 'all', not '{text}'")
    return int(text)


def _plan(plan: CapturePlan) -> str:
    return (
        f"{plan.samples} samples, {plan.requests} requests, {plan.tokens:,} tokens, up to "
        f"{plan.decode_steps:,} decode steps: about {bytes_text(plan.bytes)}"
    )


def _human(output: Output, document: dict[str, Any]) -> None:
    output.line(
        f"captured {document['samples']:,} samples, {document['requests']:,} requests, "
        f"{document['units']:,} units: "
        f"{document['tokens']:,} tokens, {document['decode_steps']:,} decode steps, "
        f"{bytes_text(document['bytes'])} in {seconds_text(document['seconds'])}"
    )
    for task, score in document["score"].items():
        if score is not None:
            output.line(f"score of {task}: {cell(score)}")
