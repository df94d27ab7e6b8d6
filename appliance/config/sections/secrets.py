"""References to secrets: `secrets`."""

from typing import Annotated

from pydantic import Field

from appliance.config.key import LIVE, SERVICE, declare
from appliance.config.sections.values import Section


class SecretFile(Section):
    file: str = declare(
        effect=LIVE, affects=("gateway.api_keys", "gateway.trace_headers"), example="/run/secrets/api_keys"
    )
    """File that contains the secret."""


class SecretEnv(Section):
    # the launcher reads the value from its own environment
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = declare(effect=SERVICE, example="API_KEYS")
    """Environment variable that contains the secret."""
