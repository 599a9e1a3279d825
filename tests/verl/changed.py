"""Makes verl another verl: imported by it before its plug-ins (VERL_USE_EXTERNAL_MODULES)."""

import verl.utils.config


def validate_config(settings):
    """The same name with other parameters."""


verl.utils.config.validate_config = validate_config
