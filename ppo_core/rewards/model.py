"""Rewards by a sequence-classification model with one label. It re-tokenises texts with its own tokenizer."""

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.data.prompts import rendered, repeated_opening, tokenised
from ppo_core.data.task import RewardPart
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import RewardError, TaskError, one_line
from ppo_core.models.memory import ChunkRows
from ppo_core.models.networks import load_merged, prepare_layers
from ppo_core.rewards.batch import Batch, PartScores, read_answer

logger = logging.getLogger(__name__)
MOST_ROWS = 256
"""Rows of one pass, until memory runs out."""
NO_LIMIT = 10**9
"""A model_max_length of at least this means no limit."""


class RewardModel:
    """A reward model, in eval mode; on a CPU in float32, else in the dtype it was saved in.

    It reads prompt + response; for a chat, if its tokenizer has a chat template, the messages with the response as the
    assistant's next one. Text beyond its positions is cut off on the left. With `append_eos` it sees where a response
    ended: its own EOS follows one that ended by itself, unless its tokenizer closes every text. A chat's last message
    is closed as the template does; it stays open if the response was cut.

    Raises:
        TaskError: it cannot be loaded, or is not a reward model.
    """

    def __init__(self, part: RewardPart, device: torch.device, most_rows: int = MOST_ROWS) -> None:
        self.who = f'reward part "{part.name}": {part.where}'
        self.tokenizer, self.model = _load(part, device)
        self._warn_once = functools.cache(lambda message: logger.warning("%s: %s", self.who, message))
        self._pad_id = _pad_id(self.model, self.tokenizer)
        self._longest = _positions(self.model, self.tokenizer)
        self._kwargs = part.chat_template_kwargs
        self._text_eos, self._chat_eos, self._chat_closing = list[int](), list[int](), ""
        if part.append_eos:
            self._text_eos, self._chat_eos, self._chat_closing = _endings(self.tokenizer, self._kwargs)
            if self._text_eos:
                self._warn_once(f"{self.tokenizer.eos_token} is appended to responses that ended (see append_eos)")
            else:
                logger.info("%s: no EOS is appended: the tokenizer does it", self.who)
        self._chunks = ChunkRows(f"scoring by {part.name}", most_rows, ONE_PROCESS)

    def __call__(self, batch: Batch) -> PartScores:
        """Score the batch.

        Raises:
            RewardError: the chat template refuses a chat, or a score is not finite.
            OutOfMemory: a single row is too much.
        """
        rows = self.encode(batch)
        # The longest first: if memory runs out, it does so early, and rows of a pass need little padding.
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        logits = self._chunks.run(lambda most: self._logits([rows[row] for row in order], most), len(rows))
        scores = dict(zip(order, logits, strict=True))
        return read_answer([scores[row] for row in range(len(rows))], batch, self.who)

    @torch.no_grad()
    def _logits(self, rows: Sequence[list[int]], most: int) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(rows), most):
            part = [torch.tensor(ids) for ids in rows[start : start + most]]
            fill = self._fill(rows[start : start + most])
            # On the right, where position ids and the heads that read the first token expect it.
            ids = pad_sequence(part, batch_first=True, padding_value=fill)
            mask = pad_sequence([torch.ones_like(row) for row in part], batch_first=True)
            device = self.model.device
            logits: Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            scores.extend(logits[:, 0].float().tolist())
        return scores

    def _fill(self, rows: Sequence[list[int]]) -> int:
        """Return a padding id known to the model: a decoder's head reads the last token that differs from it.

        If model and tokenizer name none, it is an id with which no row ends.
        """
        ends = {ids[-1] for ids in rows}
        fill = next(i for i in itertools.count() if i not in ends) if self._pad_id is None else self._pad_id
        self.model.config.pad_token_id = self.model.config.get_text_config().pad_token_id = fill
        return fill

    def encode(self, batch: Batch) -> list[list[int]]:
        chats = [prompt.messages is not None for prompt in batch.prompts]
        if any(chats) and self.tokenizer.chat_template is None:
            self._warn_once("its tokenizer has no chat template; it reads chats as the policy's writes them")
            chats = [False] * len(batch)
        encoded: dict[int, list[int]] = {}
        for chat in (False, True):
            rows = [row for row, is_chat in enumerate(chats) if is_chat == chat]
            texts = [self._chat(batch, row) if chat else batch.texts[row] + batch.responses[row] for row in rows]
            eos = self._chat_eos if chat else self._text_eos
            after = [eos if batch.ended[row] else [] for row in rows]
            encoded |= zip(rows, self._tokenise(texts, after, special_tokens=not chat), strict=True)
        return [encoded[row] for row in range(len(batch))]

    def _chat(self, batch: Batch, row: int) -> str:
        messages = [*(batch.prompts[row].messages or ()), {"role": "assistant", "content": batch.responses[row]}]
        try:
            text = rendered(messages, self.tokenizer, self._kwargs)
            return text if batch.ended[row] else text.removesuffix(self._chat_closing)
        except Exception as error:  # templates raise errors of any class
            raise RewardError(
                f"{self.who}: its chat template refuses {batch.sample(row)}: {one_line(error)}"
            ) from error

    def _tokenise(self, texts: list[str], after: list[list[int]], *, special_tokens: bool) -> list[list[int]]:
        """Return the texts' ids followed by those in `after`, at least one each.

        Templates write the special tokens of a chat themselves.
        """
        if not texts:
            return []
        read = functools.partial(tokenised, tokenizer=self.tokenizer, special_tokens=special_tokens)
        rows = read(texts)
        if special_tokens and (twice := repeated_opening(texts, self.tokenizer)):
            self._warn_once(f"texts begin with {twice}, which its tokenizer adds by itself; it reads one")
        if self._longest is not None:
            room = [self._longest - len(ids) for ids in after]
            long = [row for row, ids in enumerate(rows) if len(ids) > room[row]]
            for row in long:  # by the tokenizer, which keeps its special tokens at both ends
                rows[row] = read([texts[row]], truncation=True, max_length=room[row])[0]
            if long:
                self._warn_once(f"of texts longer than the {self._longest} tokens it can read only the ends count")
        return [[*ids, *end] or [self._pad_id or 0] for ids, end in zip(rows, after, strict=True)]


def _endings(
    tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> tuple[list[int], list[int], str]:
    """Return how a response is seen to have ended: ids after a text and after a chat, EOS or none, and the template's
    text after a chat's last message, which is removed if the response was cut.
    """
    eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    closing = _chat_closing(tokenizer, chat_template_kwargs)
    leaves_open = closing is not None and not closing.strip()
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    closes_texts = whole[-1:] != bare[-1:]
    return [] if closes_texts else eos, eos if leaves_open else [], closing or ""


def _chat_closing(tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]) -> str | None:
    """Return the chat template's text after an assistant's last message; None if unknown."""
    if tokenizer.chat_template is None:
        return None
    probe = "a probe of the template"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": probe}]
    try:
        text = rendered(chat, tokenizer, chat_template_kwargs)
    except Exception:  # templates raise errors of any class; for the task's chats they are reported later
        return None
    _, found, closing = text.rpartition(probe)
    return closing if found else None


def _load(part: RewardPart, device: torch.device) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    who = f'reward part "{part.name}"'
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(part.where, truncation_side="left")
        model, missing = load_merged(AutoModelForSequenceClassification, part.where, dtype=dtype)
    except Exception as error:  # missing, damaged or unknown: every library below has its own classes
        raise TaskError(f"{who}: cannot load the model {part.where}: {one_line(error)}") from error
    if missing:  # transformers draws them at random
        raise TaskError(f"{who}: {part.where} is not a reward model: it was saved without {', '.join(missing[:3])}")
    if model.config.num_labels != 1:
        raise TaskError(f"{who}: the model {part.where} has {model.config.num_labels} labels; a reward needs one")
    nn.Module.to(model, device)
    model.eval()
    prepare_layers(model)
    return tokenizer, model


def _pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding id of the model, or of its tokenizer, or None.

    A head uses the model's own id to find the last token, even if that is EOS. A tokenizer that pads with EOS says
    nothing about the head, which would skip a text's end.
    """
    tokens = model.get_input_embeddings().num_embeddings
    pad_id = model.config.get_text_config().pad_token_id
    if pad_id is not None and 0 <= pad_id < tokens:
        return int(pad_id)
    pad_id = tokenizer.pad_token_id
    return None if pad_id is None or pad_id == tokenizer.eos_token_id or pad_id >= tokens else int(pad_id)


def _positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the maximum number of tokens that the model can read, or None if unknown."""
    config = model.config.get_text_config()
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)  # RoBERTa's start at padding_idx + 1
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < NO_LIMIT]
    return min(known, default=None)
