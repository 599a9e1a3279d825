"""Settings of the recovery."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat


class RecoveryConfig(BaseModel):
    """How RolloutActor recovers from the death of its engine. Refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_restarts: NonNegativeInt = Field(default=3, description="restarts within window_s; 0: none at all")
    window_s: PositiveFloat = Field(default=3600.0, description="how long a restart counts [s]")
    backoff_s: NonNegativeFloat = Field(
        default=1.0, description="pause before the second restart within window_s, doubled for each further one [s]"
    )
    wait_s: PositiveFloat = Field(default=600.0, description="how long a call waits for the engine to be back [s]")
    on_policy: bool = Field(
        default=False, description="drop the tokens of an unfinished request and generate it again from its prompt"
    )
    keep_weights: bool = Field(
        default=True, description="keep a copy of the last weight update in host memory, for the next engine"
    )
