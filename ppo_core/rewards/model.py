"""Rewards: whole texts in, one number each out."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppo_core.errors import TaskError


class RewardModel:
    """A sequence-classification model with one label. It re-tokenises the text with its own tokenizer."""

    def __init__(self, path: str, device: torch.device, chunk_rows: int = 256) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).to(device).eval()
        if self.model.config.num_labels != 1:
            raise TaskError(f"the reward model {path} has {self.model.config.num_labels} labels; a reward needs one")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.chunk_rows = chunk_rows

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Return the score of each prompt + response."""
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), self.chunk_rows):
            batch = self.tokenizer(texts[start : start + self.chunk_rows], return_tensors="pt", padding=True)
            logits = self.model(
                input_ids=batch["input_ids"].to(self.model.device),
                attention_mask=batch["attention_mask"].to(self.model.device),
            ).logits
            scores.extend(logits[:, 0].float().tolist())
        return scores
