"""``kvtune live``: decode the real model under a policy or profile, against full attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune.commands.options import (
    Context,
    Device,
    Dtype,
    JsonFlag,
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
)
from kvtune.commands.output import Output, cell
from kvtune.errors import InputError

if TYPE_CHECKING:
    from kvtune.models import LoadedModel
    from kvtune.policies.plan import Plan

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
        int, typer.Option("--decode", help="Forced answer tokens of each turn, at least.")
    ] = 32,
    rope: RopeOption = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Decode for real under a policy with a block cache; report quality and hits beside the simulator's.

    Answers are forced to the same tokens with full attention and with the policy.
    """
    if profile is not None and (policy is not None or set_):
        raise InputError("--profile and --policy/--set exclude each other")
    if task is not None and prompts is not None:
        raise InputError("--task and --prompts exclude each other")
    settings = parse_settings(set_)
    output = Output(json=json, quiet=quiet)

    import kvtune
    from kvtune.capturing import CaptureOptions
    from kvtune.models import load_model
    from kvtune.policies import get_policy
    from kvtune.policies.plan import Plan
    from kvtune.workloads import PromptFile, get_workload

    plan = Plan(get_policy(policy or "wave_index", settings))
    workload = PromptFile(prompts) if prompts else get_workload(task or "niah_single")
    options = CaptureOptions(context=context, samples=samples, requests=requests, turns=turns, decode=decode)
    count, n_turns = options.counts(workload)
    loaded = load_model(model, device, dtype, rope, progress=output.progress)
    made = list(workload.samples(loaded.tokenizer, context, count, n_turns, requests, seed))
    if profile is not None:
        longest = max(len(s.context_ids) + len(s.requests[0].turns[0].question_ids) for s in made)
        plan, own_cache = _profile_plan(profile, loaded, longest, output)
        cache = own_cache if cache is None else cache
    document = kvtune.live(
        loaded,
        made,
        plan,
        cache_fraction=DEFAULT_CACHE if cache is None else cache,
        decode=decode,
        seed=seed,
        progress=output.progress,
    )
    output.result(document, lambda shown: _human(shown, document))


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


def _human(output: Output, document: dict[str, Any]) -> None:
    output.line(
        f"{document['policy']}: {document['answers']} answers, {document['decode_steps']} decode steps, "
        f"cache of {document['cache_fraction']:.1%} of the context"
    )
    nll, kl = document["delta_nll"], document["kl"]
    interval = "" if nll["low"] is None else f" [{cell(nll['low'])}, {cell(nll['high'])}]"
    hits, replayed = document["hit_ratio"], document["replayed_hit_ratio"]
    rows = [
        ["KL to full attention, mean", kl["mean"], "nats per step; 0 is lossless"],
        ["KL, 95th percentile", kl["p95"], ""],
        ["ΔNLL of the forced answers", f"{cell(nll['mean'])}{interval}", "nats per token; above 0 is worse"],
        ["top-1 agreement", f"{document['top1']:.1%}", "same most likely token"],
        [
            "page hit ratio, live",
            hits["page"],
            f"request {cell(hits['request'])}, token {cell(hits['token'])}",
        ],
        ["page hit ratio, simulated", replayed["page"], _replay_line(document["replay_equal"])],
        ["decode speed", f"{document['tokens_per_second']:.1f} tokens/s", _speed_line(document)],
    ]
    output.table(["measure", "value", "note"], rows)


def _replay_line(equal: bool | None) -> str:
    if equal is None:
        return "the policy asks nothing of a cache"
    return "replay of the same accesses: equal" if equal else "replay of the same accesses: NOT EQUAL"


def _speed_line(document: dict[str, Any]) -> str:
    return f"full attention {document['full_tokens_per_second']:.1f}; the CPU path is not built for speed"
