"""Whether a model that is not on disk can be had from the hub at all, asked once and quickly. Never imports torch.

Loading it asks for several files and repeats each request for half a minute, with a line on stderr every time.
"""

from pathlib import Path

from ppo_core.errors import TaskError

FILES = ("config.json", "adapter_config.json")
"""A model or adapters that are in the cache have one of them there."""
SECONDS = 5.0
"""How long the hub has to answer."""


def require_reachable(model: str, where: str) -> None:
    """Raise TaskError where a hub id is not in the local cache and the hub gives no answer.

    A path is left alone; what a hub answers, a refusal too, is left to the loading. `where` names the setting that
    holds the id.
    """
    if Path(model).is_absolute():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache  # which takes a while to import
    from huggingface_hub.errors import HfHubHTTPError

    if any(isinstance(try_to_load_from_cache(model, name), str) for name in FILES):
        return
    try:
        HfApi().model_info(model, timeout=SECONDS)
    except HfHubHTTPError:
        return
    except Exception as error:  # what a connection raises is of the classes of hub's own libraries
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TaskError(
            f"{where} = {model!r}: there is no folder {model}, and the hub cannot be reached: {reason}"
        ) from error
