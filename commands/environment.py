"""What the process looks like before any command runs: streams, warnings, third-party chatter."""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
import warnings

from kvtune.commands.errors import debugging

# How every character beyond ASCII that kvtune itself writes is spelled where the encoding lacks it.
ASCII = {
    "→": "->",
    "←": "<-",
    "×": "x",
    "·": "*",
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "Δ": "d",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "±": "+-",
    "‖": "|",
    "√": "sqrt ",
    "✓": "ok",
    "✗": "x",
}


def prepare() -> None:
    """Make the streams accept any text, and keep other people's warnings out of the user's terminal."""
    codecs.register_error("kvtune", _spell_out)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="kvtune")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait must not spin: on a busy machine they would keep the working ones off the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if debugging():
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Bars that libraries draw beside kvtune's own; the hub's download bar does not heed this one.
    os.environ.setdefault("TQDM_DISABLE", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: a character that the encoding lacks, in ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in missing), error.end
