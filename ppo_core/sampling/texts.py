"""Texts of responses and of their single tokens."""

import functools

from transformers import PreTrainedTokenizerBase

from ppo_core.sampling.sequences import Sequences

REPLACEMENT = "\ufffd"
"""Character that tokenizers decode incomplete bytes to."""


def response_texts(tokenizer: PreTrainedTokenizerBase, sequences: Sequences) -> tuple[str, ...]:
    """Return the responses' texts, decoded with their prompts: decoded alone, one can lose its leading space."""
    prompts, responses = sequences.prompt_tokens(), sequences.response_tokens()
    wholes = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    texts = (tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in (prompts, wholes))
    return tuple(_text_after(tokenizer, *row) for row in zip(prompts, responses, *texts, strict=True))


def _text_after(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], response: list[int], prompt_text: str, whole_text: str
) -> str:
    """Return a row's text after its prompt, whose end the response's first tokens may have changed.

    A character that the prompt leaves unfinished belongs to the response. A response that begins with an incomplete
    byte can spoil all bytes before it in one decoder (byte fallback): it is then decoded after less of the prompt.
    """
    if whole_text.startswith(prompt_text):
        return whole_text[len(prompt_text) :]
    finished = prompt_text.rstrip(REPLACEMENT)
    if finished != prompt_text and whole_text.startswith(finished):
        return whole_text[len(finished) :]
    dropped = 1
    while dropped < len(prompt):
        context = prompt[:-dropped]
        before, after = tokenizer.batch_decode([context, [*context, *response]], skip_special_tokens=True)
        if before and not before.endswith(REPLACEMENT) and after.startswith(before):
            return str(after[len(before) :])
        dropped *= 2
    return str(tokenizer.decode(response, skip_special_tokens=True))


class TokenTexts:
    """Text of each token by itself, for rewards and pages that look at single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._text = functools.cache(lambda token: str(tokenizer.decode([token])))

    def __call__(self, sequences: Sequences) -> list[list[str]]:
        """Return the response tokens' texts, row by row."""
        return [list(map(self._text, tokens)) for tokens in sequences.response_tokens()]
