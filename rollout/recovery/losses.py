"""What the deaths of engines have cost."""

from dataclasses import dataclass


@dataclass
class Losses:
    """Counted since the start of the actor.

    restarts: engines started after a death. resumed: requests that went on with another engine and have ended. lost_s:
    from each death, when it was noticed, to the moment when the next engine was ready [s].
    """

    restarts: int = 0
    resumed: int = 0
    lost_s: float = 0.0

    def since(self, earlier: "Losses") -> "Losses":
        return Losses(self.restarts - earlier.restarts, self.resumed - earlier.resumed, self.lost_s - earlier.lost_s)
