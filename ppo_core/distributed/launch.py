"""Read a launcher's environment (torchrun, accelerate, a study's worker): the run's processes. No torch."""

import os
from typing import Any

from ppo_core.errors import ConfigError


def size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return this process's number; 0 drives the run."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's number on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def command_prefix() -> list[str]:
    """Return the command prefix that starts as many processes on a host as this launch."""
    here = os.environ.get("LOCAL_WORLD_SIZE", str(size()))
    return ["torchrun", "--nproc_per_node", here] if size() > 1 else ["python"]


def fsdp() -> dict[str, Any]:
    """Return the hyperparameters for accelerate's FSDP flags; empty without FSDP."""
    if not _is_on("ACCELERATE_USE_FSDP"):
        return {}
    # "true" is the default, so only "false" is a choice
    keeps = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() == "false"
    return {"use_fsdp": True} | ({"fsdp_reshard_after_forward": False} if keeps else {})


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")


def require_known() -> None:
    """Raise ConfigError if the launcher asks for something unsupported, by its flags or by a config file."""
    unsupported = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "PARALLELISM_CONFIG": "a parallelism_config"}
    for variable, what in unsupported.items():
        if _is_on(f"ACCELERATE_USE_{variable}"):
            raise ConfigError(
                f"{what} is not supported; use: accelerate launch --multi_gpu, or --use_fsdp --fsdp_version 2, which "
                "shards like ZeRO-3, or with --fsdp_reshard_after_forward false like ZeRO-2. You may keep your "
                "--config_file"
            )
    version = os.environ.get("FSDP_VERSION", "1")
    if fsdp() and version != "2":
        raise ConfigError(f"FSDP version {version} is not supported; use: accelerate launch --fsdp_version 2")
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
        raise ConfigError(
            "accelerate launch was asked for several processes and started one, as it does with --cpu and with "
            "distributed_type: NO in a config file; use: torchrun --nproc_per_node 2 -m ppo_core …"
        )
