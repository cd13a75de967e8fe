"""A plain script that tunes, as a user writes one: `python plain.py POLICY` in a folder of its own."""

import sys

import ppo_tuner as pt

WANTED = "w3"


def said(text: str) -> float:
    return float(text.split().count(WANTED))


def often(completions: list[str], **columns: object) -> list[float]:
    return [said(text) for text in completions]


if __name__ == "__main__":
    study = pt.tune(
        policy=sys.argv[1],
        reward=often,
        prompts=[" ".join(f"w{(i + j) % 20}" for j in range(1 + i // 20)) for i in range(64)],
        kl_budget=5,
        trials=2,
        name="plain",
        total_episodes=int(sys.argv[2]),
        batch_size=8,
        response_length=6,
        stop_early=False,
        device="cpu",
    )
    print(study.answer)
