"""``kvtune live``: decode the real model under a policy or profile, against full attention."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune.commands.live_output import show_run, show_sweep
from kvtune.commands.options import (
    Context,
    Device,
    Dtype,
    JsonFlag,
    OutPath,
    Overwrite,
    Prompts,
    QuietFlag,
    Requests,
    RopeOption,
    Samples,
    Seed,
    Settings,
    Task,
    Turns,
    parse_settings,
    parse_sweep,
    refuse_given,
)
from kvtune.commands.output import Output
from kvtune.errors import InputError

if TYPE_CHECKING:
    from kvtune.hardware import Hardware
    from kvtune.models import LoadedModel
    from kvtune.policies.plan import Plan
    from kvtune.runtime.step_prediction import StepPredictor
    from kvtune.workloads import Sample, Workload

DEFAULT_CACHE = 0.05


def live(
    model: Annotated[str, typer.Argument(help="Packaged model, folder, hub id or .gguf file.")],
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Profile to run (from 'kvtune tune').")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Policy to run (default: wave_index).")
    ] = None,
    set_: Settings = None,
    cache: Annotated[
        float | None,
        typer.Option("--cache-fraction", help="Block cache as a fraction of the context (default: 0.05)."),
    ] = None,
    task: Task = None,
    prompts: Prompts = None,
    context: Context = None,
    samples: Samples = None,
    requests: Requests = 1,
    turns: Turns = None,
    decode: Annotated[
        int, typer.Option("--decode", help="Answer tokens of each turn: forced at least, free at most.")
    ] = 32,
    free: Annotated[
        bool | None,
        typer.Option(
            "--free/--no-free", help="Run free too, for scores and drift (default: not in a sweep)."
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="What decodes: auto, or an engine by name, like torch.")
    ] = "auto",
    offload: Annotated[
        str, typer.Option("--offload", help="Where keys and values outside the cache live: none or cpu.")
    ] = "none",
    record: Annotated[
        Path | None, typer.Option("--record", help="Keep what the run saw as a trace in this folder.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="NAME=V1,V2",
            help="Run at each value of 'budget' (the policy's own), 'cache' (the fraction) or a parameter.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", min=1, help="Also decode so many of the prompts together (fused engine), for speed."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Also predict the step on a machine: h200, h100, ... or a file."),
    ] = None,
    rope: RopeOption = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    out: OutPath = None,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Decode for real under a policy with a block cache; report quality and hits beside the simulator's.

    Answers are forced to the same tokens with full attention and with the policy; then both run free.
    With several requests, a context's index is built once and each request goes on from there.
    """
    if profile is not None and (policy is not None or set_):
        raise InputError("--profile and --policy/--set exclude each other")
    if task is not None and prompts is not None:
        raise InputError("--task and --prompts exclude each other")
    if sweep is None:
        refuse_given({"out": out}, "--sweep")
    elif record is not None or batch is not None:
        raise InputError(f"--{'batch' if record is None else 'record'} and --sweep exclude each other")
    swept = None if sweep is None else parse_sweep(sweep)
    settings = parse_settings(set_)
    output = Output(json=json, quiet=quiet)

    from kvtune.capturing import CaptureOptions
    from kvtune.policies import get_policy
    from kvtune.policies.plan import Plan
    from kvtune.profiles.hardware_presets import load_hardware
    from kvtune.workloads import PromptFile, get_workload

    machine = None if hardware is None else load_hardware(hardware)
    plan = Plan(get_policy(policy or "wave_index", settings))
    workload = PromptFile(prompts) if prompts else get_workload(task or "niah_single")
    wanted = CaptureOptions(context=context, samples=samples, requests=requests, turns=turns, decode=decode)
    loaded, made = _load(model, workload, wanted, rope, device, dtype, seed, output)
    if profile is not None:
        longest = max(len(s.context_ids) + len(s.requests[0].turns[0].question_ids) for s in made)
        plan, own_cache = _profile_plan(profile, loaded, longest, output)
        cache = own_cache if cache is None else cache
    run = _Run(loaded, made, workload, plan, DEFAULT_CACHE if cache is None else cache, machine, output)
    options = {"decode": decode, "seed": seed, "engine": engine, "offload": offload}
    if swept is not None:
        folder = out or Path(f"{plan.policy.name}.sweep")
        run.sweep(*swept, folder, overwrite, {**options, "free": bool(free)})
    else:
        run.live(record, overwrite, {**options, "free": free is not False, "batch": batch})


@dataclass
class _Run:
    """What is run, however often."""

    loaded: LoadedModel
    samples: list[Sample]
    workload: Workload
    plan: Plan
    cache: float
    machine: Hardware | None
    output: Output

    def live(self, record: Path | None, overwrite: bool, options: dict[str, Any]) -> None:
        """One run, recorded where asked."""
        import kvtune
        from kvtune.runtime.live_trace import LiveTrace

        trace = None
        if record is not None:
            trace = LiveTrace(
                record,
                self.loaded,
                self.samples,
                self.plan,
                cache_fraction=self.cache,
                decode=options["decode"],
                workload=self.workload.name,
                seed=options["seed"],
                overwrite=overwrite,
            )
        document = kvtune.live(
            self.loaded, self.samples, self.plan, **self._shared(), record=trace, **options
        )
        self._finish(document, show_run)
        if record is not None:
            self.output.closing(record, f"kvtune analyze {shlex.quote(str(record))}")
        _exit_if_interrupted(document)

    def sweep(
        self, name: str, values: list[Any], folder: Path, overwrite: bool, options: dict[str, Any]
    ) -> None:
        """A run at each value, and the page of curves."""
        from kvtune.runtime.sweep import PAGE, sweep

        document = sweep(
            self.loaded,
            self.samples,
            self.plan,
            name,
            values,
            **self._shared(),
            out=folder,
            overwrite=overwrite,
            **options,
        )
        document["files"] = {"page": str(folder / PAGE)}
        self._finish(document, show_sweep)
        self.output.closing(folder, None)
        _exit_if_interrupted(document)

    def _shared(self) -> dict[str, Any]:
        return {
            "cache_fraction": self.cache,
            "workload": self.workload,
            "predict": self._predictor,
            "progress": self.output.progress,
        }

    @property
    def _predictor(self) -> StepPredictor | None:
        from kvtune.runtime.step_prediction import StepPredictor

        return None if self.machine is None else StepPredictor(self.machine, self.loaded)

    def _finish(self, document: dict[str, Any], show: Any) -> None:
        if self._predictor is not None:
            document["hardware"] = self._predictor.describe()
        for note in document["notes"]:
            self.output.note(note)
        self.output.result(document, lambda shown: show(shown, document))


def _exit_if_interrupted(document: dict[str, Any]) -> None:
    if document["interrupted"]:
        interruption = KeyboardInterrupt()
        interruption.add_note("the answers finished so far are reported")
        raise interruption


def _load(
    model: str,
    workload: Workload,
    wanted: Any,
    rope: str | None,
    device: str,
    dtype: str,
    seed: int,
    output: Output,
) -> tuple[LoadedModel, list[Sample]]:
    """The model and the samples; all that can be refused is, before the weights are read."""
    from kvtune.models import Rope, choose_device, load_model, open_model
    from kvtune.runtime.live import check_samples, longest_timeline
    from kvtune.runtime.room import check_room

    place = choose_device(device)
    opened = open_model(model, output.progress)
    count, turns = wanted.counts(workload)
    made = list(workload.samples(opened.tokenizer, wanted.context, count, turns, wanted.requests, seed))
    longest = longest_timeline(made, wanted.decode)
    chosen = Rope(rope, longest)
    check_samples(opened.geometry("float32", chosen), made, wanted.decode)
    check_room(opened, chosen, dtype, place, longest)
    return load_model(opened, device, dtype, chosen), made


def _profile_plan(path: Path, loaded: LoadedModel, context: int, output: Output) -> tuple[Plan, float | None]:
    """The plan of a profile at ``context`` tokens and its cache fraction; checks that it fits the model."""
    from kvtune.profiles import load_profile
    from kvtune.profiles.checks import check_model, plan_of

    profile = load_profile(path)
    check_model(profile, loaded)
    resolved = profile.resolve(context)
    if resolved.extrapolated:
        span = profile.context_length
        output.note(
            f"the profile was tuned for {span.min:,} to {span.max:,} tokens, this prompt has {context:,}"
        )
    return plan_of(resolved), profile.cache.fraction if profile.cache else None
