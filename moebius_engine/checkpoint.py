"""The configuration of a checkpoint, by its folder or its name on the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_hf_config(model: str, server_args: Mapping[str, Any]) -> dict[str, Any]:
    """Its config.json, with the defaults of its model type.

    server_args: SGLang's; trust_remote_code and revision count. Raises ValueError that names the model.
    """
    from transformers import AutoConfig  # takes seconds

    try:
        config = AutoConfig.from_pretrained(
            model,
            trust_remote_code=server_args.get("trust_remote_code", False),
            revision=server_args.get("revision"),
        )
    except (OSError, ValueError, TypeError) as error:  # TypeError: JSON, but no object
        reason = " ".join(str(error).split()).rstrip(".")
        what = "is no checkpoint" if Path(model).exists() else "is no folder here, and no name that the Hub answers to"
        raise ValueError(
            f"model={model!r} {what}: {reason}; give a checkpoint's folder, with its config.json, or its name on the "
            "Hugging Face Hub"
        ) from error
    return config.to_dict()
