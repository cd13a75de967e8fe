"""Train the SFT policy of the arithmetic task, and save it as transformers does."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import cast

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_core.task import Progress
from ppo_core.tasks.arithmetic import POLICY, Recipe, prompts, pupils_answer
from ppo_core.tasks.teaching import IGNORED, SAMPLE, padded, reproducible, save, small_gpt2, train

# The tokenizer: each character is a token.

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of digits, `+` and `=`; decoding joins the characters."""
    ids = {token: i for i, token in enumerate((PAD, EOS, UNK, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


# Train the SFT policy of the arithmetic task, and save it as transformers does.


def build(folder: Path, recipe: Recipe, progress: Progress | None = None) -> None:
    """Train the policy by the recipe and save it with its tokenizer in a folder of its own under `folder`."""
    tokenizer = make_tokenizer()
    with reproducible(recipe.seed):
        config = small_gpt2(
            tokenizer, width=recipe.width, layers=recipe.layers, heads=recipe.heads, positions=recipe.positions
        )
        policy = GPT2LMHeadModel(config)
        lesson = _Lesson(policy, tokenizer, recipe.batch_size)
        train(lesson, "SFT policy", recipe.steps, recipe.learning_rate, recipe.seed, progress)
    save(policy, tokenizer, folder / POLICY)


def taught(recipe: Recipe) -> Iterator[str]:
    """Yield what the policy is taught, as lines: its characters, and a sample of sums as the pupil answers them."""
    yield CHARACTERS
    rng = Random(recipe.seed)
    for prompt in rng.choices(prompts().train, k=SAMPLE):
        yield prompt.text + pupils_answer(prompt, rng)


class _Lesson(nn.Module):
    """Teaches a causal language model to answer sums as the pupil does, end-of-text token included."""

    def __init__(self, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, batch_size: int) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size

    def forward(self, rng: Random) -> Tensor:
        """Return the mean cross-entropy of a batch's answer tokens, in nats."""
        rows, targets = [], []
        for prompt in rng.choices(prompts().train, k=self.batch_size):
            question = self._ids(prompt.text)
            answer = [*self._ids(pupils_answer(prompt, rng)), self.tokenizer.eos_token_id]
            rows.append([*question, *answer])
            targets.append([IGNORED] * (len(question) - 1) + answer + [IGNORED])
        ids = padded(rows, self.tokenizer.pad_token_id)
        logits = self.model(input_ids=ids, attention_mask=(ids != self.tokenizer.pad_token_id).long()).logits
        return functional.cross_entropy(logits.flatten(0, 1), padded(targets, IGNORED).flatten(), ignore_index=IGNORED)

    def _ids(self, text: str) -> list[int]:
        return cast(list[int], self.tokenizer.convert_tokens_to_ids(list(text)))
