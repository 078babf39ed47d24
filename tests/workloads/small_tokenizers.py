"""Small, fast tokenizers of the kinds in use, and chat templates of the shapes in use."""

from __future__ import annotations

import string
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (  # Llama 2's: trims, and writes BOS and spaces around answers
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DATED = (  # Llama 3's shape
    "{{ bos_token + 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # Qwen 3's shape: the generation prompt differs from what earlier answers begin with
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
NO_TEMPLATE = None

_SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "The old miller repaired a broken lantern near the harbor before sunrise.",
    "What is the special magic number for silent-heron mentioned in the provided text?",
    "Some special magic numbers are hidden within the following text. system user assistant",
    "def describe(self, text):\n    return text.strip()\n\n\n    # the end\n",
    string.printable,
] * 20


def byte_level(template: str | None, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with GPT-2's pre-tokens, as SmolLM2 has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    return _finish(tokenizer, trainer, template, adds_bos)


def sentence_piece(template: str | None, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A BPE that puts a space before every text it is given, as Llama 2 has."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return _finish(
        tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=_SPECIAL), template, adds_bos
    )


def _finish(
    tokenizer: Tokenizer, trainer: trainers.BpeTrainer, template: str | None, adds_bos: bool
) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if adds_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


@dataclass
class CountingTokenizer:
    """A tokenizer that notes how many characters it is given, each time."""

    inner: PreTrainedTokenizerFast
    lengths: list[int] = field(default_factory=list)

    def __call__(self, text: str, **options: object) -> object:
        self.lengths.append(len(text))
        return self.inner(text, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)
