"""Rewards by a sequence-classification model with one label. It re-tokenises texts with its own tokenizer."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.errors import RewardError, TaskError
from ppo_core.layers import prepare_layers
from ppo_core.memory import ChunkRows
from ppo_core.rewards.answers import Answer, read_answer
from ppo_core.rewards.batch import Batch, one_line
from ppo_core.task import Prompt, RewardPart

logger = logging.getLogger(__name__)
MOST_ROWS = 256
"""Rows of one pass, until memory runs out."""
NO_LIMIT = 10**9
"""A tokenizer's model_max_length from here on says that it knows none."""


class RewardModel:
    """A part that is a model, in eval mode; on a CPU in float32, else in the dtype it was saved in.

    It reads prompt + response; of a chat, where its tokenizer has a chat template, the messages and the response as
    the assistant's next one. What its positions cannot hold is cut off on the left.

    Raises:
        TaskError: it cannot be loaded, or is no reward model.
    """

    def __init__(self, part: RewardPart, device: torch.device, most_rows: int = MOST_ROWS) -> None:
        self.who = f'reward part "{part.name}": {part.where}'
        self.tokenizer, self.model = _load(part, device)
        self.cut_texts = 0
        """How many texts were too long for the model so far."""
        self._pad_id = _set_pad_id(self.model, self.tokenizer)
        self._longest = _positions(self.model, self.tokenizer)
        self._chunks = ChunkRows(f"scoring by {part.name}", most_rows)

    def __call__(self, batch: Batch) -> Answer:
        """Score the batch.

        Raises:
            RewardError: the chat template refuses a chat, or a score is not finite.
            OutOfMemory: a single row is too much.
        """
        # The longest first: memory runs out early if it does, and rows of a pass need little padding.
        rows = sorted(enumerate(self._encode(batch)), key=lambda row: -len(row[1]))
        logits = self._chunks.run(lambda most: self._logits([ids for _, ids in rows], most), len(rows))
        scores = [0.0] * len(rows)
        for (row, _), score in zip(rows, logits, strict=True):
            scores[row] = score
        return read_answer(scores, batch, self.who)

    @torch.no_grad()
    def _logits(self, rows: Sequence[list[int]], most: int) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(rows), most):
            part = [torch.tensor(ids) for ids in rows[start : start + most]]
            # On the right, where position ids and the heads that read the first token expect it.
            ids = pad_sequence(part, batch_first=True, padding_value=self._pad_id)
            mask = pad_sequence([torch.ones_like(row) for row in part], batch_first=True)
            scores.extend(self._forward(ids, mask)[:, 0].float().tolist())
        return scores

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        device = self.model.device
        logits: Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits

    def _encode(self, batch: Batch) -> list[list[int]]:
        encoded: list[list[int]] = [[] for _ in range(len(batch))]
        chats = [self._is_chat(prompt) for prompt in batch.prompts]
        for chat in (False, True):
            rows = [row for row, is_chat in enumerate(chats) if is_chat == chat]
            texts = [self._chat(batch, row) if chat else batch.texts[row] + batch.responses[row] for row in rows]
            for row, ids in zip(rows, self._tokenise(texts, special_tokens=not chat), strict=True):
                encoded[row] = ids
        return encoded

    def _is_chat(self, prompt: Prompt) -> bool:
        return prompt.messages is not None and self.tokenizer.chat_template is not None

    def _chat(self, batch: Batch, row: int) -> str:
        messages = [dict(message) for message in batch.prompts[row].messages or ()]
        messages.append({"role": "assistant", "content": batch.responses[row]})
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template raises what it likes
            raise RewardError(
                f"{self.who}: its chat template refuses {batch.sample(row)}: {one_line(error)}"
            ) from error

    def _tokenise(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        """Return the texts' ids, at least one each; templates write the special tokens of a chat themselves."""
        if not texts:
            return []
        options: dict[str, Any] = {"add_special_tokens": special_tokens, "verbose": False}
        rows: list[list[int]] = self.tokenizer(texts, **options)["input_ids"]
        if self._longest is not None:
            long = [row for row, ids in enumerate(rows) if len(ids) > self._longest]
            for row in long:  # by the tokenizer, which keeps its special tokens at both ends
                cut = self.tokenizer(texts[row], truncation=True, max_length=self._longest, **options)
                rows[row] = cut["input_ids"]
            self._tell_cut(len(long))
        return [ids or [self._pad_id] for ids in rows]

    def _tell_cut(self, count: int) -> None:
        if count and not self.cut_texts:
            logger.warning(
                "%s: %d texts are longer than the %d tokens it can read; only their ends count (told once)",
                self.who,
                count,
                self._longest,
            )
        self.cut_texts += count


def _load(part: RewardPart, device: torch.device) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    who = f'reward part "{part.name}"'
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(part.where, truncation_side="left")
        with _no_report():
            model, info = AutoModelForSequenceClassification.from_pretrained(
                part.where, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # missing, damaged or unknown: every library below has its own classes
        raise TaskError(f"{who}: cannot load the model {part.where}: {one_line(error)}") from error
    if info["missing_keys"]:  # transformers draws them at random
        lacking = ", ".join(sorted(info["missing_keys"])[:3])
        raise TaskError(f"{who}: {part.where} is no reward model: it was saved without {lacking}")
    if model.config.num_labels != 1:
        raise TaskError(f"{who}: the model {part.where} has {model.config.num_labels} labels; a reward needs one")
    model.to(device).eval()
    prepare_layers(model)
    return tokenizer, model


@contextmanager
def _no_report() -> Iterator[None]:
    """Keep transformers from printing its table of missing weights, which our error tells in a line."""
    reporting = logging.getLogger("transformers.modeling_utils")
    before = reporting.level
    reporting.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reporting.setLevel(before)


def _set_pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills rows up, told to the model: a decoder's head reads the last token that is another."""
    known = (tokenizer.pad_token_id, model.config.get_text_config().pad_token_id, tokenizer.eos_token_id)
    pad_id = next((int(token) for token in known if token is not None), 0)
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = pad_id
    return pad_id


def _positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return how many tokens the model can read, or None where nothing says so."""
    config = model.config.get_text_config()
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)  # RoBERTa counts from padding_idx + 1
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < NO_LIMIT]
    return min(known, default=None)
